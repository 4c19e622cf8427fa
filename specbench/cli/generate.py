"""`specbench generate`: decode one prompt, or many."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.cli import options as opt
from specbench.cli.many import ManyOptions, decode_prompts, refuse_for_many
from specbench.cli.progress import starting
from specbench.cli.setting import parse_recipe
from specbench.cli.watchers import ShownOptions, TraceOutput
from specbench.options import (
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    SharedPolicyOptions,
)

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.cli.watchers import Paint
    from specbench.generate import GenerationRun
    from specbench.models.target import Target
    from specbench.results.trace import TraceHeader
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.policies import PolicySpec

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class _Shown:
    """Output options."""

    compare: Annotated[
        bool,
        opt.output(
            "--compare",
            None,
            "Decode plainly too, in turn: the speedup with its interval, and any difference.",
        ),
    ] = False
    repeats: Annotated[
        int | None,
        opt.output("--repeats", "N", "Pairs of --compare. Default: 3, and up to 12 within 10 s.", min=1),
    ] = None
    show_accepted: Annotated[
        bool,
        opt.output(
            "--show-accepted", None, "Colors by origin: accepted drafts, corrected tokens, the target's own."
        ),
    ] = False
    stream: Annotated[bool, opt.output("--stream/--no-stream", None, "Print text as it is decoded.")] = True
    debug: Annotated[bool, opt.output("--debug", None, "Show every step on stderr.")] = False
    trace_file: Annotated[
        Path | None, opt.output("--trace-file", "FILE", "File for every step, as JSON Lines.")
    ] = None
    json_output: Annotated[
        bool,
        opt.output("--json", None, "Print one JSON object instead of text, or a line for each of --prompts."),
    ] = False
    quiet: Annotated[bool, opt.output("--quiet -q", None, "No progress, no summary.")] = False

    @property
    def at_once(self) -> bool:
        """Whether text is shown as it comes."""
        return self.stream and not self.json_output and not self.debug


def generate(
    ctx: typer.Context,
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Prompt, in quotes; - or none reads it from standard input."),
    ] = None,
    prompt_file: opt.PromptFile = None,
    many: ManyOptions,
    system: opt.SystemOption = None,
    chat: opt.ChatOption = None,
    drafting: opt.DraftingOptions,
    models: ModelOptions,
    length: SharedPolicyOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
    show: ShownOptions,
) -> None:
    """Generate text. The text goes to stdout, everything else to stderr."""
    from specbench.base.progress import quiet_transformers
    from specbench.bench.prompts import load_prompts, read_prompt_text
    from specbench.cli.summary import show_legend, show_notes

    recipe = parse_recipe(ctx, drafting, models, length, decoding, caching, sampling)
    if many.prompts:
        refuse_for_many(recipe)
        prompts, text = load_prompts(many.prompts), ""
    else:
        prompts, text = [], read_prompt_text(prompt, prompt_file, sys.stdin)
    paint = _paint() if show.show_accepted else None
    with ExitStack() as stack:
        trace_to = None
        if show.debug or show.trace_file:
            trace_to = stack.enter_context(TraceOutput(show.trace_file, show.debug))
        with starting(show.quiet) as progress:
            from specbench.cli.one_prompt import PromptJob, advice_for, decode, notes_of
            from specbench.cli.setting import load_recipe
            from specbench.models.drafters import refuse_keep

            stack.enter_context(quiet_transformers())
            if show.compare:
                refuse_keep(recipe.drafter)
            loaded = load_recipe(recipe, progress)
            tokens = [] if prompts else _encode(loaded.target, text, chat, system)
            job = PromptJob(**vars(loaded), prompt=tokens, prompt_text=text)
            if show.compare:
                progress.update("warming up", 0, None)
                job.warm_up()
        if not show.quiet:
            notes = notes_of(ctx, job, chat)
            notes += loaded.target.language_model.notes if prompts and show.verbose else []
            if longer := sum(len(each.turns) > 1 for each in prompts):
                notes.append(f"{counted(longer, 'prompt')} of several turns: the first turn is answered.")
            notes += [loaded.note] if loaded.note else []
            show_notes(notes, apart=sys.stdout.isatty())
            if paint is not None:
                show_legend(paint)
        if prompts:

            def start(each: Prompt) -> GenerationRun:
                ids = _encode(loaded.target, each.turns[0], chat, each.system or system)
                return replace(job, prompt=ids).start()

            more = {"options": job.options(), "device": str(loaded.target.scorer.device)}
            decode_prompts(
                many, prompts, loaded.target, start, more, as_json=show.json_output, quiet=show.quiet
            )
            return
        decode(job, trace_to, advice_for(ctx, job, chat), paint, show)
        if trace_to is not None:
            trace_to.complain()


def _paint() -> Paint:
    """Return what styles text by the origin of its tokens.

    Raises:
        UsageError: The output cannot show it.
    """
    from rich.console import Console

    from specbench.show.painted import painted

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "--show-accepted colors the text on a terminal, and the output goes to none that can.",
            "Leave it out: --json counts what was accepted, and --debug shows it.",
        )
    return partial(painted, encoding=console.encoding, color=not console.no_color)


def _encode(target: Target, text: str, chat: bool | None, system: str | None) -> list[int]:
    from specbench.generate import encode_prompt

    if target.tokenizer is None:
        raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
    ids = encode_prompt(target.tokenizer, text, chat=chat, system=system)
    limit = target.scorer.context_limit
    if limit is not None and len(ids) >= limit:
        raise UsageError(
            f"The prompt has {len(ids)} tokens, and the target's context of {limit} leaves no room for an answer.",
            "Shorten the prompt.",
        )
    return ids


@dataclass(frozen=True)
class _Job(LoadedRecipe):
    """A prompt for a recipe, so that the speculative and the plain run differ in the drafter alone."""

    prompt: list[int]
    prompt_text: str

    def start(self, *, plain: bool = False, trace: bool = False, most: int | None = None) -> GenerationRun:
        """A run that has not begun; ``most`` limits it further."""
        from specbench.generate import GenerationRun

        decoding = self.recipe.decoding
        if most is not None:
            decoding = decoding.with_changes(max_new_tokens=min(most, decoding.max_new_tokens))
        if plain:
            decoding = decoding.with_changes(residual_adjustment=True)
        return GenerationRun(
            self.prompt,
            self.target,
            None if plain else self.drafter,
            policy=None if plain else self.policy,
            sampling=self.sampling,
            seed=self.recipe.sampling.seed,
            decoding=decoding,
            trace=trace,
        )

    def warm_up(self, most: int | None) -> None:
        """Let both ways of decoding meet their shapes once, so that neither pays for the first time."""
        for plain in (False, True):
            for _ in self.start(plain=plain, most=most):
                pass

    def piece(self, token: int) -> str:
        """A token's own text, special tokens included."""
        assert self.target.tokenizer is not None
        return str(self.target.tokenizer.decode([token], skip_special_tokens=False))

    def header(self) -> TraceHeader:
        """The first event of a trace."""
        from specbench.results.trace import PROMPT_TAIL, TraceHeader

        return TraceHeader(
            target=self.target.name,
            drafter=self.drafter.name,
            dtype=self.target.dtype,
            options=self.options(),
            prompt_tokens=len(self.prompt),
            prompt_tail=self.prompt_text[-PROMPT_TAIL:],
            greedy=self.sampling.greedy,
            lossless=self.recipe.decoding.residual_adjustment,
        )

    def options(self) -> dict[str, Any]:
        """What decides the output, by name; ``None`` for what is switched off."""
        from specbench.policies import FixedLength

        policy, fixed = self.policy.policy, not self.policy.siblings.most
        branches = policy.branches or self.policy.siblings.most > 0 or self.drafter.several
        told = (branches or self.policy.verification is not None) and not self.sampling.greedy
        return {
            "draft_policy": self.policy.name,
            "verification": self.policy.method(self.drafter) if told else None,
            "gamma": policy.gamma if fixed and isinstance(policy, FixedLength) else None,
            "costs": "given" if self.recipe.costs else None,
            **opt.deciding(self.recipe, self.sampling, self.target.language_model),
        }


