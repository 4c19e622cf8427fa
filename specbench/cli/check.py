"""`specbench check`: is a configuration lossless, and are outputs from elsewhere the target's own?"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli import options as opt
from specbench.cli.rule import LengthRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.check.outputs import GivenOutput, Refused
    from specbench.check.results import CheckResult, OutputsResult, Piece
    from specbench.drafters.base import Drafter
    from specbench.loading import Target
    from specbench.models import LanguageModel, LoadOptions
    from specbench.progress import Progress
    from specbench.prompts import Prompt
    from specbench.sampling import Sampling

__all__ = ["check"]

_CHECK = "What is checked"
_DEFAULT_PROMPTS, _DEFAULT_LIMIT, _DEFAULT_BIAS = "all", 12, 0.05
_LARGEST_BIAS = 0.5
_NEED_NO_DECODING = (
    "drafter", "drafter_dtype", "drafter_device", "drafter_device_map", "length_policy", "egag", "gamma", "gamma_min",
    "gamma_max", "egag_ema_beta", "egag_scale", "confidence", "adapt_confidence", "entropy_lambda", "svip_threshold",
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
    drafter: opt.DrafterOption = opt.DEFAULT_DRAFTER,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    drafter_dtype: opt.DrafterDtypeOption = "auto",
    drafter_device: opt.DrafterDeviceOption = "auto",
    drafter_device_map: opt.DrafterDeviceMapOption = None,
    allow_pickle: opt.PickleOption = False,
    length_policy: opt.LengthPolicyOption = None,
    egag: opt.EgagOption = False,
    gamma: opt.GammaOption = None,
    gamma_min: opt.GammaMinOption = None,
    gamma_max: opt.GammaMaxOption = None,
    egag_ema_beta: opt.EgagBetaOption = None,
    egag_scale: opt.EgagScaleOption = None,
    confidence: opt.ConfidenceOption = None,
    adapt_confidence: opt.AdaptConfidenceOption = False,
    entropy_lambda: opt.EntropyLambdaOption = None,
    svip_threshold: opt.SvipThresholdOption = None,
    costs: opt.CostsOption = None,
    max_new_tokens: opt.MaxNewTokensOption = 64,
    stop: opt.StopOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    cache: opt.CacheOption = "dynamic",
    bit_exact: opt.BitExactOption = False,
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
    seed: opt.SeedOption = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=opt.OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no notes.", rich_help_panel=opt.OUTPUT)
    ] = False,
    traceback: opt.TracebackOption = False,  # noqa: ARG001 - read by specbench.cli.run
) -> None:
    """Check that a configuration is lossless: greedy output, sampled distribution, and every step's invariants.

    Exit code 1 if something is wrong. docs/check.md says what is checked, and when a difference is a numerical tie.
    """
    from specbench.cli.progress import StageProgress
    from specbench.errors import UsageError

    if any(not item for item in stop or ()):
        raise UsageError("A stop string is empty.", "Give --stop at least one character.")
    if outputs is not None and (prompts or category):
        raise UsageError("--outputs brings its own prompts.", "Leave --prompts and --category out.")
    if bias is not None and not 0 < bias <= _LARGEST_BIAS:
        raise UsageError(f"--bias is {bias:g}.", f"Give a share above 0, up to {_LARGEST_BIAS:g}.")
    cache = opt.cache_for(ctx, cache, bit_exact)
    with StageProgress(quiet) as progress:
        progress.update("starting", 0, None)
        from specbench.models import LoadOptions
        from specbench.sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        options = LoadOptions(dtype, device, device_map)
        request = _Request(ctx, target, options, cache, chat, system, allow_pickle, json_output, quiet)
        job: _DecodingJob | _OutputsJob
        if outputs is not None:
            job = _OutputsJob(request, outputs, sampling, ignore_eos=ignore_eos, limit=limit)
        else:
            rule_options = {
                "gamma": gamma,
                "gamma_min": gamma_min,
                "gamma_max": gamma_max,
                "egag_ema_beta": egag_ema_beta,
                "egag_scale": egag_scale,
                "confidence": confidence,
                "adapt_confidence": adapt_confidence,
                "entropy_lambda": entropy_lambda,
                "svip_threshold": svip_threshold,
            }
            job = _DecodingJob(
                request,
                _chosen_prompts(prompts, category, limit),
                drafter,
                LoadOptions(drafter_dtype, drafter_device, drafter_device_map),
                LengthRule(length_policy, egag, costs, rule_options, greedy=sampling.greedy),
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
        target: str,
        options: LoadOptions,
        cache: opt.CacheName,
        chat: bool | None,
        system: str | None,
        allow_pickle: bool,
        json_output: bool,
        quiet: bool,
    ) -> None:
        self.ctx, self.target, self.options, self.cache = ctx, target, options, cache
        self.chat, self.system, self.allow_pickle = chat, system, allow_pickle
        self.json_output, self.quiet = json_output, quiet

    def given(self, *names: str) -> list[str]:
        """Those of the named options that stand on the command line."""
        return opt.given(self.ctx, *names)

    def note(self, text: str) -> None:
        """Say something on stderr that the user should know."""
        from specbench.cli.summary import show_notes

        if not self.quiet:
            show_notes([text], apart=False)

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

    def show(
        self, result: CheckResult | OutputsResult, header: dict[str, Any], dtype: str, piece: Piece | None
    ) -> None:
        """Print what was found."""
        from rich.console import Console

        from specbench.check.render import show_check, show_outputs
        from specbench.check.results import CheckResult
        from specbench.cli.watchers import write_out

        if self.json_output:
            write_out(json.dumps({**header, **result.to_dict(piece)}, allow_nan=False) + "\n")
        elif isinstance(result, CheckResult):
            show_check(result, Console(highlight=False), dtype=dtype, piece=piece)
        else:
            show_outputs(result, Console(highlight=False), dtype=dtype, piece=piece)


def _pieces(model: LanguageModel) -> Piece | None:
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _rounding(model: LanguageModel) -> str:
    """The dtype whose rounding decides; within an int8 model that is coarser than its logits' own."""
    return "bfloat16" if model.quantise_int8 else model.dtype


