"""Decoding one prompt for `specbench generate`: shown as it comes, traced, compared with plain decoding."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from specbench.backends.torch.parity import find_difference
from specbench.bench.pairs import Pairs
from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.console import write_json
from specbench.cli.progress import StageProgress
from specbench.cli.setting import facts
from specbench.cli.summary import Advice, show_summary
from specbench.cli.watchers import TextOutput, TraceOutput, Tracer, tokens_of
from specbench.decoding.clocks import peak_memory
from specbench.decoding.metrics import summary
from specbench.loaded import LoadedRecipe
from specbench.policies import FixedLength
from specbench.policies.auto import TOO_SLOW_NOTE
from specbench.recipe import drafter_argument
from specbench.results.trace import PROMPT_TAIL, TraceHeader
from specbench.specs.drafters import Cascade, Lookup, NGram, Suffix, parse_drafter

if TYPE_CHECKING:
    from specbench.cli.watchers import Paint, ShownOptions
    from specbench.decoding.records import Generation
    from specbench.generate import GenerationRun

WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class PromptJob(LoadedRecipe):
    """A prompt for a recipe, so that the speculative and the plain run differ in the drafter alone."""

    prompt: list[int]
    prompt_text: str

    def warm_up(self) -> None:
        """Decode once with the drafter and once plainly, so that later times do not include the costs of a first use.

        With fixed tensor shapes, each new shape takes long at its first use, so whole outputs are decoded.
        """
        fixed_shapes = self.recipe.caching.cache in ("static", "compiled")
        for plain in (False, True):
            decoding = self.recipe.decoding
            if not fixed_shapes:
                shorter = min(WARM_UP_TOKENS, decoding.max_new_tokens)
                decoding = decoding.with_changes(max_new_tokens=shorter)
            for _ in self.start(self.prompt, plain=plain, decoding=decoding):
                pass

    def piece(self, token: int) -> str:
        """Return the text of a token, special tokens included."""
        assert self.target.tokenizer is not None
        return str(self.target.tokenizer.decode([token], skip_special_tokens=False))

    def header(self) -> TraceHeader:
        """Return the first event of a trace."""
        return TraceHeader(
            target=self.target.name,
            drafter=self.drafter.traits.name,
            dtype=self.target.dtype,
            options=self.options(),
            prompt_tokens=len(self.prompt),
            prompt_tail=self.prompt_text[-PROMPT_TAIL:],
            greedy=self.sampling.greedy,
            lossless=self.recipe.decoding.residual_adjustment,
        )

    def options(self) -> dict[str, Any]:
        """Return the options that decide the output, by name; ``None`` for those that are switched off."""
        policy, drafter = self.policy, self.drafter
        branches = policy.branches or drafter.traits.several
        named = (branches or policy.verification is not None) and not self.sampling.greedy
        return {
            "draft_policy": policy.name,
            "verification": policy.method(drafter) if named else None,
            "gamma": policy.gamma if isinstance(policy, FixedLength) else None,
            **opt.deciding(self.recipe, self.sampling, self.target.language_model),
        }

    def draftable_share(self, tokens: Sequence[int]) -> float | None:
        """Return the share of tokens that the drafter's model could draft; ``None`` where it can draft any."""
        vocabulary = self.drafter.traits.vocabulary
        if vocabulary is None or not tokens:
            return None
        return sum(token in vocabulary.places for token in tokens) / len(tokens)

    @property
    def has_template(self) -> bool:
        """Whether the target has a chat template."""
        return bool(getattr(self.target.tokenizer, "chat_template", None))


def notes_of(ctx: typer.Context, job: PromptJob, chat: bool | None) -> list[str]:
    """Return what the user should know before reading the output, and which options have no effect."""
    drafter, lines = job.recipe.drafter, []
    ignored: list[tuple[bool, str, Sequence[str | type]]] = [
        (
            job.sampling.greedy,
            "at temperature 0: the most probable token is taken",
            ("top_k", "top_p", "min_p", "seed"),
        ),
        (
            drafter.is_plain,
            "with the drafter none",
            ("draft_policy", "gamma"),
        ),
    ]
    for applies, why, names in ignored:
        if applies and (listed := given(ctx, *names)):
            lines.append(f"{', '.join(listed)} {'has' if len(listed) == 1 else 'have'} no effect {why}.")
    lines += facts(job)
    if not job.has_template and chat is not False:
        lines.append("The model has no chat template: the prompt is continued as raw text.")
    return lines


