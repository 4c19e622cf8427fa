"""Run A/A tests of `sweep --server`: one server under two names.

    python benchmarks/aa_servers.py                                  # 20 sweeps over a `specbench serve` of its own
    python benchmarks/aa_servers.py --server http://host:8000/v1     # over one that runs; URL#MODEL, if it has several
    python benchmarks/aa_servers.py --server URL --conversations     # as `sweep --prompt-cache keep`
    python benchmarks/aa_servers.py --resume aa.jsonl --minutes 6    # in parts: repeat until done

Each sweep sends 8 new prompts 4 times to one server under two names, 32 tokens each, back to back, in opposite order
in every other repeat, and judges as `specbench compare` does. Goal: the 95% interval of one name over the other
covers 1 in at least 17 of 20 sweeps. With --conversations all turns of 8 conversations are sent, which find earlier
turns in the prompt cache, and in at least 19 of 20 sweeps nobody is said to lose its cache or to decay. Its own server
listens on a free port of this machine. Prints one line of JSON at the end; exit code 1 if a goal is missed or an answer
failed, 3 if sweeps are left.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from aa import COVERED, ITSELF, X, coverage, line_of, run_all, run_one
from parts import Parts

from specbench.base.errors import SpecbenchError
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import Salt, Sweep, SweepOptions, build_server_configs
from specbench.bench.prompts import Prompt, load_prompts
from specbench.options import DecodingOptions
from specbench.specs.servers import parse_servers

QUIET = 19 / 20
_ADDRESS = re.compile(r"http://\S+/v1")


def make_sweep(
    number: int, prompts: Sequence[Prompt], arguments: argparse.Namespace, salt: Salt = "none"
) -> Sweep:
    """Return the sweep of that number, with its own prompts, order and seed."""
    options = SweepOptions(
        gammas=(),
        policies=(),
        decoding=DecodingOptions(max_new_tokens=arguments.tokens, ignore_eos=True),
        repeats=arguments.repeats,
        turns=None if arguments.conversations else 1,
        prompt_cache="keep" if arguments.conversations else "avoid",
        seed=arguments.seed + number,
        cache="none",
        servers=(X, ITSELF),
        salt=salt,
    )
    asked = random.Random(f"{arguments.seed}/{number}").sample(list(prompts), arguments.limit)
    return Sweep(options, tuple(asked), tuple(build_server_configs(options, (X, ITSELF))))


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """Start a server in a process of its own, which ends with the block; return its address.

    Args:
        command: Starts it; it says its address on standard error.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stderr is not None
        said = list[str]()
        try:
            for line in process.stderr:
                said.append(line)
                if (found := _ADDRESS.search(line)) is not None:
                    break
            else:
                sys.exit(f"The server has not started: {''.join(said).strip()}")
            # Whatever else it says must not fill the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[0]
        finally:
            process.terminate()
            process.wait()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", metavar="URL", help="of a server that runs; else one is started")
    parser.add_argument("--target", default="smollm2-135m", help="of the server that is started")
    parser.add_argument("--drafter", default="lookup", help="its drafter")
    parser.add_argument("--conversations", action="store_true", help="all turns, with the prompt cache")
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=8, help="prompts in a sweep")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from this file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; --resume continues")
    given = parser.parse_args(arguments)
    if given.conversations and not given.server:
        parser.error(
            "--conversations needs a --server with a prompt cache, which specbench's own does not have"
        )
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    given = parse(arguments)
    until = time.monotonic() + 60 * given.minutes
    whose = ("server",) if given.server else ("target", "drafter")
    names = (*whose, "conversations", "limit", "tokens", "repeats", "seed")
    settings = {name: getattr(given, name) for name in names}
    parts = Parts(given.resume, settings)
    for number, part in enumerate(parts.done[: given.sweeps]):
        print(line_of(number, part), flush=True)
    if len(parts.done) < given.sweeps:
        try:
            with nullcontext(given.server) if given.server else started(_serve(given)) as address:
                _run(given, parts, address, until)
        except SpecbenchError as error:
            sys.exit(str(error))
    done = parts.done[: given.sweeps]
    result = {**coverage(done), "quiet": sum(not part["named"] for part in done)}
    complete = result["sweeps"] == given.sweeps
    print(json.dumps({"benchmark": "aa_servers", **settings, "complete": complete, **result}))
    if not complete:
        return 3
    missed = result["covered"] < COVERED * given.sweeps or result["quiet"] < QUIET * given.sweeps
    return int(missed or result["failed_generations"] > 0)


def _serve(given: argparse.Namespace) -> list[str]:
    words = ["serve", "--no-config", "--port", "0", "--target", given.target, "--drafter", given.drafter]
    return [sys.executable, "-m", "specbench", *words]


def _run(given: argparse.Namespace, parts: Parts, address: str, until: float) -> None:
    """Run the missing sweeps within the time limit."""
    prompts = load_prompts(["agent", "multi-turn-code"] if given.conversations else ["all"])
    servers = parse_servers([f"{X}={address}", f"{ITSELF}={address}"])
    made = ServerEngine(
        servers,
        keys={},
        decoding=DecodingOptions(ignore_eos=True),
        prompt_cache="keep" if given.conversations else "avoid",
    )
    with closing(made) as engine:
        target = engine.describe_target(DecodingOptions())

        def one(number: int, folder: Path) -> dict[str, Any]:
            sweep = make_sweep(number, prompts, given, engine.salt)
            return run_one(sweep, engine, target, folder, until, [ITSELF])

        run_all(given.sweeps, parts, one)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the server too
    sys.exit(main())
