"""`specbench calibrate`: choose a form of the target to draft with, or a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.console import write_json, write_lines
from specbench.cli.progress import StageProgress, starting
from specbench.options import DECODING, ModelOptions, SamplingOptions, SharedPolicyOptions, panel
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import parse_policy

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.prepare import LoadedDrafter
    from specbench.models.target import Target
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.policies import PolicySpec

_PROMPTS, _TOKENS = 9, 24
_PROMPTS_OF_TREES, _TOKENS_OF_TREES = 12, 64
_WORTH = 1.05
"""The error of predictions is as large as a smaller speedup."""


_decoding = panel(DECODING)


@dataclass(frozen=True)
class _Search:
    """Options of the search: its kind, prompts and time."""

    prompts: Annotated[tuple[str, ...], opt.prompts_option()] = ()
    limit: Annotated[
        int | None,
        opt.prompt_option(
            "--limit",
            "N",
            "Number of prompts, taken in turn from the categories; every third one only tests the choice. Default:"
            f" {_PROMPTS}, with --tree {_PROMPTS_OF_TREES}.",
            min=2,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        _decoding(
            "--tokens",
            "N",
            f"Tokens of each answer. Default: {_TOKENS}, with --tree {_TOKENS_OF_TREES}.",
            min=2,
        ),
    ] = None
    tree: Annotated[
        bool,
        _decoding(
            "--tree",
            None,
            "Draft tree for --tree static. Instead of a self-drafter, finds the best tree for --drafter at"
            " --temperature, from how often candidates of each rank are accepted.",
        ),
    ] = False
    int8: Annotated[
        bool | None,
        _decoding("--int8/--no-int8", None, "Also try int8 layers. On by default on a CPU."),
    ] = None
    minutes: Annotated[
        float, _decoding("--minutes", "X", "Time for the search; the best drafter found by then is kept.")
    ] = 10.0


def calibrate(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafter: opt.DrafterOption = opt.DEFAULT_DRAFTER,
    models: Annotated[
        ModelOptions, opt.Fields("dtype", "device", "drafter_dtype", "drafter_device", "allow_pickle")
    ],
    search: _Search,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
    length: Annotated[SharedPolicyOptions, opt.Fields("verification")],
    json_output: opt.JsonOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", None, "No progress.")] = False,
) -> None:
    """Choose the layers and precision with which a target drafts for itself (--drafter self:calibrated).

    The choice is kept for this target, dtype and device. With --tree, find the best draft tree for a drafter.
    """
    from specbench.bench.prompts import load_prompts

    if not search.minutes > 0:
        raise UsageError(f"--minutes is {search.minutes:g}.", "Give more than 0.")
    spec, policy = parse_drafter(drafter), parse_policy("static-tree")
    if search.tree:
        policy = policy.with_options({"verification": length.verification})
        policy.check(spec)
    (limit, tokens), find = (_PROMPTS, _TOKENS), partial(_find_form, int8=search.int8)
    if search.tree:
        limit, tokens = _PROMPTS_OF_TREES, _TOKENS_OF_TREES
        find = partial(_find_tree, spec, policy, sampling.temperature)
    prompts = load_prompts(search.prompts or ["all"], limit=search.limit or limit)
    effort = _Effort(target, models, prompts, search.tokens or tokens, 60 * search.minutes, quiet)
    figures, lines = find(effort)
    if json_output:
        write_json(figures)
    else:
        write_lines(lines)


@dataclass(frozen=True)
class _Effort:
    """Settings that all searches share: models, prompts, tokens of an answer, and a time limit."""

    target: str
    models: ModelOptions
    prompts: Sequence[Prompt]
    tokens: int
    seconds: float
    quiet: bool

    def load(self, drafters: Sequence[DrafterSpec] = ()) -> tuple[Target, list[LoadedDrafter], Any]:
        """Return the target, the drafters, and the token ids of the prompts."""
        with starting(self.quiet) as progress:
            from specbench.base.progress import quiet_transformers
            from specbench.bench.encoding import encode_conversation
            from specbench.models.drafters import refuse_keep
            from specbench.models.prepare import prepare

            for spec in drafters:
                refuse_keep(spec)
            with quiet_transformers():
                loaded, loaded_drafters = prepare(
                    parse_model(self.target), drafters, self.models, progress=progress
                )
                return loaded, loaded_drafters, [encode_conversation(loaded, each) for each in self.prompts]

    def progress(self) -> StageProgress:
        """Return a progress bar that draws only on updates, since forward passes are timed."""
        return StageProgress(self.quiet, animated=False)


def _find_tree(
    spec: DrafterSpec, policy: PolicySpec, temperature: float, effort: _Effort
) -> tuple[dict[str, Any], list[str]]:
    """Count which candidates of a drafter are kept, by rank; choose a tree from that and keep it."""
    loaded, (loaded_drafter,), encoded = effort.load([spec])
    from specbench.decoding.sampling import Sampling
    from specbench.models.calibrations import TREES, tree_key
    from specbench.tune.ranks import calibrate_tree

    sampling = Sampling(temperature=temperature)
    key = tree_key(loaded, loaded_drafter.drafter, loaded_drafter.weights, sampling, policy)
    with effort.progress() as progress:
        found = calibrate_tree(
            loaded,
            loaded_drafter.drafter,
            encoded,
            key,
            sampling=sampling,
            tokens=effort.tokens,
            seconds=effort.seconds,
            progress=progress,
        )
    TREES.write(key.name, found.choice)
    choice = found.choice
    counts = [
        {"depth": depth, "rank": rank, "tested": tested, "kept": kept}
        for (depth, rank), (tested, kept) in sorted(found.counts.items())
    ]
    figures = {
        "choice": {"tree": str(choice.policy), **asdict(choice)},
        "tokens_per_step": found.tree.tokens,
        "chain": {"gamma": found.chain.nodes, "speedup": found.chain.speedup},
        "counts": counts,
        "complete": found.complete,
    }
    lines = [f"rank  kept, of {choice.tested} nodes"]
    lines += [f"{rank:4}  {share:6.1%}" for rank, share in enumerate(found.shares, start=1)]
    lines += [
        "",
        f"{choice.policy}: predicted {choice.speedup:.2f} × plain decoding with {found.tree.tokens:.2f} tokens per"
        f" step; the best chain, γ = {found.chain.nodes}, {found.chain.speedup:.2f} ×.",
    ]
    return figures, lines + _closing(
        loaded,
        choice.speedup,
        missing=None if found.complete else "all prompts were decoded",
        instead="suffix",
        circumstances=f" and {choice.circumstances}",
        use="--tree static",
    )


def _find_form(effort: _Effort, *, int8: bool | None) -> tuple[dict[str, Any], list[str]]:
    """Choose the form of itself that a target drafts with fastest, and keep it."""
    loaded, _, encoded = effort.load()
    from specbench.models.calibrations import FORMS, form_key
    from specbench.tune.calibrate import calibrate as search

    with effort.progress() as progress:
        found = search(
            loaded, encoded, tokens=effort.tokens, int8=int8, seconds=effort.seconds, progress=progress
        )
    FORMS.write(form_key(loaded), found.choice)
    choice = found.choice
    forms = [
        {"drafter": str(candidate.form), **asdict(candidate.agreement), "cost": candidate.cost,
         "gamma": candidate.gamma, "speedup": candidate.speedup}
        for candidate in found.path
    ]  # fmt: skip
    figures = {
        "choice": {"drafter": str(choice.form), **asdict(choice)},
        "path": forms,
        "complete": found.complete,
    }
    width = max(len(str(candidate.form)) for candidate in found.path)
    lines = [f"{'drafter':{width}}    accepted      c   γ  predicted"]
    for candidate in found.path:
        mark = "  <" if candidate is found.best else ""
        lines.append(
            f"{candidate.form!s:{width}}  {candidate.agreement.accepted:10.2f} {candidate.cost:6.2f}"
            f" {candidate.gamma:3}  {candidate.speedup:7.2f} ×{mark}"
        )
    lines += [
        "",
        f"{choice.form}: accepts {choice.accepted:.2f} of {choice.tested} drafts on other prompts;"
        f" predicted {choice.speedup:.2f} × plain decoding at γ = {choice.gamma}.",
    ]
    return figures, lines + _closing(
        loaded,
        choice.speedup,
        missing=None if found.complete else "the search was",
        instead="lookup+self:calibrated",
        use="--drafter self:calibrated",
    )


def _closing(
    target: Target, speedup: float, *, missing: str | None, instead: str, use: str, circumstances: str = ""
) -> list[str]:
    """Return the last lines of an answer: doubts, what the choice is kept for, and how to use it.

    Args:
        target: The target that the choice is for.
        speedup: The predicted speedup.
        missing: The part of the search that the time was too short for; ``None`` if it was not.
        instead: Another drafter than ``lookup`` that can be better if the speedup is small.
        use: The options that use the choice.
        circumstances: Further circumstances that the choice is for.
    """
    lines, kept = [], "Kept"
    if missing is not None:
        lines.append(f"The time was up before {missing}; give more --minutes.")
    if speedup < _WORTH:
        kept = "Kept all the same"
        hardly = "Plain decoding is predicted to be faster" if speedup < 1 else "That is hardly a gain"
        lines.append(f"{hardly}: try --drafter lookup, or {instead}.")
    where = f"{target.name} in {target.dtype} on {target.scorer.device.type}{circumstances}"
    return [*lines, f"{kept} for {where}: {use}"]
