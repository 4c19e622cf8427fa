"""`specbench train`: a head for a target, trained on what that target writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from specbench.base.errors import UsageError
from specbench.base.record import to_dict
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.console import duration, write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.options import MODELS, PROMPT, ModelOptions, TemplateOptions, panel, quantized
from specbench.specs.models import parse_model
from specbench.train.settings import Measured, TrainingSettings

if TYPE_CHECKING:
    from specbench.models.heads import TrainedHead

KindName = Literal["eagle", "mtp", "medusa"]

_training, _prompt = panel("Training"), panel(PROMPT)


def train(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    kind: Annotated[KindName, panel(MODELS)("--kind KIND", "Kind of head: eagle, mtp or medusa.")] = "eagle",
    prompts: Annotated[
        list[str] | None,
        _prompt(
            "--prompts -p SET",
            "Prompts that the target answers to learn from: a JSON Lines file or training; repeatable. Default:"
            " training, the built-in set for it.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, _prompt("--max-new-tokens -n N", "Maximum length of an answer, in tokens.", min=2)
    ] = 256,
    template: TemplateOptions,
    models: ModelOptions,
    tokens: Annotated[
        int | None, _training("--tokens N", "Tokens of the target's own answers to train on.", min=1)
    ] = None,
    minutes: Annotated[
        float | None,
        _training(
            "--minutes X",
            "Training time instead of --tokens, counted from when the target is loaded and including the time"
            " before --resume; the current step or measurement is finished.",
        ),
    ] = None,
    depth: Annotated[int, _training("--depth N", "Tokens that the head learns to draft.", min=1)] = 4,
    layers: Annotated[
        int | None,
        _training(
            "--layers N", "Decoder layers of the head, for all kinds but mtp and medusa. Default: 2.", min=1
        ),
    ] = None,
    vocab: Annotated[
        int | None,
        _training(
            "--vocab N",
            "Draft vocabulary: the N tokens that the target writes most often. Default: a quarter of its vocabulary,"
            " at least 8192.",
            min=1,
        ),
    ] = None,
    seed: Annotated[int, _training("--seed N", "Seed of everything random.", min=0)] = 0,
    start: Annotated[
        str | None,
        _training(
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
        kind,
        tokens,
        minutes,
        answer_tokens=max_new_tokens,
        depth=depth,
        layers=layers,
        vocab=vocab,
        seed=seed,
        start=None if begun is None else begun.fingerprint,
    )
    if quantized(models.dtype) is not None:
        raise UsageError(
            f"Heads cannot be trained for an {models.dtype} target.", f"Leave out --dtype {models.dtype}."
        )
    sources = prompts or [TRAINING_SET]
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

        def report(measured: Measured, best: bool) -> None:
            if not quiet:
                bar.console.print(_line(measured, best), markup=False, soft_wrap=True)

        best = Training(
            loaded, chosen, settings, out,
            source=source, resume=resume, start=begun, update=bar.update, report=report,
        ).run()  # fmt: skip
    _show_result(best, kind, out, as_json=json_output)


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
        write_json({"folder": str(out), "best": to_dict(best), "expected_speedup": speedup})
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


def _line(measured: Measured, best: bool) -> str:
    loss = "untrained" if measured.loss is None else f"loss {measured.loss:.2f}"
    line = f"{duration(measured.seconds)}: {measured.tokens:,} tokens trained on, {loss},"
    return f"{line} {measured.tokens_per_step:.2f} tokens per step{', the best so far' if best else ''}"
