"""`specbench calibrate`: find the form of itself that a target drafts with fastest, or a tree, or count its tokens."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.progress import StageProgress, starting
from specbench.cli.watchers import write_out
from specbench.options import DECODING, PROMPT, LengthOptions, ModelOptions, SamplingOptions
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.rules import parse_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.bench.prompts import Prompt
    from specbench.models.target import Target
    from specbench.tune.calibrate import Calibration
    from specbench.tune.ranks import TreeCalibration

_PROMPTS, _TOKENS = 9, 24
_PROMPTS_TO_COUNT, _TOKENS_TO_COUNT = 30, 64
_PROMPTS_OF_TREES, _TOKENS_OF_TREES = 12, 64
_WORTH = 1.05
"""A smaller speedup than this is within what the prediction is off by."""


_decoding = partial(typer.Option, rich_help_panel=DECODING)


@dataclass(frozen=True)
class _Asked:
    """What is looked for, and on which prompts."""

    prompts: Annotated[tuple[str, ...], opt.prompt_sets(rich_help_panel=PROMPT)] = ()
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=2,
            metavar="N",
            help="Prompts in all, taken in turn from the categories; every third one only checks the choice."
            f" Default: {_PROMPTS}, with --vocab {_PROMPTS_TO_COUNT}, with --tree {_PROMPTS_OF_TREES}.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        _decoding(
            "--tokens",
            min=2,
            metavar="N",
            help="Tokens of each answer to try the drafters on, or to count."
            f" Default: {_TOKENS}, with --vocab or --tree {_TOKENS_TO_COUNT}.",
        ),
    ] = None
    vocab: Annotated[
        int | None,
        _decoding(
            "--vocab",
            min=1,
            metavar="N",
            help="Count the tokens that the target writes instead, for --drafter MODEL:vocab=N, and say what the N most"
            " frequent cover. Counts serve every N.",
        ),
    ] = None
    tree: Annotated[
        bool,
        _decoding(
            "--tree",
            help="Find the tree that is best for --drafter at --temperature instead, for --tree static: count how often"
            " its candidates are kept, by rank.",
        ),
    ] = False
    int8: Annotated[
        bool | None, _decoding("--int8/--no-int8", help="Consider int8 layers. Default: on a CPU.")
    ] = None
    minutes: Annotated[
        float,
        _decoding(
            "--minutes", metavar="X", help="The search ends after so many, with the best found by then."
        ),
    ] = 10.0


def calibrate(
    ctx: typer.Context,
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafter: opt.DrafterOption = opt.DEFAULT_DRAFTER,
    models: Annotated[
        ModelOptions, opt.Fields("dtype", "device", "drafter_dtype", "drafter_device", "allow_pickle")
    ],
    asked: _Asked,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
    length: Annotated[LengthOptions, opt.Fields("verification")],
    json_output: opt.JsonOption = False,
    quiet: Annotated[bool, opt.output("--quiet", "-q", help="No progress.")] = False,
    traceback: opt.TracebackOption = False,  # noqa: ARG001 - read by specbench.cli.run
) -> None:
    """Choose which of its layers a target skips, in which precision, to draft for itself: --drafter self:calibrated.

    The choice is kept for this target, dtype and device. An interrupt leaves an earlier one as it was. With --vocab,
    count the tokens that the target writes instead; with --tree, find the best tree for a drafter.
    """
    from specbench.bench.prompts import load_prompts

    if asked.tree and asked.vocab is not None:
        raise UsageError("--tree and --vocab are both given.", "Give one of them.")
    of_trees = ("drafter", "temperature", "verification", "drafter_dtype", "drafter_device")
    if not asked.tree and (given := opt.given(ctx, *of_trees)):
        raise UsageError(f"{given[0]} is given without --tree.", "Add --tree, or leave it out.")
    if asked.tree:
        _find_tree(
            target,
            drafter,
            models,
            load_prompts(asked.prompts or ["all"], limit=asked.limit or _PROMPTS_OF_TREES),
            asked.tokens or _TOKENS_OF_TREES,
            60 * asked.minutes,
            sampling,
            length,
            json_output=json_output,
            quiet=quiet,
        )
        return
    if asked.vocab is not None:
        most = asked.limit or _PROMPTS_TO_COUNT
        _count(
            target,
            models,
            load_prompts(asked.prompts or ["all"], limit=most),
            asked.tokens or _TOKENS_TO_COUNT,
            asked.vocab,
            json_output=json_output,
            quiet=quiet,
        )
        return
    chosen = load_prompts(asked.prompts or ["all"], limit=asked.limit or _PROMPTS)
    with starting(quiet) as progress:
        from specbench.base.progress import quiet_transformers
        from specbench.bench.encoding import encode_turns
        from specbench.models.calibrations import FORMS
        from specbench.models.drafters import choice_key
        from specbench.models.prepare import prepare
        from specbench.tune.calibrate import CalibrationSettings
        from specbench.tune.calibrate import calibrate as search

        settings = CalibrationSettings(asked.tokens or _TOKENS, asked.int8, 60 * asked.minutes)
        with quiet_transformers():
            loaded, _ = prepare(parse_model(target), (), models, progress=progress)
            encoded = encode_turns(loaded, chosen)
        # No bar that draws by itself from here on: passes are timed.
    with StageProgress(quiet, animated=False) as progress:
        found = search(loaded, encoded, settings, progress=progress)
    FORMS.write(choice_key(loaded).name, found.choice)
    write_out(_as_json(found) if json_output else _as_text(found, loaded))


def _count(
    target: str,
    models: ModelOptions,
    prompts: Sequence[Prompt],
    tokens: int,
    vocab: int,
    *,
    json_output: bool,
    quiet: bool,
) -> None:
    """Count the tokens that a target writes, keep the counts, and say what so many of them cover."""
    with StageProgress(quiet) as progress:
        progress.update("starting", 0, None)
        from specbench.base.progress import quiet_transformers
        from specbench.bench.encoding import encode_turns
        from specbench.models.calibrations import COUNTS
        from specbench.models.prepare import prepare
        from specbench.tune.vocabulary import count_tokens

        with quiet_transformers():
            loaded, _ = prepare(parse_model(target), (), models, progress=progress)
            found = count_tokens(loaded, encode_turns(loaded, prompts), tokens, progress=progress)
    COUNTS.write(loaded.language_model.fingerprint, found)
    coverage = found.coverage(found.most_frequent(vocab, range(loaded.vocab_size)))
    tested, kinds = len(found.held_out), len(found.ranked)
    if json_output:
        figures = {
            "target": found.target,
            "vocab": vocab,
            "counted": found.counted,
            "kinds": kinds,
            "coverage": coverage,
            "tested": tested,
        }
        write_out(json.dumps(figures) + "\n")
        return
    lines = [f"{vocab:,} tokens cover {coverage:.1%} of {tested:,} tokens of other answers."]
    if kinds < vocab:
        lines.append(
            f"Only {kinds:,} of them were seen in {found.counted:,} tokens written and their prompts; the others are"
            " those with the lowest ids. More prompts (--limit) and longer answers (--tokens) show more."
        )
    lines.append(f"Kept for {found.target}: --drafter MODEL:vocab={vocab}")
    write_out(terminal_safe("".join(f"{line}\n" for line in lines), sys.stdout.encoding or "utf-8"))


def _find_tree(
    target: str,
    drafter: str,
    models: ModelOptions,
    prompts: Sequence[Prompt],
    tokens: int,
    seconds: float,
    sampling: SamplingOptions,
    length: LengthOptions,
    *,
    json_output: bool,
    quiet: bool,
) -> None:
    """Count what is kept of a drafter's candidates by rank, choose a tree and keep it."""
    if not seconds > 0:
        raise UsageError(f"The time for decoding is {seconds:g} s.", "Give more than 0.")
    spec = parse_drafter(drafter)
    rule = parse_rule("static-tree").with_options({"verification": length.verification})
    rule.check(spec)
    with starting(quiet) as progress:
        from specbench.base.progress import quiet_transformers
        from specbench.bench.encoding import encode_turns
        from specbench.decoding.sampling import Sampling
        from specbench.models.calibrations import TREES
        from specbench.models.drafters import refuse_keep
        from specbench.models.prepare import prepare
        from specbench.models.tree_choices import tree_key
        from specbench.tune.ranks import calibrate_tree

        refuse_keep(spec)
        transforms = Sampling(temperature=sampling.temperature)
        with quiet_transformers():
            loaded, (loaded_drafter,) = prepare(parse_model(target), [spec], models, progress=progress)
            encoded = encode_turns(loaded, prompts)
    with StageProgress(quiet, animated=False) as progress:
        key = tree_key(loaded, loaded_drafter.drafter, loaded_drafter.weights, transforms, rule)
        found = calibrate_tree(
            loaded,
            loaded_drafter.drafter,
            encoded,
            key,
            sampling=transforms,
            tokens=tokens,
            seconds=seconds,
            progress=progress,
        )
    TREES.write(key.name, found.choice)
    write_out(_tree_as_json(found) if json_output else _tree_as_text(found, loaded))


