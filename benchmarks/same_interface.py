"""Compare what a user sees of this checkout with another one, such as the last release.

    python benchmarks/same_interface.py ../release            # the other checkout against this one
    python benchmarks/same_interface.py ../release . --help-only

Both run the same commands on one tiny model, each with its own code. Compared are the help of every command, the
fields (not values) of the JSON of `generate`, `check` and `compare` and of a sweep's files, and rows and
report of every run in this checkout's `results/`, which must be equal. Fields that depend on the machine, such as
warnings, are left out. Prints what differs; exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_BY_CHANCE = ("warnings", "disturbances")
_PROMPT = "The thing and the other thing of the thing."


def fields(value: Any, place: str = "") -> Iterator[str]:
    """Yield the places of values in a JSON document; a list is one place, and so are numeric keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _BY_CHANCE:
                yield from fields(item, f"{place}.{'N' if key.isdigit() else key}")
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from fields(item, f"{place}[]")
    yield place


class Look:
    """What one checkout shows, in a process that imports it."""

    def __init__(self, models: Path, runs: list[Path], folder: Path) -> None:
        self._target, self._small, self._runs, self._folder = (
            models / "target",
            models / "small",
            runs,
            folder,
        )

    def call(self, *words: object) -> str:
        """Return what a command writes to stdout."""
        from specbench.cli import run

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = run([str(word) for word in words])
        assert code == 0, f"{words} ends with {code}"
        return out.getvalue()

    def helps(self) -> dict[str, list[str]]:
        """Return the help of the program and of its commands."""
        from specbench.cli import app

        names = [each.name or each.callback.__name__ for each in app.registered_commands if each.callback]
        return {
            f"{' '.join(words)} --help": self.call(*words, "--help").splitlines()
            for words in ([], *([name] for name in names))
        }

    def printed(self) -> dict[str, list[str]]:
        """Return the fields of the JSON of commands, and of the files of a sweep."""
        small = ("--target", self._target, "--dtype", "float32")
        # Older checkouts have another name for it.
        flag = "--draft-policy" if "--draft-policy" in self.call("sweep", "--help") else "--length-policy"
        policies = (flag, "fixed", flag, "auto", "--gamma", 2)
        drafting = ("--drafter", self._small, "--max-new-tokens", 12)
        run = self._folder / "run"
        prompts = self._folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"id": "a", "category": "chat", "turns": [_PROMPT]}) + "\n")
        self.call(
            "sweep",
            *small,
            *drafting,
            "--drafter",
            "lookup",
            *policies,
            "-p",
            prompts,
            "-r",
            2,
            "-o",
            run,
            "-q",
        )
        texts = {
            "generate": self.call("generate", _PROMPT, *small, *drafting, "--json", "--quiet"),
            "generate --compare": self.call(
                "generate", _PROMPT, *small, *drafting, "--json", "--quiet", "--compare", "--repeats", 2
            ),
            "check": self.call("check", *small, *drafting, "-p", prompts, "--json", "--quiet"),
            "check, sampled": self.call(
                "check", *small, *drafting, "-p", prompts, "--json", "--quiet", "-t", 1
            ),
            "compare": self.call("compare", run, "--a", "plain", "--b", "lookup@2", "--json"),
        }
        texts |= {path.name: path.read_text() for path in (run / "run.json",)}
        found = {name: sorted(set(fields(json.loads(text)))) for name, text in texts.items()}
        for path in sorted(run.glob("*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.name] = sorted({place for row in rows for place in fields(row)})
        found["summary.csv"] = (run / "summary.csv").read_text().splitlines()[0].split(",")
        found["files"] = sorted(path.name for path in run.iterdir())
        return found

    def stored(self) -> dict[str, list[str]]:
        """Return the rows and the reports of stored runs."""
        import specbench

        found = {}
        for run in self._runs:
            results = specbench.load_results(run)
            frame = getattr(results, "generations", results)
            out = self._folder / run.name
            self.call("report", run, "--out", out)
            found[f"rows of {run.name}"] = frame.to_json(
                orient="records", lines=True, default_handler=str
            ).splitlines()
            found[f"report of {run.name}"] = (out / "report.md").read_text().splitlines()
            found[f"plots of {run.name}"] = sorted(path.name for path in (out / "plots").iterdir())
        return found


def look(checkout: Path, given: argparse.Namespace, models: Path) -> dict[str, list[str]]:
    """Return what a checkout shows, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [str(path.parent) for path in sorted((ROOT / "results").glob("*/run.json"))]
        environment = os.environ | {
            "PYTHONPATH": str(checkout), "SPECBENCH_CACHE": folder, "COLUMNS": "200", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        words = [sys.executable, __file__, "--show", *(["--help-only"] if given.help_only else [])]
        child = subprocess.run(
            [*words, str(models), folder, *runs],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        return dict(json.loads(child.stdout.splitlines()[-1]))


def show(help_only: bool, models: Path, folder: Path, runs: list[Path]) -> None:
    """Print what the imported package shows."""
    here = Look(models, runs, folder)
    found = here.helps() | ({} if help_only else {**here.printed(), **here.stored()})
    print(json.dumps(found))


def main() -> int:
    if sys.argv[1:2] == ["--show"]:
        rest = sys.argv[2:]
        help_only = rest[0] == "--help-only"
        models, folder, *runs = (Path(word) for word in rest[help_only:])
        show(help_only, models, folder, runs)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--help-only", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        if not given.help_only:
            sys.path.insert(0, str(ROOT / "tests"))
            from tiny import save_tiny

            save_tiny(models / "target")
            save_tiny(models / "small", seed=1, layers=1)
        old, new = (look(checkout.resolve(), given, models) for checkout in (given.old, given.new))
    differing = 0
    for name in dict.fromkeys([*old, *new]):
        lines = list(
            difflib.unified_diff(old.get(name, []), new.get(name, []), "old", "new", n=0, lineterm="")
        )
        if lines:
            differing += 1
            print(f"== {name}", *(line[:300] for line in lines[2:22]), sep="\n")
    print(json.dumps({"compared": len(new), "differing": differing}))
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