def advice_for(job: PromptJob, chat: bool | None) -> Advice:
    """Return what to try if the reply is empty or the drafter does not help."""
    drafter, policy = job.recipe.drafter, job.recipe.policy
    if not job.has_template:
        blank = "without a chat template a model continues text: give it the beginning of one, or take a chat model"
    elif chat is False:
        blank = "leave --raw out, so that the chat template is applied"
    else:
        blank = "word the prompt otherwise, or try --raw"
    if drafter.is_plain or policy is None:
        return Advice(blank)
    # A copy costs next to nothing, a model drafts where there is nothing to copy.
    if isinstance(drafter, Cascade):
        other = "lookup"
    elif drafter.model_spec is not None:
        other = f"lookup+{drafter_argument(drafter)}"
    else:
        can_quantize = job.target.quantization is None and job.target.scorer.device.type == "cpu"
        other = "lookup+self:int8" if can_quantize else ""
    applies = other and policy.applies(parse_drafter(other))
    return Advice(
        blank,
        text="this text repeats little" if isinstance(drafter, Lookup | NGram | Suffix) else "",
        policy="--draft-policy auto" if job.sampling.greedy and policy.word != "auto" else "",
        drafter=f"--drafter {shlex.quote(other)}" if applies else "",
    )


def decode(
    job: PromptJob, trace_to: TraceOutput | None, advice: Advice, paint: Paint | None, show: ShownOptions
) -> None:
    """Decode, print the text, compare with plain decoding, and print a summary.

    Raises:
        KeyboardInterrupt: Ctrl-C; what there was by then has been shown.
    """
    run = job.start(job.prompt, trace=trace_to is not None)
    on_screen = trace_to is not None and trace_to.on_screen
    watchers: list[TextOutput | Tracer] = []
    if trace_to is not None:
        watchers.append(Tracer(trace_to, job.header(), job.piece))
    if not show.json_output:
        shown = TextOutput(
            run, paint, streamed=show.streamed, after_trace=on_screen, answer_only=show.answer_only
        )
        watchers.append(shown)
    max_new_tokens = job.recipe.decoding.max_new_tokens

    def decode_once(plain: bool) -> Generation:
        if not pairs.speculative:
            _follow(run, watchers, "decoding", max_new_tokens, quiet=show.quiet or show.streamed or on_screen)
            return run.result()
        repeat, done = job.start(job.prompt, plain=plain), len(pairs.plain if plain else pairs.speculative)
        stage = f"decoding {'plainly' if plain else 'with the drafter'}, to compare ({done + 1})"
        _follow(repeat, (), stage, max_new_tokens, quiet=show.quiet)
        return repeat.result()

    pairs = Pairs(decode_once, show.repeats)
    finished = True
    try:
        if show.compare:
            pairs.measure()
        else:
            pairs.measure_one(plain=False)
    except KeyboardInterrupt:
        finished = False
    result = run.result()
    figures = summary(result) | {
        **({"text": run.answer()} if show.answer_only else {}),
        "options": job.options(),
        "device": str(job.target.scorer.device),
        "draftable_share": job.draftable_share(result.token_ids),
        "too_slow": any(TOO_SLOW_NOTE in step.policy for step in result.steps),
    }
    figures |= pairs.figures()
    if pairs.plain:
        figures |= _compared_tokens(pairs, job)
    if show.json_output:
        write_json(figures | {"peak_memory_bytes": peak_memory(str(job.target.scorer.device))})
    if not (show.quiet or show.json_output):
        notes = job.target.language_model.notes
        show_summary(figures, advice=advice, spaced=sys.stdout.isatty(), notes=notes, verbose=show.verbose)
    if not finished:
        raise KeyboardInterrupt


def _follow(
    run: GenerationRun,
    watchers: Sequence[TextOutput | Tracer],
    stage: str,
    max_new_tokens: int,
    *,
    quiet: bool,
) -> None:
    """Run to the end, or to Ctrl-C. The watchers see the end in any case."""
    done = 0
    try:
        with StageProgress(quiet, animated=False) as progress:
            for record in run:
                for watcher in watchers:
                    watcher.record(record)
                done += len(tokens_of(record))
                progress.update(stage, done, max_new_tokens)
    finally:
        for watcher in watchers:
            watcher.end(run.result())


def _compared_tokens(pairs: Pairs, job: PromptJob) -> dict[str, Any]:
    """Return the figures of the plain run, and where the tokens of a pair first differ."""
    found: dict[str, Any] = {"plain": summary(pairs.plain[0]), "identical": None}
    if not job.sampling.greedy:  # sampled outputs differ by design: the draws fall on other events
        return found
    both = [
        (fast.token_ids, slow.token_ids) for fast, slow in zip(pairs.speculative, pairs.plain, strict=False)
    ]
    differing = [(fast, slow) for fast, slow in both if fast != slow]
    found |= {"identical": not differing, "differing_repeats": len(differing)}
    if differing:
        decoding = job.recipe.decoding
        last = len(job.prompt) + decoding.max_new_tokens
        transforms = job.sampling.at(len(job.prompt), last, decoding.end_ids(job.target.end_ids))
        difference = find_difference(job.target.scorer, job.prompt, *differing[0], transforms)
        assert difference is not None
        texts = [None if token is None else job.piece(token) for token in difference.tokens]
        rounding = str(job.target.scorer.rounding).removeprefix("torch.")
        found["difference"] = {**asdict(difference), "rounding": rounding, "texts": texts}
    return found