def _without_effect(ctx: typer.Context, drafter: DrafterSpec, sampling: Sampling) -> list[str]:
    """What was asked for and changes nothing."""

    def unused(*names: str | type) -> str:
        listed = given(ctx, *names)
        return f"{', '.join(listed)} {'has' if len(listed) == 1 else 'have'} no effect" if listed else ""

    lines = []
    if sampling.greedy and (what := unused("top_k", "top_p", "min_p", "seed")):
        lines.append(f"{what} at temperature 0: the most probable token is taken.")
    lengths = ("draft_policy", "tree", "gamma", LengthOptions)
    if drafter.is_plain and (what := unused(*lengths, "first_target")):
        lines.append(f"{what} with the drafter none.")
    load_options = ("drafter_dtype", "drafter_device", "drafter_device_map")
    if drafter.model_spec is None and (what := unused(*load_options)):
        lines.append(f"{what}: the drafter {drafter.model_part.word} is no model of its own.")
    return lines


def _facts(job: _Job, *, asked_raw: bool) -> list[str]:
    """What the user should know before reading the output."""
    from specbench.cli.setting import facts

    lines = facts(job.target, job.drafter, job.recipe.decoding)
    if not _has_template(job.target) and not asked_raw:
        lines.append("The model has no chat template: the prompt is continued as raw text.")
    return lines


