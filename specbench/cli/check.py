"""`specbench check`: are configurations lossless, and are outputs from elsewhere the target's own?"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli import options as opt
from specbench.cli.rule import LengthRule, left_out, length_rules
from specbench.textsafe import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from specbench.backends.torch.caches import CacheKind
    from specbench.bench.prompts import Prompt
    from specbench.check.greedy import PlainRun
    from specbench.check.outputs import GivenOutput, Refused
    from specbench.check.results import CheckResult, Piece
    from specbench.check.run import DecodingCheck
    from specbench.decoding.sampling import Sampling
    from specbench.models.load import LanguageModel
    from specbench.models.prepare import Target
    from specbench.options import ModelOptions
    from specbench.progress import Progress
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.models import ModelSpec

__all__ = ["check"]

_CHECK = "What is checked"
_DEFAULT_PROMPTS, _DEFAULT_LIMIT, _DEFAULT_BIAS = "all", 12, 0.05
_LARGEST_BIAS = 0.5
_NEED_NO_DECODING = (
    "drafter", "drafter_dtype", "drafter_device", "drafter_device_map", "length_policy", "egag", "gamma", "gamma_min",
    "gamma_max", "egag_ema_beta", "egag_scale", "confidence", "adapt_confidence", "entropy_lambda", "svip_threshold",
    "siblings",
    "costs", "max_new_tokens", "stop", "bit_exact", "first_target", "no_residual_adjustment", "temperature", "top_k",
    "top_p", "min_p", "seed", "bias",
)  # fmt: skip
"""Options that say nothing about outputs made elsewhere."""


def check(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            "-p",
            metavar="SET",
            autocompletion=opt.complete_prompts,
            help="A built-in set, 'all' (the default), or a JSON Lines file; repeatable.",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option("--category", metavar="NAME", help="Only these; repeatable.", rich_help_panel=_CHECK),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            metavar="N",
            help=f"Prompts in all, taken in turn from the categories ({_DEFAULT_LIMIT}); with --outputs, lines (all).",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    bias: Annotated[
        float | None,
        typer.Option(
            "--bias",
            metavar="X",
            help=f"Above temperature 0: find sampled tokens that are off by so much ({_DEFAULT_BIAS}; 0.01 takes 25"
            " times as long).",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(
            "--outputs",
            metavar="FILE",
            help='Check greedy outputs of any engine instead: a line each, {"prompt": text or ids, "token_ids": [...]};'
            " - reads standard input.",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="A system message.", rich_help_panel=opt.PROMPT),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap prompts with the chat template, or continue them as they are. Default: chat if there is one.",
            rich_help_panel=opt.PROMPT,
        ),
    ] = None,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="DRAFTER",
            autocompletion=opt.complete_drafters,
            help=f"A word of `specbench drafters` or a model; repeatable. Default: {opt.DEFAULT_DRAFTER}.",
            rich_help_panel=opt.MODELS,
        ),
    ] = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    drafter_dtype: opt.DrafterDtypeOption = "auto",
    drafter_device: opt.DrafterDeviceOption = "auto",
    drafter_device_map: opt.DrafterDeviceMapOption = None,
    allow_pickle: opt.PickleOption = False,
    length_policy: Annotated[
        list[str] | None,
        typer.Option(
            "--length-policy",
            metavar="RULE",
            autocompletion=opt.complete_rules,
            help="Draft-length rule, as generate takes it; repeatable.",
            rich_help_panel=opt.LENGTH,
        ),
    ] = None,
    egag: opt.EgagOption = False,
    gamma: Annotated[
        str | None,
        typer.Option(
            "--gamma",
            "-g",
            metavar="RANGE",
            help="γ of fixed (5) and, in the first step, of heuristic: 4, 1..8, 2..16..2 (with a step) or 1,2,4.",
            rich_help_panel=opt.LENGTH,
        ),
    ] = None,
    gamma_min: opt.GammaMinOption = None,
    gamma_max: opt.GammaMaxOption = None,
    egag_ema_beta: opt.EgagBetaOption = None,
    egag_scale: opt.EgagScaleOption = None,
    confidence: opt.ConfidenceOption = None,
    adapt_confidence: opt.AdaptConfidenceOption = False,
    entropy_lambda: opt.EntropyLambdaOption = None,
    svip_threshold: opt.SvipThresholdOption = None,
    siblings: opt.SiblingsOption = None,
    costs: opt.CostsOption = None,
    max_new_tokens: opt.MaxNewTokensOption = 64,
    stop: opt.StopOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    cache: opt.CacheOption = "dynamic",
    bit_exact: opt.BitExactOption = False,
    compiled: opt.CompileOption = False,
    first_target: opt.FirstTargetOption = True,
    no_residual_adjustment: Annotated[
        bool,
        typer.Option(
            "--no-residual-adjustment",
            help="NOT LOSSLESS: draw corrected tokens from p. Above temperature 0 the check has to find it.",
            rich_help_panel=opt.DECODING,
        ),
    ] = False,
    temperature: opt.TemperatureOption = 0.0,
    top_k: opt.TopKOption = 0,
    top_p: opt.TopPOption = 1.0,
    min_p: opt.MinPOption = 0.0,
    repetition_penalty: opt.RepetitionPenaltyOption = 1.0,
    model_defaults: opt.ModelDefaultsOption = True,
    seed: opt.SeedOption = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=opt.OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no notes.", rich_help_panel=opt.OUTPUT)
    ] = False,
    traceback: opt.TracebackOption = False,  # noqa: ARG001 - read by specbench.cli.run
) -> None:
    """Check that configurations are lossless: greedy output, sampled distribution, and every step's invariants.

    Each drafter is checked with each rule and γ. Exit code 1 if something is wrong.

    docs/check.md says what is checked, and when a difference is a numerical tie.
    """
    from specbench.cli.progress import StageProgress
    from specbench.errors import UsageError

    if any(not item for item in stop or ()):
        raise UsageError("A stop string is empty.", "Give --stop at least one character.")
    if outputs is not None and (prompts or category):
        raise UsageError("--outputs brings its own prompts.", "Leave --prompts and --category out.")
    if bias is not None and not 0 < bias <= _LARGEST_BIAS:
        raise UsageError(f"--bias is {bias:g}.", f"Give a share above 0, up to {_LARGEST_BIAS:g}.")
    kind = opt.cache_for(ctx, cache, target, dtype, bit_exact, compiled)
    with StageProgress(quiet) as progress:
        progress.update("starting", 0, None)
        from specbench.bench.grid import parse_gammas
        from specbench.decoding.sampling import Sampling
        from specbench.options import ModelOptions
        from specbench.specs.drafters import parse_drafter
        from specbench.specs.models import parse_model

        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        models = ModelOptions(
            dtype, device, device_map, drafter_dtype, drafter_device, drafter_device_map, allow_pickle
        )
        request = _Request(
            ctx,
            parse_model(target),
            models,
            kind,
            chat,
            system,
            model_defaults,
            json_output,
            quiet,
            progress.console,
        )
        job: _DecodingJob | _OutputsJob
        if outputs is not None:
            job = _OutputsJob(request, outputs, sampling, ignore_eos=ignore_eos, limit=limit)
        else:
            rule_options = {
                "gamma_min": gamma_min,
                "gamma_max": gamma_max,
                "egag_ema_beta": egag_ema_beta,
                "egag_scale": egag_scale,
                "confidence": confidence,
                "adapt_confidence": adapt_confidence,
                "entropy_lambda": entropy_lambda,
                "svip_threshold": svip_threshold,
                "siblings": siblings,
            }
            rules = length_rules(
                [*(length_policy or []), *(["egag"] if egag else [])],
                costs,
                parse_gammas(gamma) if gamma is not None else [],
                rule_options,
                greedy=sampling.greedy,
                chained=opt.chained(bit_exact, dtype),
            )
            job = _DecodingJob(
                request,
                _chosen_prompts(prompts, category, limit),
                tuple(map(parse_drafter, dict.fromkeys(drafter or [opt.DEFAULT_DRAFTER]))),
                rules,
                bias or _DEFAULT_BIAS,
                bit_exact,
                {
                    "sampling": sampling,
                    "max_new_tokens": max_new_tokens,
                    "stop": tuple(stop or ()),
                    "first_target": first_target,
                    "residual_adjustment": not no_residual_adjustment,
                    "seed": seed,
                },
                ignore_eos=ignore_eos,
            )
        job.prepare(progress)
    code = job.run()
    if code:
        raise typer.Exit(code)


# -- what both checks need -------------------------------------------------------------------------


class _Request:
    """What was asked for, whatever is checked."""

    def __init__(
        self,
        ctx: typer.Context,
        target: ModelSpec,
        models: ModelOptions,
        cache: CacheKind,
        chat: bool | None,
        system: str | None,
        model_defaults: bool,
        json_output: bool,
        quiet: bool,
        console: Console,
    ) -> None:
        self.ctx, self.target, self.models, self.cache = ctx, target, models, cache
        self.chat, self.system = chat, system
        self.model_defaults, self.json_output, self.quiet = model_defaults, json_output, quiet
        self.console = console

    def applied(self, model: LanguageModel, sampling: Sampling) -> Sampling:
        """The transforms with the model's own settings, as far as they are to be applied; says which they are."""
        for line in model.defaults.notes(applied=self.model_defaults):
            self.note(line)
        return sampling.with_defaults(model.defaults, model.vocab_size) if self.model_defaults else sampling

    def given(self, *names: str) -> list[str]:
        """Those of the named options that stand on the command line."""
        return opt.given(self.ctx, *names)

    def note(self, text: str) -> None:
        """Say something on stderr that the user should know."""
        from specbench.cli.summary import show_notes

        if not self.quiet:
            show_notes([text], apart=False, console=self.console)

    def encode(self, model: LanguageModel, text: str, system: str | None = None) -> list[int]:
        """Token ids of a prompt. A system message without a place of its own goes in front of the text."""
        from specbench.errors import UsageError
        from specbench.generate import encode_prompt

        if model.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        if system is not None and self.system is None:
            with suppress(UsageError):
                return encode_prompt(model.tokenizer, text, chat=self.chat, system=system)
            return encode_prompt(model.tokenizer, f"{system}\n\n{text}", chat=self.chat)
        return encode_prompt(model.tokenizer, text, chat=self.chat, system=self.system)

    def write(self, figures: dict[str, Any]) -> None:
        """Print one JSON object."""
        from specbench.cli.watchers import write_out

        write_out(json.dumps(figures, allow_nan=False) + "\n")