def _closing(
    target: Target, speedup: float, *, cut_short: str | None, instead: str, use: str, circumstances: str = ""
) -> list[str]:
    """The last lines of an answer: what is doubtful about a choice, for what it is kept, and how it is used.

    Args:
        target: What it was made for.
        speedup: That is predicted.
        cut_short: Before what the time was up; ``None`` if it was not.
        instead: A drafter beside ``lookup`` that may be better where there is hardly a gain.
        use: What to add to a command.
        circumstances: For what else it was made.
    """
    lines, kept = [], "Kept"
    if cut_short is not None:
        lines.append(f"The time was up before {cut_short}; --minutes gives it more.")
    if speedup < _WORTH:
        kept = "Kept all the same"
        hardly = "Plain decoding is predicted to be faster" if speedup < 1 else "That is hardly a gain"
        lines.append(f"{hardly}: try --drafter lookup, or {instead}.")
    where = f"{target.name} in {target.dtype} on {target.scorer.device.type}{circumstances}"
    return [*lines, f"{kept} for {where}: {use}"]


def _tree_as_json(found: TreeCalibration) -> str:
    counts = [
        {"depth": depth, "rank": rank, "tested": tested, "kept": kept}
        for (depth, rank), (tested, kept) in sorted(found.counts.items())
    ]
    figures = {
        "choice": {"tree": str(found.choice.rule), **asdict(found.choice)},
        "tokens_per_step": found.tree.tokens,
        "chain": {"gamma": found.chain.nodes, "speedup": found.chain.speedup},
        "counts": counts,
        "complete": found.complete,
    }
    return json.dumps(figures) + "\n"