def _draftable_share(drafter: Drafter, tokens: Sequence[int]) -> float | None:
    """Share of an output's tokens that the drafter's model could draft; ``None`` where it can draft any."""
    if drafter.draftable is None or not tokens:
        return None
    return sum(token in drafter.draftable for token in tokens) / len(tokens)


def _has_template(target: Target) -> bool:
    return bool(getattr(target.tokenizer, "chat_template", None))


def _after_a_blank_reply(job: _Job, chat: bool | None) -> str:
    """What to try if the model ends its text before it has said anything."""
    if not _has_template(job.target):
        return "without a chat template a model continues text: give it the beginning of one, or take a chat model"
    if chat is False:
        return "leave --raw out, so that the model is asked and not continued"
    return "word the prompt otherwise, or try --raw"


def _advice(ctx: typer.Context, job: _Job, drafter: DrafterSpec, policy: PolicySpec) -> dict[str, str]:
    """What to try if a drafter does not help: another ``policy``, and a ``command`` with another drafter. ``text`` is
    what it shows of the text if little of it is accepted."""
    if drafter.is_plain:
        return {}
    found = {}
    if isinstance(drafter, Lookup | NGram | Suffix):
        found["text"] = "this text repeats little"
    if job.sampling.greedy and policy.word != "auto":
        found["policy"] = "--draft-policy auto"
    # A copy costs next to nothing, a model drafts where there is nothing to copy.
    can_quantize = job.target.rounded is None and job.target.scorer.device.type == "cpu"
    if isinstance(drafter, Cascade):
        other = "lookup"
    elif drafter.model_spec is not None:
        other = f"lookup+{ctx.params['drafter']}"  # a path as it was typed, and not its last name
    else:
        other = "lookup+self:int8" if can_quantize else ""
    if other and policy.applies(parse_drafter(other)):
        found["command"] = opt.command_with(ctx, drafter=other, costs=None)
    return found