def _pieces(model: LanguageModel) -> Piece | None:
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _rounding(target: Target) -> str:
    """The dtype whose rounding decides, by name."""
    return str(target.scorer.rounding).removeprefix("torch.")


# -- configurations -------------------------------------------------------------------------------


def _chosen_prompts(prompts: list[str] | None, category: list[str] | None, limit: int | None) -> list[Prompt]:
    from specbench.bench.prompts import load_prompts

    return load_prompts(prompts or [_DEFAULT_PROMPTS], category or (), limit or _DEFAULT_LIMIT)


_LONG_S = 10.0
"""What takes less need not be said beforehand."""


def _about(seconds: float) -> str:
    return f"{max(1, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class _DecodingJob:
    """From options to checks that are ready to run: one of each drafter with each rule that applies to it."""

    def __init__(
        self,
        request: _Request,
        prompts: Sequence[Prompt],
        drafters: Sequence[DrafterSpec],
        rules: Sequence[LengthRule],
        bias: float,
        bit_exact: bool,
        settings: dict[str, Any],
        *,
        ignore_eos: bool,
    ) -> None:
        self.bit_exact = bit_exact
        self.request, self.prompts = request, prompts
        self.drafters = drafters
        self.rules, self.bias, self.settings, self.ignore_eos = rules, bias, settings, ignore_eos
        self._checks: list[tuple[str, DecodingCheck]] = []

    def run(self) -> int:
        """Check, and print what was found; the exit code."""
        from specbench.check.results import worst
        from specbench.cli.progress import StageProgress
        from specbench.progress import quiet_transformers

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
                    checking.announce = self._say_cost_of_samples
                    checking.greedy()
                    if not self.settings["sampling"].greedy:
                        checking.exact()
                        checking.sampled()
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
        from specbench.models.prepare import check_models, prepare

        request = self.request
        drafting = [spec for spec in self.drafters if not spec.is_plain]
        for note in left_out([rule.spec for rule in self.rules], drafting):
            request.note(note)
        check_models(request.target, self.drafters, request.models, progress=progress)
        self._say_what_has_no_effect()
        int8 = request.models.dtype == "int8"
        prompts: list[tuple[str, list[int]]] = []
        references: list[Any] = []

        def answer(model: LanguageModel) -> None:
            """Let ``transformers`` decode with the target, before its layers are packed."""
            self._model = model
            self.settings["sampling"] = request.applied(model, self.settings["sampling"])
            prompts.extend(self._encode(model, self.prompts))
            count = sum(len(self._rules_for(spec)) for spec in self.drafters)
            references.extend(
                [None] * len(prompts) if int8 else self._references(model, prompts, count, progress)
            )

        target, proposers = prepare(
            request.target,
            self.drafters,
            request.models,
            cache=request.cache,
            bit_exact=self.bit_exact,
            progress=progress,
            beforehand=answer,
        )
        if target.widths_differ is not None:
            request.note(opt.widths_differ(target.widths_differ))
        cases = [
            Case(name, tuple(ids), reference)
            for (name, ids), reference in zip(prompts, references, strict=True)
        ]
        plain_runs: dict[tuple[int, ...], PlainRun] = {}
        chosen = [(each, rule) for each in proposers for rule in self._rules_for(each.spec)]
        for proposer, rule in chosen:
            setup = DecodingSetup(
                target=target.scorer,
                drafter=proposer.drafter,
                policy=rule.build(proposer.name),
                end_ids=() if self.ignore_eos else tuple(target.end_ids),
                tokenizer=target.tokenizer,
                **self.settings,
            )
            checking = DecodingCheck(
                setup,
                cases,
                bias=self.bias,
                dtype=target.scorer.rounding,
                no_transformers="it has no such int8 model" if int8 else None,
                bit_exact=self.bit_exact or target.bit_exact,
                plain_runs=plain_runs,
            )
            self._checks.append((_label(proposer.name, setup.policy.name), checking))
        self._describe(target)

    def _say_what_has_no_effect(self) -> None:
        sampling: Sampling = self.settings["sampling"]
        names = ("top_k", "top_p", "min_p", "seed", "bias", "no_residual_adjustment")
        if sampling.greedy and (given := self.request.given(*names)):
            verb = "has" if len(given) == 1 else "have"
            self.request.note(f"{', '.join(given)} {verb} no effect at temperature 0: nothing is sampled.")

    def _rules_for(self, drafter: DrafterSpec) -> Sequence[LengthRule]:
        """Those that apply to it; one, whichever, where nothing is drafted."""
        if drafter.is_plain:
            return self.rules[:1]
        return [rule for rule in self.rules if rule.spec.applies(drafter)]

    def _encode(self, model: LanguageModel, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
        """Ids and token ids of the prompts that leave room for an answer; of conversations, the first turn."""
        from specbench.errors import UsageError

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
        configurations: int,
        progress: Progress,
    ) -> list[Any]:
        import time

        from specbench.check.reference import ReferenceSettings, reference_output

        settings = ReferenceSettings(
            max_new_tokens=self.settings["max_new_tokens"],
            end_ids=() if self.ignore_eos else tuple(model.end_ids),
            stop=self.settings["stop"],
            tokenizer=model.tokenizer,
            repetition_penalty=self.settings["sampling"].repetition_penalty,
            model_defaults=model.defaults.applied if self.request.model_defaults else {},
            context_limit=model.context_limit,
        )
        answers = []
        began = time.monotonic()
        for done, (_, ids) in enumerate(prompts):
            progress.update("transformers' own answers", done, len(prompts))
            answers.append(reference_output(model.model, ids, settings))
            if done == 0:
                seconds = (time.monotonic() - began) * len(prompts)
                self._say_how_long(seconds, configurations)
        return answers

    def _say_how_long(self, plainly_s: float, configurations: int) -> None:
        from specbench.check.run import estimated_seconds

        sampled = not self.settings["sampling"].greedy
        seconds = estimated_seconds(plainly_s, sampled=sampled, configurations=configurations)
        self.request.note(
            f"This will take about {_about(seconds)}{', the samples apart' if sampled else ''}."
        )

    def _say_cost_of_samples(self, outputs: int, seconds: float) -> None:
        if seconds >= _LONG_S:
            self.request.note(
                f"Sampling {outputs:,} outputs will take about {_about(seconds)}, less if a bias is proven before."
            )

    def _describe(self, target: Target) -> None:
        sampling: Sampling = self.settings["sampling"]
        settings = self.settings
        self._header: dict[str, Any] = {
            "check": "decoding",
            "target": target.name,
            "dtype": target.dtype,
            "device": str(target.scorer.device),
            "rounding": _rounding(target),
            "options": {
                "cache": self.request.cache,
                "max_new_tokens": settings["max_new_tokens"],
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or None,
                "top_p": sampling.top_p if sampling.top_p < 1 else None,
                "min_p": sampling.min_p or None,
                "repetition_penalty": sampling.repetition_penalty
                if sampling.repetition_penalty != 1
                else None,
                "model_defaults": (self.request.model_defaults and target.language_model.defaults.applied)
                or None,
                "seed": settings["seed"],
                "first_target": settings["first_target"],
                "residual_adjustment": settings["residual_adjustment"],
                "stop": list(settings["stop"]) or None,
                "bit_exact": self.bit_exact or None,
                "ignore_eos": self.ignore_eos or None,
            },
        }

    def _show(self, results: Sequence[tuple[str, CheckResult]], complete: bool) -> None:
        """Print what was found, under what was checked."""
        from specbench.check.results import worst

        header, piece = self._header, _pieces(self._model)
        checks = dict(self._checks)
        names = [(checks[label].setup.drafter.name, checks[label].setup.policy.name) for label, _ in results]
        if self.request.json_output:
            verdict = worst([result.verdict for _, result in results])
            found = [
                {"drafter": drafter, "length_policy": policy, **result.to_dict(piece)}
                for (drafter, policy), (_, result) in zip(names, results, strict=True)
            ]
            self.request.write({**header, "verdict": verdict, "complete": complete, "configurations": found})
            return
        from rich.console import Console

        from specbench.check.render import show_check, show_checks
        from specbench.textsafe import terminal_safe

        console = Console(highlight=False)
        line = f"{header['target']} ({header['dtype']})"
        if len(self._checks) == 1:
            line += f", drafter {names[0][0]}, {names[0][1]}"
        line += f", cache {header['options']['cache']}"
        console.print(terminal_safe(line, console.encoding), markup=False, soft_wrap=not console.is_terminal)
        console.print()
        if len(self._checks) == 1:
            show_check(results[0][1], console, dtype=header["rounding"], piece=piece)
        else:
            show_checks(results, console, dtype=header["rounding"], piece=piece)