def _tree_as_text(found: TreeCalibration, target: Target) -> str:
    choice = found.choice
    lines = [f"rank  kept at so many of {choice.tested} nodes"]
    lines += [f"{rank:4}  {share:6.1%}" for rank, share in enumerate(found.shares, start=1)]
    lines += [
        "",
        f"{choice.rule}: predicted {choice.speedup:.2f} × plain decoding with {found.tree.tokens:.2f} tokens per step;"
        f" the best chain, γ = {found.chain.nodes}, {found.chain.speedup:.2f} ×.",
    ]
    lines += _closing(
        target,
        choice.speedup,
        cut_short=None if found.complete else "all prompts were decoded",
        instead="suffix",
        circumstances=f" and {choice.circumstances}",
        use="--tree static",
    )
    return terminal_safe("".join(f"{line}\n" for line in lines), sys.stdout.encoding or "utf-8")


def _as_json(found: Calibration) -> str:
    forms = [
        {"drafter": str(candidate.form), **asdict(candidate.agreement), "cost": candidate.cost,
         "gamma": candidate.gamma, "speedup": candidate.speedup}
        for candidate in found.path
    ]  # fmt: skip
    choice = {"drafter": str(found.choice.form), **asdict(found.choice)}
    return json.dumps({"choice": choice, "path": forms, "complete": found.complete}) + "\n"


def _as_text(found: Calibration, target: Target) -> str:
    choice = found.choice
    names = [str(candidate.form) for candidate in found.path]
    width = max(map(len, names))
    lines = [f"{'drafter':{width}}    accepted      c   γ  predicted"]
    for candidate, name in zip(found.path, names, strict=True):
        mark = "  <" if candidate is found.best else ""
        lines.append(
            f"{name:{width}}  {candidate.agreement.accepted:10.2f} {candidate.cost:6.2f} {candidate.gamma:3}"
            f"  {candidate.speedup:7.2f} ×{mark}"
        )
    lines += [
        "",
        f"{choice.form}: accepts {choice.accepted:.2f} of {choice.tested} drafts on other prompts;"
        f" predicted {choice.speedup:.2f} × plain decoding at γ = {choice.gamma}.",
    ]
    lines += _closing(
        target,
        choice.speedup,
        cut_short=None if found.complete else "the search was",
        instead="lookup+self:calibrated",
        use="--drafter self:calibrated",
    )
    return terminal_safe("".join(f"{line}\n" for line in lines), sys.stdout.encoding or "utf-8")