# -- a configuration -------------------------------------------------------------------------------


def _chosen_prompts(prompts: list[str] | None, category: list[str] | None, limit: int | None) -> list[Prompt]:
    from specbench.prompts import load_prompts

    return load_prompts(prompts or [_DEFAULT_PROMPTS], category or (), limit or _DEFAULT_LIMIT)


class _DecodingJob:
    """From options to a check that is ready to run."""

    def __init__(
        self,
        request: _Request,
        prompts: Sequence[Prompt],
        drafter: str,
        drafter_options: LoadOptions,
        rule: LengthRule,
        bias: float,
        bit_exact: bool,
        settings: dict[str, Any],
        *,
        ignore_eos: bool,
    ) -> None:
        self.bit_exact = bit_exact
        self.request, self.prompts = request, prompts
        self.drafter, self.drafter_options = drafter, drafter_options
        self.rule, self.bias, self.settings, self.ignore_eos = rule, bias, settings, ignore_eos

    def run(self) -> int:
        """Check, and print what was found; the exit code."""
        from specbench.cli.progress import StageProgress
        from specbench.progress import quiet_transformers

        checking = self._checking
        complete = False
        try:
            with StageProgress(self.request.quiet) as checking.progress, quiet_transformers():
                checking.greedy()
                if not checking.setup.sampling.greedy:
                    checking.exact()
                    checking.sampled()
            complete = True
        finally:  # an interrupt or an error loses nothing of what is checked
            result = checking.result(complete=complete)
            if result.greedy:
                self._show(result)
        return int(result.verdict == "wrong")

    def prepare(self, progress: Progress) -> None:
        """Load the models, let ``transformers`` answer, and put the check together.

        The target is loaded once: ``transformers`` decodes with it before its layers are packed.
        """
        import torch

        from specbench.bitexact import require_bit_exact
        from specbench.caches import make_cache
        from specbench.check.observe import DecodingSetup
        from specbench.check.run import Case, DecodingCheck
        from specbench.drafters import drafter_word
        from specbench.lengths import check_policy
        from specbench.loading import check_drafter, load_target, wrap_target
        from specbench.models import check_options, load_model

        request = self.request
        check_options(request.options)
        check_options(self.drafter_options)
        if drafter_word(self.drafter) != "none":
            check_policy(self.rule.spec, self.drafter)
        check_drafter(self.drafter, request.target, progress=progress)
        self._say_what_has_no_effect()
        int8 = request.options.dtype == "int8"
        target: Target | None = None
        if int8:
            target = load_target(
                request.target, request.options, cache=request.cache, progress=progress,
                allow_pickle=request.allow_pickle,
            )  # fmt: skip
            model = target.language_model
        else:
            model = load_model(
                request.target, request.options, progress=progress, allow_pickle=request.allow_pickle
            )
            make_cache(request.cache, model.model.config)  # refuses what it cannot hold
        self._model = model
        drafting = self._load_drafting_model(model, progress)
        prompts = self._encode(model, self.prompts)
        references = [None] * len(prompts) if int8 else self._references(model, prompts, progress)
        if target is None:
            target = wrap_target(model.model, model.tokenizer, name=model.name, cache=request.cache)
        if self.bit_exact:
            require_bit_exact(target.scorer)
        proposer = self._build_drafter(target, drafting, progress)
        setup = DecodingSetup(
            target=target.scorer,
            drafter=proposer,
            policy=self.rule.build(proposer.name),
            end_ids=() if self.ignore_eos else tuple(target.end_ids),
            tokenizer=target.tokenizer,
            **self.settings,
        )
        self._describe(target, setup)
        cases = [
            Case(name, tuple(ids), reference)
            for (name, ids), reference in zip(prompts, references, strict=True)
        ]
        self._checking = DecodingCheck(
            setup,
            cases,
            bias=self.bias,
            dtype=getattr(torch, _rounding(model)),
            no_transformers="it has no such int8 model" if int8 else None,
            bit_exact=self.bit_exact,
        )

    def _say_what_has_no_effect(self) -> None:
        sampling: Sampling = self.settings["sampling"]
        names = ("top_k", "top_p", "min_p", "seed", "bias", "no_residual_adjustment")
        if sampling.greedy and (given := self.request.given(*names)):
            verb = "has" if len(given) == 1 else "have"
            self.request.note(f"{', '.join(given)} {verb} no effect at temperature 0: nothing is sampled.")

    def _load_drafting_model(self, target: LanguageModel, progress: Progress) -> LanguageModel | None:
        """The drafter's own model, before anything takes time: it may not fit the target."""
        from specbench.drafters import drafter_word, split_cascade
        from specbench.models import check_compatible, load_model

        cascade = split_cascade(self.drafter)
        spec = self.drafter if cascade is None else cascade[1]
        if drafter_word(spec) is not None:
            return None
        model = load_model(
            spec, self.drafter_options, progress=progress, allow_pickle=self.request.allow_pickle
        )
        check_compatible(target, model)
        return model

    def _build_drafter(self, target: Target, model: LanguageModel | None, progress: Progress) -> Drafter:
        from specbench.drafters import split_cascade
        from specbench.loading import join_cascade, load_drafter, wrap_drafter

        if model is None:
            return load_drafter(self.drafter, target, cache=self.request.cache, progress=progress)
        wrapped = wrap_drafter(
            model, target, cache=self.request.cache, int8=self.drafter_options.dtype == "auto"
        )
        cascade = split_cascade(self.drafter)
        return wrapped if cascade is None else join_cascade(cascade[0], wrapped)

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
            verb = "prompt leaves" if left_out == 1 else "prompts leave"
            self.request.note(f"{left_out} {verb} no room for an answer in the target's context: left out.")
        return fitting

    def _references(
        self, model: LanguageModel, prompts: Sequence[tuple[str, list[int]]], progress: Progress
    ) -> list[Any]:
        import time

        from specbench.check.reference import ReferenceSettings, reference_output

        settings = ReferenceSettings(
            max_new_tokens=self.settings["max_new_tokens"],
            end_ids=() if self.ignore_eos else tuple(model.end_ids),
            stop=self.settings["stop"],
            tokenizer=model.tokenizer,
            repetition_penalty=self.settings["sampling"].repetition_penalty,
            context_limit=model.context_limit,
        )
        answers = []
        began = time.monotonic()
        for done, (_, ids) in enumerate(prompts):
            progress.update("transformers' own answers", done, len(prompts))
            answers.append(reference_output(model.model, ids, settings))
            if done == 0:
                self._say_how_long((time.monotonic() - began) * len(prompts), model.vocab_size)
        return answers

    def _say_how_long(self, plainly_s: float, vocab_size: int) -> None:
        from specbench.check.run import estimated_seconds

        sampled = not self.settings["sampling"].greedy
        seconds = estimated_seconds(plainly_s, vocab_size, self.bias if sampled else None)
        about = f"{max(1, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        self.request.note(f"This will take about {about}.")

    def _describe(self, target: Target, setup: Any) -> None:
        sampling: Sampling = self.settings["sampling"]
        self._header = {
            "check": "decoding",
            "target": target.name,
            "drafter": setup.drafter.name,
            "dtype": target.dtype,
            "device": str(target.scorer.device),
            "rounding": _rounding(target.language_model),
            "options": {
                "length_policy": setup.policy.name,
                "cache": self.request.cache,
                "max_new_tokens": setup.max_new_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or None,
                "top_p": sampling.top_p if sampling.top_p < 1 else None,
                "min_p": sampling.min_p or None,
                "repetition_penalty": sampling.repetition_penalty
                if sampling.repetition_penalty != 1
                else None,
                "seed": setup.seed,
                "first_target": setup.first_target,
                "residual_adjustment": setup.residual_adjustment,
                "stop": list(setup.stop) or None,
                "bit_exact": self.bit_exact or None,
                "ignore_eos": self.ignore_eos or None,
            },
        }

    def _show(self, result: CheckResult) -> None:
        """Print what was found, under what was checked."""
        header = self._header
        if not self.request.json_output:
            from rich.console import Console

            from specbench.textsafe import terminal_safe

            console = Console(highlight=False)
            line = f"{header['target']} ({header['dtype']}), drafter {header['drafter']}"
            line += f", {header['options']['length_policy']}, cache {header['options']['cache']}"
            console.print(terminal_safe(line, console.encoding), markup=False, soft_wrap=True)
            console.print()
        self.request.show(result, header, header["rounding"], _pieces(self._model))


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
        from specbench.loading import load_target
        from specbench.models import check_options

        request = self.request
        check_options(request.options)
        self._target = load_target(
            request.target,
            request.options,
            cache=request.cache,
            progress=progress,
            allow_pickle=request.allow_pickle,
        )
        self._given, self._refused = _fitting(request, self._target, self._lines)

    def run(self) -> int:
        """Check, and print what was found; the exit code."""
        import torch

        from specbench.check.outputs import OutputResult, Refused, check_output
        from specbench.check.results import OutputsResult
        from specbench.cli.progress import StageProgress
        from specbench.errors import RunError

        target = self._target
        rounding = _rounding(target.language_model)
        end_ids = () if self.ignore_eos else target.end_ids
        done: list[OutputResult] = []
        failed: list[Refused] = []
        complete = False
        try:
            with StageProgress(self.request.quiet) as progress:
                for number, (each, prompt) in enumerate(self._given):
                    progress.update("scoring outputs", number, len(self._given))
                    try:
                        dtype = getattr(torch, rounding)
                        done.append(check_output(target.scorer, each, prompt, self.sampling, end_ids, dtype))
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
            self.request.show(result, header, rounding, _pieces(target.language_model))
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
    from specbench.textsafe import visible

    name = "standard input" if str(file) == "-" else visible(str(file))
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"The outputs in {name} cannot be read: {reason}.", "Check the path.") from None
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
        plural = "line" if len(refused) == 1 else "lines"
        request.note(f"{len(refused)} {plural} cannot be checked ({listed}{more}); the others are.")
    return fitting, sorted(refused, key=lambda each: each.line)