def _label(drafter: str, policy: str) -> str:
    """A configuration's name, as sweeps write it."""
    return drafter if drafter == "none" else f"{drafter}@{policy.removeprefix('fixed:gamma=')}"


class _Prefixed:
    """Progress of one configuration among several."""

    def __init__(self, progress: Progress, prefix: str) -> None:
        self._progress, self._prefix = progress, prefix

    def update(self, stage: str, done: int, total: int | None) -> None:
        self._progress.update(f"{self._prefix}{stage}", done, total)


# -- outputs of other engines ----------------------------------------------------------------------


class _OutputsJob:
    """A check of greedy outputs that were made elsewhere."""

    def __init__(
        self, request: _Request, file: Path, sampling: Sampling, *, ignore_eos: bool, limit: int | None
    ) -> None:
        self.request, self.sampling, self.ignore_eos = request, sampling, ignore_eos
        if without := request.given(*_NEED_NO_DECODING):
            verb = "has" if len(without) == 1 else "have"
            request.note(f"{', '.join(without)} {verb} no effect on outputs that were made elsewhere.")
        self._lines = _read_lines(file, limit)

    def prepare(self, progress: Progress) -> None:
        """Load the target, and see which lines it can score."""
        from specbench.models.load import check_options
        from specbench.models.prepare import load_target

        request = self.request
        check_options(request.models.target)
        self._target = load_target(
            request.target,
            request.models.target,
            cache=request.cache,
            progress=progress,
            allow_pickle=request.models.allow_pickle,
        )
        self.sampling = request.applied(self._target.language_model, self.sampling)
        self._given, self._refused = _fitting(request, self._target, self._lines)

    def run(self) -> int:
        """Check, and print what was found; the exit code."""
        from rich.console import Console

        from specbench.check.outputs import OutputResult, Refused, check_output
        from specbench.check.render import show_outputs
        from specbench.check.results import OutputsResult
        from specbench.cli.progress import StageProgress
        from specbench.errors import RunError

        target = self._target
        rounding = _rounding(target)
        end_ids = () if self.ignore_eos else target.end_ids
        done: list[OutputResult] = []
        failed: list[Refused] = []
        complete = False
        try:
            with StageProgress(self.request.quiet) as progress:
                for number, (each, prompt) in enumerate(self._given):
                    progress.update("scoring outputs", number, len(self._given))
                    try:
                        scorer = target.scorer
                        done.append(
                            check_output(scorer, each, prompt, self.sampling, end_ids, scorer.rounding)
                        )
                    except (RunError, MemoryError, RuntimeError) as error:  # no memory for this line, say
                        failed.append(Refused(each.line, _reason(error)))
            complete = True
        finally:  # an interrupt loses nothing of what is checked
            result = OutputsResult(tuple(done), tuple(self._refused), tuple(failed), complete)
            header = {
                "check": "outputs",
                "target": target.name,
                "dtype": target.dtype,
                "rounding": rounding,
            }
            piece = _pieces(target.language_model)
            if self.request.json_output:
                self.request.write({**header, **result.to_dict(piece)})
            else:
                show_outputs(result, Console(highlight=False), dtype=rounding, piece=piece)
        if result.verdict == "wrong" or failed:
            return 1
        return 2 if self._refused else 0


