"""`specbench check`: are configurations lossless, and are outputs from elsewhere the target's own?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.cli import options as opt
from specbench.cli.check_outputs import OutputsJob
from specbench.cli.check_request import CheckRequest, pieces_of, rounding_of
from specbench.cli.policy import RequestedPolicy, left_out, requested_policies, with_trees
from specbench.cli.progress import StageProgress, starting
from specbench.options import (
    MODELS,
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    SharedPolicyOptions,
    quantized,
)
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.progress import Progress
    from specbench.bench.prompts import Prompt
    from specbench.check.greedy import GreedyOutput
    from specbench.check.results import CheckResult
    from specbench.check.run import DecodingCheck
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec

_DEFAULT_PROMPTS, _DEFAULT_LIMIT, _DEFAULT_BIAS, _DEFAULT_MINUTES = "all", 12, 0.05, 5.0
_LARGEST_BIAS = 0.5
CHECKED = "What is checked"
_check = opt.panel(CHECKED)


@dataclass(frozen=True)
class _Checked:
    """Which outputs are checked, and how closely."""

    prompts: Annotated[tuple[str, ...], opt.prompts_option(CHECKED)] = ()
    category: Annotated[
        tuple[str, ...], _check("--category", "NAME", "Category of prompts; repeatable. Default: all.")
    ] = ()
    limit: Annotated[
        int | None,
        _check(
            "--limit",
            "N",
            "Number of prompts, taken in turn from the categories, or of lines of --outputs. Default:"
            f" {_DEFAULT_LIMIT} prompts, all lines.",
            min=1,
        ),
    ] = None
    sample: Annotated[
        bool,
        _check(
            "--sample",
            None,
            "Sample outputs too, above temperature 0, and count their tokens against the target's probabilities.",
        ),
    ] = False
    minutes: Annotated[
        float | None,
        _check(
            "--minutes",
            "X",
            f"Time for --sample, over all configurations together. Default: {_DEFAULT_MINUTES:g}.",
        ),
    ] = None
    bias: Annotated[
        float | None,
        _check(
            "--bias",
            "X",
            "Share of tokens that a bias would shift: --sample ends once it would have found one. Default:"
            f" {_DEFAULT_BIAS}.",
        ),
    ] = None
    outputs: Annotated[
        Path | None,
        _check(
            "--outputs",
            "FILE",
            'Greedy outputs of any engine to check instead: lines of {"prompt": text or ids, "token_ids": [...]}; -'
            " reads standard input.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.bias is not None and not 0 < self.bias <= _LARGEST_BIAS:
            raise UsageError(f"--bias is {self.bias:g}.", f"Give a share above 0, up to {_LARGEST_BIAS:g}.")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UsageError(f"--minutes is {self.minutes:g}.", "Give more than 0.")


def check(
    ctx: typer.Context,
    *,
    checked: _Checked,
    system: opt.SystemOption = None,
    chat: opt.ChatOption = None,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafter: Annotated[list[str] | None, opt.drafters_option(MODELS)] = None,
    models: ModelOptions,
    drafting: opt.PoliciesOptions,
    length: SharedPolicyOptions,
    decoding: Annotated[
        DecodingOptions,
        opt.Fields(
            max_new_tokens=64,
            words={
                "residual_adjustment": "Residual distribution for correction tokens. NOT LOSSLESS without it: above"
                " temperature 0 the check has to fail."
            },
        ),
    ],
    caching: CacheOptions,
    sampling: SamplingOptions,
    json_output: opt.JsonOption = False,
    verbose: opt.VerboseOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", None, "No progress, no notes.")] = False,
) -> None:
    """Check that configurations are lossless: greedy output, sampled distribution, and every step's invariants.

    Each drafter is checked with each draft policy and γ. Exit code 1 if something is wrong. docs/check.md says what is
    checked, and when a difference is a numerical tie.
    """
    caching = caching.with_kind(opt.cache_for(ctx, target, models, caching))
    with starting(quiet) as progress:
        from specbench.decoding.sampling import Sampling

        transforms = Sampling(**sampling.transforms)
        recipe = Recipe(
            parse_model(target), models=models, caching=caching, decoding=decoding, sampling=sampling
        )
        request = CheckRequest(
            ctx,
            recipe,
            chat,
            system,
            transforms,
            json_output,
            verbose,
            quiet,
            progress.console,
        )
        job: _DecodingJob | OutputsJob
        if checked.outputs is not None:
            job = OutputsJob(request, checked.outputs, limit=checked.limit)
        else:
            job = _DecodingJob(
                request,
                _chosen_prompts(checked),
                tuple(map(parse_drafter, dict.fromkeys(drafter or [opt.DEFAULT_DRAFTER]))),
                _requested_policies(drafting, length, recipe),
                checked,
            )
        job.prepare(progress)
    code = job.run()
    if code:
        raise typer.Exit(code)


def _requested_policies(
    drafting: opt.PoliciesOptions, length: SharedPolicyOptions, recipe: Recipe
) -> list[RequestedPolicy]:
    """The draft policies to check with."""
    from specbench.bench.axes import parse_gammas

    named, shared = with_trees(drafting.draft_policy, drafting.tree, length.given)
    return requested_policies(
        named,
        length.costs,
        parse_gammas(drafting.gamma) if drafting.gamma is not None else [],
        shared,
        greedy=recipe.sampling.temperature == 0,
        chained=opt.chained(recipe.models, recipe.caching),
    )


# -- configurations -------------------------------------------------------------------------------


def _chosen_prompts(checked: _Checked) -> list[Prompt]:
    from specbench.bench.prompts import load_prompts

    return load_prompts(
        checked.prompts or [_DEFAULT_PROMPTS], checked.category, checked.limit or _DEFAULT_LIMIT
    )


_LONG_S = 10.0
"""What takes less is not announced."""


def _about(seconds: float) -> str:
    return f"{max(1, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class _DecodingJob:
    """From options to checks that are ready to run: one of each drafter with each policy that applies to it."""

    def __init__(
        self,
        request: CheckRequest,
        prompts: Sequence[Prompt],
        drafters: Sequence[DrafterSpec],
        policies: Sequence[RequestedPolicy],
        checked: _Checked,
    ) -> None:
        self.request, self.prompts, self.drafters = request, prompts, drafters
        self.policies = policies
        self._samples = checked.sample and not request.sampling.greedy
        self._bias = checked.bias or _DEFAULT_BIAS
        self._minutes = checked.minutes or _DEFAULT_MINUTES
        self._checks: list[tuple[str, DecodingCheck]] = []

    def run(self) -> int:
        """Check, and print what was found; the exit code."""
        from specbench.base.progress import quiet_transformers
        from specbench.check.results import worst

        done: list[tuple[str, DecodingCheck]] = []
        complete = False
        try:
            with StageProgress(self.request.quiet) as progress, quiet_transformers():
                self.request.console = progress.console
                for number, (label, checking) in enumerate(self._checks):
                    done.append((label, checking))
                    several = len(self._checks) > 1
                    place = f"{label} ({number + 1} of {len(self._checks)}): " if several else ""
                    checking.progress = _Prefixed(progress, place)
                    checking.announce = None if number else self._announce
                    checking.check_steps()
                    if self._samples:
                        checking.check_samples(
                            bias=self._bias, seconds=60 * self._minutes / len(self._checks)
                        )
            complete = True
        finally:  # an interrupt loses nothing of what is checked
            results = [
                (label, checking.result(complete=complete or number + 1 < len(done)))
                for number, (label, checking) in enumerate(done)
            ]
            results = [(label, result) for label, result in results if result.greedy]
            if results:
                self._show(results, complete)
        return int(worst([result.verdict for _, result in results]) == "wrong")

    def prepare(self, progress: Progress) -> None:
        """Load the models, let ``transformers`` answer, and put the checks together.

        The target is loaded once: ``transformers`` decodes with it before its layers are packed.
        """
        from specbench.check.observe import DecodingSetup
        from specbench.check.run import Case, DecodingCheck
        from specbench.cli.setting import tokenizer_notes
        from specbench.models.prepare import check_models, prepare

        request = self.request
        drafting = [spec for spec in self.drafters if not spec.is_plain]
        for note in left_out([policy.spec for policy in self.policies], drafting):
            request.note(note)
        check_models(request.recipe.target, self.drafters, request.recipe.models, progress=progress)
        self._say_what_has_no_effect()
        rounded = quantized(request.recipe.models.dtype)
        prompts: list[tuple[str, list[int]]] = []
        references: list[Any] = []

        def answer(model: LanguageModel) -> None:
            """Let ``transformers`` decode with the target, before its layers are packed."""
            self._model = model
            request.apply_defaults(model)
            prompts.extend(self._encode(model, self.prompts))
            references.extend(
                [None] * len(prompts) if rounded else self._references(model, prompts, progress)
            )

        target, loaded_drafters = prepare(
            request.recipe.target,
            self.drafters,
            request.recipe.models,
            cache=request.recipe.caching.kind,
            bit_exact=request.recipe.caching.bit_exact,
            progress=progress,
            before_packing=answer,
        )
        for line in tokenizer_notes(each.outcome for each in loaded_drafters):
            request.note(line)
        if (parting := opt.widths_differ(target)) is not None:
            request.note(parting)
        cases = [
            Case(name, tuple(ids), reference)
            for (name, ids), reference in zip(prompts, references, strict=True)
        ]
        decoding = request.recipe.decoding
        plain_outputs: dict[tuple[int, ...], GreedyOutput] = {}
        chosen = [(each, policy) for each in loaded_drafters for policy in self._policies_for(each.spec)]
        for loaded_drafter, policy in chosen:
            plan, calibrated = policy.build(target, loaded_drafter, request.sampling)
            if calibrated:
                request.note(calibrated)
            setup = DecodingSetup(
                target=target.scorer,
                drafter=loaded_drafter.drafter,
                policy=plan,
                sampling=request.sampling,
                max_new_tokens=decoding.max_new_tokens,
                end_ids=decoding.end_ids(target.end_ids),
                stop=decoding.stop,
                tokenizer=target.tokenizer,
                seed=request.recipe.sampling.seed,
                first_target=decoding.first_target,
                residual_adjustment=decoding.residual_adjustment,
            )
            checking = DecodingCheck(
                setup,
                cases,
                dtype=target.scorer.rounding,
                no_transformers=f"it has no such {rounded} model" if rounded else None,
                bit_exact=request.recipe.caching.bit_exact or target.bit_exact,
                plain_outputs=plain_outputs,
            )
            self._checks.append((_label(loaded_drafter.name, setup.policy.name), checking))
        self._describe(target)

    def _say_what_has_no_effect(self) -> None:
        sampling = self.request.sampling
        names = (
            "top_k", "top_p", "min_p", "seed", "sample", "minutes", "bias", "residual_adjustment",
        )  # fmt: skip
        if sampling.greedy and (given := self.request.given(*names)):
            verb = "has" if len(given) == 1 else "have"
            self.request.note(f"{', '.join(given)} {verb} no effect at temperature 0: nothing is sampled.")

    def _policies_for(self, drafter: DrafterSpec) -> Sequence[RequestedPolicy]:
        """Those that apply to it; one, whichever, where nothing is drafted."""
        if drafter.is_plain:
            return self.policies[:1]
        return [policy for policy in self.policies if policy.spec.applies(drafter)]

    def _encode(self, model: LanguageModel, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
        """Ids and token ids of the prompts that leave room for an answer; of conversations, the first turn."""
        encoded = [
            (prompt.id, self.request.encode(model, prompt.turns[0], prompt.system)) for prompt in prompts
        ]
        limit = model.context_limit
        fitting = [(name, ids) for name, ids in encoded if limit is None or len(ids) < limit]
        if not fitting:
            raise UsageError(
                f"No prompt leaves room for an answer in the target's context of {limit} tokens.",
                "Choose shorter prompts.",
            )
        if left_out := len(encoded) - len(fitting):
            who = counted(left_out, "prompt leaves", "prompts leave")
            self.request.note(f"{who} no room for an answer in the target's context: left out.")
        return fitting

    def _references(
        self,
        model: LanguageModel,
        prompts: Sequence[tuple[str, list[int]]],
        progress: Progress,
    ) -> list[Any]:
        from specbench.check.reference import reference_output

        decoding = self.request.recipe.decoding
        answer = partial(
            reference_output,
            model.model,
            max_new_tokens=decoding.max_new_tokens,
            end_ids=decoding.end_ids(model.end_ids),
            stop=decoding.stop,
            tokenizer=model.tokenizer,
            repetition_penalty=self.request.sampling.repetition_penalty,
            context_rules=decoding.context_rules(model.defaults.applied),
            context_limit=model.context_limit,
        )
        answers = []
        began = time.monotonic()
        for done, (_, ids) in enumerate(prompts):
            progress.update("transformers' own answers", done, len(prompts))
            answers.append(answer(ids))
            if done == 0 and (seconds := (time.monotonic() - began) * (len(prompts) - 1)) >= _LONG_S:
                self.request.note(f"The answers of transformers itself will take about {_about(seconds)}.")
        return answers

    def _announce(self, seconds: float, plainly_s: float) -> None:
        """Say how long the check will take, by what its first prompt took; plain decoding is shared."""
        prompts = len(self._checks[0][1].cases)
        left = (prompts - 1) * seconds + (len(self._checks) - 1) * prompts * (seconds - plainly_s)
        said = [f"The check will take about {_about(left)} more."] if left >= _LONG_S else []
        if self._samples:
            said.append(f"Sampling will take at most {_about(60 * self._minutes)}.")
        if said:
            self.request.note(" ".join(said))

    def _describe(self, target: Target) -> None:
        request = self.request
        self._header: dict[str, Any] = {
            "check": "decoding",
            "target": target.name,
            "dtype": target.dtype,
            "device": str(target.scorer.device),
            "rounding": rounding_of(target),
            "options": {
                "cache": request.recipe.caching.kind,
                **opt.deciding(request.recipe, request.sampling, target.language_model),
                "residual_adjustment": request.recipe.decoding.residual_adjustment,
            },
        }

    def _show(self, results: Sequence[tuple[str, CheckResult]], complete: bool) -> None:
        """Print what was found, under what was checked."""
        from specbench.check.results import worst

        header, piece = self._header, pieces_of(self._model)
        checks = dict(self._checks)
        names = [(checks[label].setup.drafter.name, checks[label].setup.policy.name) for label, _ in results]
        if self.request.json_output:
            verdict = worst([result.verdict for _, result in results])
            found = [
                {"drafter": drafter, "draft_policy": policy, **result.to_dict(piece)}
                for (drafter, policy), (_, result) in zip(names, results, strict=True)
            ]
            self.request.write({**header, "verdict": verdict, "complete": complete, "configurations": found})
            return
        from rich.console import Console

        from specbench.check.render import check_parts
        from specbench.show.document import show

        console = Console(highlight=False)
        target = f"{header['target']} ({header['dtype']}), cache {header['options']['cache']}"
        parts = check_parts(
            results,
            target,
            dtype=header["rounding"],
            piece=piece,
            encoding=console.encoding,
            verbose=self.request.verbose,
        )
        show(console, *parts, wrap=console.is_terminal)


def _label(drafter: str, policy: str) -> str:
    """A configuration's name, as sweeps write it."""
    return drafter if drafter == "none" else f"{drafter}@{policy.removeprefix('fixed:gamma=')}"


class _Prefixed:
    """Progress of one configuration among several."""

    def __init__(self, progress: Progress, prefix: str) -> None:
        self._progress, self._prefix = progress, prefix

    def update(self, stage: str, done: int, total: int | None) -> None:
        self._progress.update(f"{self._prefix}{stage}", done, total)
