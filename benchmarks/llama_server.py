"""llama.cpp's server from the wheel xllamacpp, with the command line of `llama-server`.

    python benchmarks/llama_server.py --model TARGET.gguf --spec-type ngram-mod --spec-ngram-mod-n-max 8 --port 8080
    specbench sweep --engine llama.cpp --engine-command "python benchmarks/llama_server.py" --target TARGET.gguf

For machines without llama.cpp's own programs. It needs nothing but `pip install xllamacpp`, and takes those options of
`llama-server` that `specbench export` writes, and a few more.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

FIELDS = {
    "--model": "model.path",
    "--port": "port",
    "--ctx-size": "n_ctx",
    "--parallel": "n_parallel",
    "--threads": "cpuparams.n_threads cpuparams_batch.n_threads",
    "--temp": "sampling.temp",
    "--spec-draft-model": "speculative.draft.mparams.path",
    "--spec-draft-n-max": "speculative.draft.n_max",
    "--spec-draft-n-min": "speculative.draft.n_min",
    "--spec-draft-p-min": "speculative.draft.p_min",
    "--spec-draft-sampling": "speculative.draft.probabilistic",
    "--spec-ngram-mod-n-match": "speculative.ngram_mod.n_match",
    "--spec-ngram-mod-n-min": "speculative.ngram_mod.n_min",
    "--spec-ngram-mod-n-max": "speculative.ngram_mod.n_max",
    **{
        f"--spec-ngram-{kind}-{end}": f"speculative.ngram_{kind.replace('-', '_')}.{end.replace('-', '_')}"
        for kind in ("simple", "map-k", "map-k4v")
        for end in ("size-n", "size-m", "min-hits")
    },
}
"""Where the wheel's parameters have what an option says; two places are separated by a space."""


def parameters_of(arguments: Sequence[str], xllamacpp: Any) -> Any:
    """Return the wheel's parameters for a command line."""
    parser = argparse.ArgumentParser(
        description="llama.cpp's server from the wheel xllamacpp.", allow_abbrev=False
    )
    for option in FIELDS:
        parser.add_argument(option, required=option == "--model")
    parser.add_argument("--spec-type", default="")
    parser.add_argument("--metrics", action="store_true")
    given = vars(parser.parse_args(arguments))
    made = xllamacpp.CommonParams()
    made.n_ctx, made.n_parallel, made.endpoint_metrics = 8192, 1, given.pop("metrics")
    types = xllamacpp.common_speculative_type
    made.speculative.types = [
        getattr(types, f"COMMON_SPECULATIVE_TYPE_{word.replace('-', '_').upper()}")
        for word in filter(None, given.pop("spec_type").split(","))
    ] or [types.COMMON_SPECULATIVE_TYPE_NONE]
    for option, places in FIELDS.items():
        value = given[option[2:].replace("-", "_")]
        for place in places.split() if value is not None else ():
            *way, last = place.split(".")
            part = made
            for name in way:
                part = getattr(part, name)
            old = getattr(part, last)
            setattr(part, last, value == "probabilistic" if isinstance(old, bool) else type(old)(value))
    return made


def main(arguments: Sequence[str]) -> None:
    """Serve until the process is ended."""
    import xllamacpp

    server = xllamacpp.Server(parameters_of(arguments, xllamacpp))
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1:])
