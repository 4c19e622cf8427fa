"""`specbench train`: a head for a target, trained on what that target writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.console import say, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.options import MODELS, PROMPT, TemplateOptions, panel, quantized
from specbench.recipe import Recipe
from specbench.train import TrainingSettings

KindName = Literal["eagle", "medusa"]

_training, _prompt = panel("Training"), panel(PROMPT)


def train(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    kind: Annotated[KindName, panel(MODELS)("--kind KIND", "Kind of head: eagle or medusa.")] = "eagle",
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
    template: Annotated[TemplateOptions, opt.Fields("thinking")],
    tokens: Annotated[
        int, _training("--tokens N", "Tokens of the target's own answers to train on.", min=1)
    ] = 400_000,
    depth: Annotated[int, _training("--depth N", "Tokens that the head learns to draft.", min=1)] = 4,
    out: Annotated[
        Path, opt.output("--out -o FOLDER", "Output folder of the head; --drafter FOLDER drafts with it.")
    ],
    resume: Annotated[
        bool, opt.output("--resume", "Continue an interrupted training, with the same options.")
    ] = False,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress.")] = False,
) -> None:
    """Train a head to draft for a target: --drafter FOLDER.

    The target answers prompts, and the head learns from the answers. A checkpoint is saved every minute; Ctrl-C keeps
    the last one, and --resume continues from it.
    """
    from specbench.bench.prompts import TRAINING_SET
    from specbench.train.texts import training_prompts

    asked = Recipe.of_target(target)
    if (rounded := quantized(asked.models.dtype)) is not None:
        raise UsageError(f"Heads cannot be trained for an {rounded} target.", f"Leave {rounded} out.")
    sources = prompts or [TRAINING_SET]
    chosen = [prompt.told(template) for prompt in training_prompts(sources)]
    with starting(quiet) as progress:
        from specbench.models.prepare import prepare
        from specbench.train.trainer import check_folder, train_head

        check_folder(out, resume=resume)
        loaded, _ = prepare(asked.target, (), asked.models, progress=progress)
    settings = TrainingSettings(kind, tokens, answer_tokens=max_new_tokens, depth=depth)
    source = ", ".join(Path(source).name for source in sources)
    with StageProgress(quiet, animated=False) as bar:
        try:
            train_head(loaded, chosen, settings, out, source=source, resume=resume, update=bar.update)
        except KeyboardInterrupt:
            say(f"the training in {str(out)!r} is kept: add --resume to go on.")
            raise
    write_out(
        f"The head is in {out}.\n"
        f"Measure what it gains:  specbench generate --compare --drafter {out} PROMPT\n"
    )
