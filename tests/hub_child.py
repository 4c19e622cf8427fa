"""Loads a model from the hub as often as it is told to; test_faults.py plays the hub.

For each line on standard input it loads ``org/name`` and answers with a line of JSON: the model's fingerprint, or the
error as the user would see it.
"""

from __future__ import annotations

import json
import sys
import time

from specbench.base.errors import SpecbenchError
from specbench.models.load import load_model
from specbench.options import LoadOptions


def main() -> None:
    time.sleep = lambda _: None  # the hub's client waits for half a minute before it gives up
    for _ in sys.stdin:
        try:
            model = load_model("org/name", LoadOptions("float32", "cpu"), tokenizer=False)
            answer = {"fingerprint": model.fingerprint}
        except SpecbenchError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
