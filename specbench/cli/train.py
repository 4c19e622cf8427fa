"""`specbench train`: a drafter for a model, trained on what that model writes itself."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.progress import starting
from specbench.cli.watchers import write_out
from specbench.options import MODELS, PROMPT, ModelOptions, quantized
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    from specbench.models.heads import TrainedHead
    from specbench.train.settings import Measured

KindName = Literal["eagle", "medusa", "pass"]

TRAINING = "Training"
_SAID_EVERY_S = 60.0
"""On anything but a terminal, how far it has come is said so often."""

_training = partial(typer.Option, rich_help_panel=TRAINING)


@dataclass(frozen=True)
class _Training:
    """How a head is trained; fields of ``TrainingSettings``."""

    tokens: Annotated[
        int | None,
        _training(
            "--tokens", min=1, metavar="N", help="Train on so many tokens of the target's own answers."
        ),
    ] = None
    minutes: Annotated[
        float | None,
        _training(
            "--minutes",
            metavar="X",
            help="Or take this many minutes once the target is loaded, over all starts together; a step or measure"
            " that is under way is finished.",
        ),
    ] = None
    epochs: Annotated[
        int | None,
        _training(
            "--epochs",
            min=1,
            metavar="N",
            help="Train on each answer so often, at most. Default: 4 times, or as often as there are --minutes for.",
        ),
    ] = None
    depth: Annotated[
        int, _training("--depth", min=1, metavar="N", help="Tokens that the head learns to draft.")
    ] = 4
    layers: Annotated[
        int | None,
        _training("--layers", min=1, metavar="N", help="Decoder layers of an EAGLE head. Default: 2."),
    ] = None
    vocab: Annotated[
        int | None,
        _training(
            "--vocab",
            min=1,
            metavar="N",
            help="Tokens that it can draft, those that the target writes most often. Default: a quarter of the"
            " target's, and at least 8192.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        _training("--learning-rate", metavar="X", help="At its highest. Default: what suits the kind."),
    ] = None
    held_out: Annotated[
        int,
        _training(
            "--held-out",
            min=1,
            metavar="N",
            help="Prompts, at most a third of them, that are not trained on: the head is measured on them.",
        ),
    ] = 24
    store_states: Annotated[
        bool,
        _training(
            "--store-states",
            help="Store what the target's layers hold while it writes, until the training ends, and do not have it read"
            " its answers again: faster where that takes long, as on a CPU, for 4 to 32 KiB of disk per token.",
        ),
    ] = False
    seed: Annotated[int, _training("--seed", min=0, metavar="N", help="Of all that is random.")] = 0


@dataclass(frozen=True)
class _Lessons:
    """What is trained, and on which answers."""

    kind: Annotated[
        KindName,
        typer.Option("--kind", metavar="KIND", help="eagle, medusa or pass.", rich_help_panel=MODELS),
    ] = "eagle"
    prompts: Annotated[
        tuple[str, ...],
        opt.prompt_sets(
            rich_help_panel=PROMPT,
            help="Prompts that the target answers to learn from: a JSON Lines file or training; repeatable."
            " Default: training, the set for it that comes with specbench.",
        ),
    ] = ()
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=2,
            metavar="N",
            help="Length of an answer at most.",
            rich_help_panel=PROMPT,
        ),
    ] = 256


def train(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    lessons: _Lessons,
    models: Annotated[ModelOptions, opt.Fields("dtype", "device", "allow_pickle")],
    training: _Training,
    start: Annotated[
        str | None,
        _training(
            "--start",
            metavar="HEAD",
            help="Go on from a head that was trained for this target, with its draft vocabulary: a folder or hub id.",
        ),
    ] = None,
    out: Annotated[
        Path, opt.output("--out", "-o", metavar="FOLDER", help="Where the head goes: a drafter's folder.")
    ],
    compact: Annotated[
        bool,
        opt.output(
            "--compact",
            help="Write it small, in bytes and without the rows it takes from the target: for specbench alone.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        opt.output(
            "--resume",
            help="Go on with a training that was cut off; the options have to be the same, but for --minutes.",
        ),
    ] = False,
    json_output: opt.JsonOption = False,
    quiet: Annotated[bool, opt.output("--quiet", "-q", help="No progress.")] = False,
    traceback: opt.TracebackOption = False,  # noqa: ARG001 - read by specbench.cli.run
) -> None:
    """Train a head to draft for a target: --drafter FOLDER.

    The target answers prompts, a head learns from the answers, and the real decoder says on other prompts how many
    tokens a step brings. The best head so far is always in the folder. A training that was cut off goes on with
    --resume and loses a minute at most.
    """
    from specbench.bench.prompts import TRAINING_SET
    from specbench.train.prompts import training_prompts
    from specbench.train.settings import TrainingSettings

    begun = _head(start, allow_pickle=models.allow_pickle)
    settings = TrainingSettings(
        **vars(training),
        kind=lessons.kind,
        answer_tokens=lessons.max_new_tokens,
        compact=compact,
        start=None if begun is None else begun.fingerprint,
    )
    if quantized(models.dtype) is not None:
        raise UsageError(
            f"A head is not trained on an {models.dtype} target.", f"Leave out --dtype {models.dtype}."
        )
    sources = lessons.prompts or [TRAINING_SET]
    chosen = training_prompts(sources)
    with starting(quiet) as progress:
        from specbench.base.progress import quiet_transformers
        from specbench.models.devices import resolve_device
        from specbench.models.load import load_model
        from specbench.models.prepare import prepare
        from specbench.train.run import Training, processes
        from specbench.train.start import check_folder

        check_folder(out, resume=resume)
        group = processes(cpu=resolve_device(models.device).type == "cpu")
        with quiet_transformers():
            loaded, _ = prepare(parse_model(target), (), models, progress=progress)
            model = None
            if lessons.kind == "pass":  # gradients go through ordinary layers alone
                model = load_model(
                    target, models.target, allow_pickle=models.allow_pickle, tokenizer=False
                ).model
    display = _Display(quiet or not group.is_main_process)
    job = Training(
        loaded,
        chosen,
        settings,
        out,
        source=", ".join(Path(source).name for source in sources),
        resume=resume,
        start=begun,
        model=model,
        group=group,
        watch=display,
    )
    with display:
        best = job.run()
    if group.is_main_process:
        _tell(best, lessons.kind, out, as_json=json_output)


def _head(named: str | None, *, allow_pickle: bool) -> TrainedHead | None:
    """The head to go on from."""
    if named is None:
        return None
    from specbench.models.head_files import find_head
    from specbench.models.heads import load_head

    files = find_head(parse_model(named))
    if files is None:
        raise UsageError(f"{named!r} is no trained head.", "Name a head's folder or hub id with --start.")
    return load_head(files, allow_pickle=allow_pickle)


def _tell(best: Measured, kind: str, out: Path, *, as_json: bool) -> None:
    speedup = best.speedup(kind)
    if as_json:
        found = {"folder": str(out), "best": asdict(best), "expected_speedup": speedup}
        write_out(json.dumps(found) + "\n")
        return
    accepted = ", ".join(f"{share:.0%}" for share in best.accepted)
    lines = [
        f"{best.tokens_per_step:.2f} tokens per step on prompts it was not trained on; drafts kept of those tested,"
        f" by place: {accepted}.",
        *(f"  {name}: {figure:.2f}" for name, figure in sorted(best.categories.items())),
        *_verdict(best, speedup, out),
    ]
    write_out(terminal_safe("".join(f"{line}\n" for line in lines), sys.stdout.encoding or "utf-8"))


def _verdict(best: Measured, speedup: float | None, out: Path) -> list[str]:
    """Whether to draft with it."""
    if speedup is None:
        return [f"Kept in {out}: --drafter {out}"]
    cost = f"A step with it takes {best.step_cost:.2f} times a plain one"
    if speedup > 1:
        return [
            f"{cost}: about {speedup:.2f} times plain decoding, at the best draft length.",
            f"Kept in {out}: --drafter {out}",
        ]
    return [
        f"{cost}, more than its tokens pay for: drafting with it SLOWS decoding, to about {speedup:.2f} times plain.",
        f"Kept in {out}, to train on from: specbench train --start {out}, with more --minutes or --tokens.",
    ]


class _Display:
    """How far a training has come, on stderr: a line that changes on a terminal, and a line for each measure.

    Args:
        silent: Draw and say nothing.
    """

    def __init__(self, silent: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._silent = silent
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(24, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=silent or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._said = time.monotonic()

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, words: str, done: int = 0, total: int | None = None) -> None:
        """Show how far it has come."""
        self._bar.update(self._task, description=words, completed=done, total=total)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= _SAID_EVERY_S:
            self._said = now
            self._print(words)

    def wrote(self, tokens: int, wanted: int | None, left_s: float | None) -> None:
        """See ``Watch``."""
        of = "" if wanted is None else f" of {wanted:,}"
        left = "" if left_s is None else f", {_time(left_s)} left for it"
        self.say(f"the target has written {tokens:,}{of} tokens{left}", tokens, wanted)

    def trained(self, step: int, steps: int, loss: float, left_s: float) -> None:
        """See ``Watch``."""
        self.say(f"step {step} of {steps}, loss {loss:.2f}, {_time(left_s)} left", step, steps)

    def measured(self, measured: Measured, *, best: bool) -> None:
        """See ``Watch``."""
        loss = "untrained" if measured.loss is None else f"loss {measured.loss:.2f}"
        mark = ", the best so far" if best else ""
        self._said = time.monotonic()
        self._print(
            f"{_time(measured.seconds)}: {measured.tokens:,} tokens trained on, {loss},"
            f" {measured.tokens_per_step:.2f} tokens per step{mark}"
        )

    def _print(self, words: str) -> None:
        if not self._silent:
            self._console.print(words, markup=False, soft_wrap=True)


def _time(seconds: float) -> str:
    from specbench.cli.sweep_display import duration

    return duration(seconds)