def _run(
    job: _Job,
    trace_to: TraceOutput | None,
    advice: Mapping[str, str],
    paint: Paint | None,
    show: _Shown,
    notes: Sequence[str],
) -> None:
    """Decode, show, compare.

    Args:
        job, trace_to: What to run, and where its steps go.
        advice: What to try if the drafter does not help.
        paint: Styles the text by where its tokens came from.
        show: What is written.
        notes: What stands below the summary.

    Raises:
        KeyboardInterrupt: Ctrl-C; by then what there was has been shown.
    """
    from specbench.bench.pairs import Pairs, predict
    from specbench.cli.summary import show_summary
    from specbench.decoding.metrics import summary

    run = job.start(trace=trace_to is not None)
    watchers: list[Watcher] = []
    if trace_to is not None:
        watchers.append(Tracer(trace_to, job.header(), job.piece))
    if not show.json_output:
        behind_trace = bool(trace_to and trace_to.on_screen)
        watchers.append(
            StreamedText(run, paint) if show.at_once else WholeText(paint, behind_trace=behind_trace)
        )
    unseen = not show.at_once and not (trace_to and trace_to.on_screen)

    def decode(plain: bool) -> Generation:
        if not compared.speculative:
            _follow(
                run, watchers, "decoding", job.recipe.decoding.max_new_tokens, quiet=show.quiet or not unseen
            )
            return run.result()
        repeat = job.start(plain=plain)
        way = "plainly" if plain else "with the drafter"
        done = len(compared.plain if plain else compared.speculative)
        _follow(
            repeat,
            (),
            f"decoding {way}, to compare ({done + 1})",
            job.recipe.decoding.max_new_tokens,
            quiet=show.quiet,
        )
        return repeat.result()

    compared = Pairs(decode, show.repeats)
    finished = True
    try:
        if show.compare:
            compared.measure()
        else:
            decode(False)
    except KeyboardInterrupt:
        finished = False
    figures = summary(run.result()) | {
        "options": job.options(),
        "device": str(job.target.scorer.device),
        "costs": run.result().costs,
        "draftable_share": _draftable_share(job.drafter, run.result().token_ids),
    }
    if compared.plain:
        figures |= compared.figures() | _tokens_compared(compared, job)
    else:
        predicted = predict(run.result())
        figures["explained"] = predicted and asdict(predicted)
    if show.json_output:
        figures["peak_memory_bytes"] = _peak_memory(job.target)
        write_out(json.dumps(figures, allow_nan=False) + "\n")
    if not show.quiet:
        shown = figures | {"options": _shown_options(figures)}
        show_summary(shown, advice=advice, apart=sys.stdout.isatty(), notes=notes)
    if not finished:
        raise KeyboardInterrupt


def _shown_options(figures: dict[str, Any]) -> dict[str, Any]:
    """The options as the summary shows them: a policy that decides γ is named with the γ it came to."""
    options: dict[str, Any] = figures["options"]
    if options["gamma"] is not None:
        return options
    mean = f", {figures['drafted'] / figures['steps']:.1f} on average" if figures["steps"] else ""
    verified = f", verified by {options['verification']}" if options["verification"] else ""
    return options | {"gamma": f"by {options['draft_policy']}{mean}{verified}"}


def _follow(run: GenerationRun, watchers: Sequence[Watcher], stage: str, most: int, *, quiet: bool) -> None:
    """Run to the end, or to Ctrl-C. The watchers see the end whatever it was."""
    done = 0
    try:
        with StageProgress(quiet, animated=False) as progress:
            for record in run:
                for watcher in watchers:
                    watcher.record(record)
                done += len(tokens_of(record))
                progress.update(stage, done, most)
    finally:
        for watcher in watchers:
            watcher.end(run.result())


def _tokens_compared(pairs: Pairs, job: _Job) -> dict[str, Any]:
    """The plain run, and where the tokens of a pair part."""
    from specbench.backends.torch.parity import find_difference
    from specbench.decoding.metrics import summary

    found: dict[str, Any] = {"plain": summary(pairs.plain[0]), "identical": None}
    if not job.sampling.greedy:  # sampled outputs differ by design: the draws fall on other events
        return found
    both = [
        (fast.token_ids, slow.token_ids) for fast, slow in zip(pairs.speculative, pairs.plain, strict=False)
    ]
    parted = [(fast, slow) for fast, slow in both if fast != slow]
    found |= {"identical": not parted, "differing_repeats": len(parted)}
    if parted:
        asked, end_ids = (
            len(job.prompt) + job.recipe.decoding.max_new_tokens,
            job.recipe.decoding.end_ids(job.target.end_ids),
        )
        transforms = job.sampling.at(len(job.prompt), asked, end_ids)
        difference = find_difference(job.target.scorer, job.prompt, *parted[0], transforms)
        assert difference is not None
        texts = [None if token is None else job.piece(token) for token in difference.tokens]
        rounding = str(job.target.scorer.rounding).removeprefix("torch.")
        found["difference"] = {**asdict(difference), "rounding": rounding, "texts": texts}
    return found


def _peak_memory(target: Target) -> int:
    from specbench.decoding.clocks import peak_memory

    return peak_memory(str(target.scorer.device))
