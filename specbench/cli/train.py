"""`specbench train`: a head for a target, trained on what that target writes itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.console import duration, write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.options import MODELS, PROMPT, ModelOptions, TemplateOptions, group, panel, quantized
from specbench.specs.models import parse_model
from specbench.train.settings import Measured, TrainingProgress, TrainingSettings

if TYPE_CHECKING:
    from specbench.models.heads import TrainedHead

KindName = Literal["eagle", "mtp", "medusa"]

TRAINING = "Training"
_training = group(TRAINING)


@dataclass(frozen=True)
class _Training:
    """How a head is trained; fields of ``TrainingSettings``."""

    tokens: int | None = _training(
        None, "--tokens N", "Tokens of the target's own answers to train on.", min=1
    )
    minutes: float | None = _training(
        None,
        "--minutes X",
        "Training time instead of --tokens, counted from when the target is loaded and including the time"
        " before --resume; the current step or measurement is finished.",
    )
    depth: int = _training(4, "--depth N", "Tokens that the head learns to draft.", min=1)
    layers: int | None = _training(
        None, "--layers N", "Decoder layers of the head, for all kinds but mtp and medusa. Default: 2.", min=1
    )
    vocab: int | None = _training(
        None,
        "--vocab N",
        "Draft vocabulary: the N tokens that the target writes most often. Default: a quarter of its vocabulary,"
        " at least 8192.",
        min=1,
    )
    seed: int = _training(0, "--seed N", "Seed of everything random.", min=0)


@dataclass(frozen=True)
class _Lessons:
    """What is trained, and on which answers."""

    kind: KindName = group(MODELS)("eagle", "--kind KIND", "Kind of head: eagle, mtp or medusa.")
    prompts: tuple[str, ...] = opt.prompts_field(
        help="Prompts that the target answers to learn from: a JSON Lines file or training; repeatable. Default:"
        " training, the built-in set for it."
    )
    max_new_tokens: int = group(PROMPT)(
        256, "--max-new-tokens -n N", "Maximum length of an answer, in tokens.", min=2
    )


def train(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    lessons: _Lessons,
    template: TemplateOptions,
    models: Annotated[ModelOptions, opt.Fields("dtype", "device", "allow_pickle")],
    training: _Training,
    start: Annotated[
        str | None,
        panel(TRAINING)(
            "--start HEAD",
            "Trained head of this target to start from, with its draft vocabulary: a folder or hub id.",
        ),
    ] = None,
    out: Annotated[
        Path, opt.output("--out -o FOLDER", "Output folder of the head; --drafter FOLDER drafts with it.")
    ],
    resume: Annotated[
        bool,
        opt.output(
            "--resume", "Continue an interrupted training, with the same options; --minutes may differ."
        ),
    ] = False,
    json_output: opt.JsonOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress.")] = False,
) -> None:
    """Train a head to draft for a target: --drafter FOLDER.

    The target answers prompts, the head learns from the answers, and real decoding of other prompts measures its
    tokens per step. The folder always holds the best head so far. --resume continues an interrupted training, which
    loses a minute at most.
    """
    from specbench.bench.prompts import TRAINING_SET
    from specbench.train.prompts import training_prompts

    begun = _head(start, allow_pickle=models.allow_pickle)
    settings = TrainingSettings(
        **vars(training),
        kind=lessons.kind,
        answer_tokens=lessons.max_new_tokens,
        start=None if begun is None else begun.fingerprint,
    )
    if quantized(models.dtype) is not None:
        raise UsageError(
            f"Heads cannot be trained for an {models.dtype} target.", f"Leave out --dtype {models.dtype}."
        )
    sources = lessons.prompts or [TRAINING_SET]
    chosen = [prompt.told(template) for prompt in training_prompts(sources)]
    with starting(quiet) as progress:
        from specbench.base.progress import quiet_transformers
        from specbench.models.prepare import prepare
        from specbench.train.run import Training
        from specbench.train.state import check_folder

        check_folder(out, resume=resume)
        with quiet_transformers():
            loaded, _ = prepare(parse_model(target), (), models, progress=progress)
    source = ", ".join(Path(source).name for source in sources)
    with StageProgress(quiet, animated=False) as bar:
        display = _Display(bar, silent=quiet)
        best = Training(
            loaded, chosen, settings, out, source=source, resume=resume, start=begun, progress=display
        ).run()
    _show_result(best, lessons.kind, out, as_json=json_output)


def _head(named: str | None, *, allow_pickle: bool) -> TrainedHead | None:
    """Return the head to start from."""
    if named is None:
        return None
    from specbench.models.heads import find_head, load_head

    files = find_head(parse_model(named))
    if files is None:
        raise UsageError(f"{named!r} is no trained head.", "Name a head's folder or hub id with --start.")
    return load_head(files, allow_pickle=allow_pickle)


def _show_result(best: Measured, kind: str, out: Path, *, as_json: bool) -> None:
    speedup = best.speedup(kind)
    if as_json:
        write_json({"folder": str(out), "best": asdict(best), "expected_speedup": speedup})
        return
    tokens = f"{best.tokens_per_step:.2f} tokens per step on held-out prompts"
    if speedup is None:
        lines = [f"The head reaches {tokens}."]
    elif speedup > 1:
        lines = [f"The head is predicted to decode at {speedup:.2f}× the speed of plain decoding: {tokens}."]
    else:
        lines = [f"The head SLOWS decoding, to {speedup:.2f}× the speed of plain decoding: {tokens}."]
    accepted = ", ".join(f"{share:.0%}" for share in best.accepted)
    cost = "" if best.step_cost is None else f"; a step takes {best.step_cost:.2f} times a plain one"
    lines.append(f"Drafted tokens accepted, by position: {accepted}{cost}.")
    if speedup is None or speedup > 1:
        lines.append(f"Draft with it:  specbench generate --drafter {out}")
    else:
        lines.append(f"Train it further:  specbench train --start {out}  (with more --minutes or --tokens)")
    write_out(terminal_safe("".join(f"{line}\n" for line in lines)))


class _Display(TrainingProgress):
    """A bar on a terminal, and a line for each measurement."""

    def __init__(self, progress: StageProgress, *, silent: bool) -> None:
        self._progress, self._silent = progress, silent

    def say(self, words: str, done: int = 0, total: int | None = None) -> None:
        """Show the progress."""
        self._progress.update(words, done, total)

    def report_writing(self, tokens: int, wanted: int | None, left_s: float | None) -> None:
        written = f"{tokens:,}" if wanted is None else f"{tokens:,} of {wanted:,}"
        self._progress.update("the target writes", tokens, wanted, note=f"{written} tokens", left_s=left_s)

    def report_step(self, step: int, steps: int, loss: float, left_s: float) -> None:
        note = f"step {step:,} of {steps:,}, loss {loss:.2f}"
        self._progress.update("training", step, steps, note=note, left_s=left_s)

    def report_measurement(self, measured: Measured, *, best: bool) -> None:
        loss = "untrained" if measured.loss is None else f"loss {measured.loss:.2f}"
        mark = ", the best so far" if best else ""
        line = f"{duration(measured.seconds)}: {measured.tokens:,} tokens trained on, {loss},"
        line += f" {measured.tokens_per_step:.2f} tokens per step{mark}"
        if not self._silent:
            self._progress.console.print(line, markup=False, soft_wrap=True)