def _reason(error: BaseException) -> str:
    from specbench.errors import SpecbenchError
    from specbench.progress import one_line

    return str(error) if isinstance(error, SpecbenchError) else one_line(str(error)) or type(error).__name__


def _read_lines(file: Path, limit: int | None) -> list[GivenOutput | Refused]:
    """All lines, read before any model is loaded."""
    from specbench.check.outputs import read_outputs
    from specbench.errors import UsageError
    from specbench.files import reason
    from specbench.textsafe import visible

    name = "standard input" if str(file) == "-" else visible(str(file))
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The outputs in {name} cannot be read: {reason(error)}.", "Check the path."
        ) from None
    lines = list(read_outputs(data.split(b"\n"), limit))
    if not lines:
        raise UsageError(f"There are no outputs in {name}.", "Give each a line of its own.")
    return lines


def _fitting(
    request: _Request, target: Target, lines: Sequence[GivenOutput | Refused]
) -> tuple[list[tuple[GivenOutput, list[int]]], list[Refused]]:
    """The outputs this target can score, with their prompts' token ids, and the lines that it cannot."""
    from specbench.check.outputs import Refused, misfit
    from specbench.errors import UsageError

    fitting, refused = [], []
    vocab = min(target.vocab_size, target.scorer.embeddings)
    for each in lines:
        if isinstance(each, Refused):
            refused.append(each)
            continue
        try:
            prompt = (
                request.encode(target.language_model, each.prompt)
                if isinstance(each.prompt, str)
                else list(each.prompt)
            )
        except UsageError as error:
            refused.append(Refused(each.line, error.message))
            continue
        reason = misfit(prompt, each.token_ids, vocab, target.scorer.context_limit)
        if reason is None:
            fitting.append((each, prompt))
        else:
            refused.append(Refused(each.line, reason))
    if refused:
        listed = ", ".join(str(each.line) for each in refused[:5])
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        request.note(f"{counted(len(refused), 'line')} cannot be checked ({listed}{more}); the others are.")
    return fitting, sorted(refused, key=lambda each: each.line)
