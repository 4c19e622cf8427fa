"""Speedup on a single prompt, which is decoded with a drafter and plainly in turns, with an interval and an
explanation.

The interval is over repeats of this prompt and says nothing about other prompts; a sweep does. ``predict`` explains a
single generation without comparing it with plain decoding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specbench.backends.torch.parity import find_difference
from specbench.base.load import LoadSnapshot, load_snapshot
from specbench.base.record import Json, finite_or_none
from specbench.bench.engines.hf import generate_with_transformers
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.metrics import summary, time_split, tokens_per_second, tokens_per_step
from specbench.decoding.theory import relative_pass
from specbench.findings.review import disturbances, find_disturbances
from specbench.policies.costs import MeasuredCosts, passes_of
from specbench.results import stats
from specbench.results.run import BUSY_WARNINGS
from specbench.rows import Condition, OtherLibrary, Row

if TYPE_CHECKING:
    from specbench.decoding.records import Generation, Step
    from specbench.loaded import LoadedRecipe
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe

MIN_PAIRS, MAX_PAIRS = 3, 12
"""Fewest and most pairs."""

ENOUGH_S = 10.0
"""Pairs are added up to this time in all."""

_WARM_UP_TOKENS = 16

_TIMED_TOKENS, _TIMED_S = 64, 10.0
"""How many tokens `transformers` decodes to be timed, and about how long, at most."""

_MIN_STEPS = 8
"""Steps from which the median step is taken for the usual one."""


class Pairs:
    """Generations with the drafter and plain, in the order ABBA so that drift affects both alike.

    Args:
        decode: Decodes the prompt once, plainly if its argument is true; its exceptions pass through.
        snapshot: Reads the machine load before and after each generation.

    Attributes:
        speculative, plain: Finished generations; pair i consists of the i-th of each.
    """

    def __init__(
        self,
        decode: Callable[[bool], Generation],
        *,
        clock: Clock = perf_counter,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
    ) -> None:
        self.speculative: list[Generation] = []
        self.plain: list[Generation] = []
        self._decode, self._clock, self._snapshot = decode, clock, snapshot
        self._disturbances: Counter[str] = Counter()
        self._fastest_mhz = 0.0

    def measure(self) -> None:
        """Decode until there are enough pairs."""
        began, pairs = self._clock(), 0
        while pairs < MAX_PAIRS:
            seconds = self._clock() - began
            if pairs >= MIN_PAIRS and seconds * (pairs + 1) / pairs > ENOUGH_S:
                return
            for plain in (pairs % 2 == 1, pairs % 2 == 0):
                self.measure_one(plain=plain)
            pairs += 1

    def measure_one(self, *, plain: bool) -> None:
        """Decode once, with the drafter or plainly."""
        before = self._snapshot()
        self._fastest_mhz = max(self._fastest_mhz, before.frequency_mhz or 0.0)
        (self.plain if plain else self.speculative).append(self._decode(plain))
        self._disturbances.update(disturbances(before, self._snapshot(), self._fastest_mhz or None))

    def figures(self) -> Json:
        """Return the comparison of all complete pairs as data; fields without enough data are ``None``.

        Returns:
            ``speedup``: geometric mean of the pairs' ratios of decode speeds; ``speedup_interval``: its 95% interval
            over the pairs; ``verdict`` on it, for this prompt alone; ``explained``: what the tokens per step and the
            usual times of steps allow (``explain``); ``repeats``: the times of each pair; ``warnings``: as in
            ``run.json``. Without a pair only ``explained``, a prediction (``predict``), which is ``None`` where other
            programs used the processor, and ``warnings``.
        """
        pairs = list(zip(self.speculative, self.plain, strict=False))
        count = len(self.speculative) + len(self.plain)
        findings = [*find_disturbances(count, self._disturbances)]
        if not pairs:
            # As in a report: a busy machine's times predict nothing.
            alone = predict(self.speculative[0]) if self.speculative else None
            busy = [row.to_json() for row in findings if alone is not None and row.id in BUSY_WARNINGS]
            return {"explained": None if busy else alone, "warnings": busy}
        repeats: list[Json] = []
        for number, (fast, slow) in enumerate(pairs):
            times = {"speculative": _times(fast), "plain": _times(slow)}
            speeds = [each["tokens_per_second"] for each in times.values()]
            speedup = speeds[0] / speeds[1] if all(speeds) else None
            repeats.append({"first": ("speculative", "plain")[number % 2], **times, "speedup": speedup})
        ratios = [math.nan if each["speedup"] is None else each["speedup"] for each in repeats]
        estimate = stats.geometric_mean(ratios, [0] * len(pairs), range(len(pairs)))
        return {
            "speedup": finite_or_none(estimate.value),
            "speedup_interval": None if estimate.low is None else [estimate.low, estimate.high],
            "verdict": stats.verdict(estimate, "repeats"),
            "explained": explain(self.speculative[: len(pairs)], self.plain[: len(pairs)]),
            "repeats": repeats,
            "warnings": [finding.to_json() for finding in findings],
        }


def explain(speculative: Sequence[Generation], plain: Sequence[Generation]) -> Json | None:
    """Explain a speedup by its usual time per step: a step's time is replaced by the median of steps of its size.

    Steps have the same size if they drafted and verified equally many tokens. A disturbance lengthens some steps but
    not the median. For the drafter's prefill, the measured time is used.

    Returns:
        See ``_explanation``; ``None`` if one side has no step.
    """
    steps = [step for generation in speculative for step in generation.steps]
    one = [step.times.total_s for generation in plain for step in generation.steps]
    return _explanation(steps, median(one), len(one)) if one and median(one) > 0 else None


def predict(generation: Generation) -> Json | None:
    """Explain the speed of a generation without comparing it with plain decoding.

    The time of a plain step is taken from the generation's steps without a draft, leaving out the time for drafting. If
    there are none, it is estimated from forward passes over more tokens (``MeasuredCosts``).

    Returns:
        See ``_explanation``; ``None`` for plain decoding, and with too few steps.
    """
    steps = generation.steps
    if generation.drafter == "none" or len(steps) < _MIN_STEPS:
        return None
    costs = MeasuredCosts()
    for step in steps:
        costs.observe(step)
    return _explanation(steps, costs.verify_s(1), sum(step.verified == 1 for step in steps))


def _explanation(steps: Sequence[Step], plain_s: float, plain_steps: int) -> Json | None:
    """Return the speedup to expect from the tokens per step and the usual times of forward passes.

    Returns:
        ``tokens`` per step (no speedup is higher, since a step has at least one forward pass of the target);
        ``step``, its usual time relative to a plain step, of which ``drafting`` takes one part and the ``masks`` of the
        output's format another; ``usual``, the speedup to expect: ``tokens / step``, that is, E / (γ·c + v) with the
        measured costs; ``plain_s``, seconds of a plain step, and ``plain_steps``, how many were timed (0: derived from
        forward passes over more tokens); ``forced``, the part of ``tokens`` that the format forced; and ``experts``
        that a step reads, relative to a plain step (``None`` for a target without experts).
    """
    tokens = tokens_per_step(steps)
    if tokens is None:
        return None
    drafting = _medians(steps, passes_of, lambda step: step.times.draft_s - step.times.draft_prefill_s)
    rest = _medians(steps, lambda step: step.verified, lambda step: step.times.total_s - step.times.draft_s)
    prefill = sum(step.times.draft_prefill_s for step in steps)
    unit = plain_s * len(steps)
    drafts = (prefill + sum(drafting[passes_of(step)] for step in steps)) / unit
    others = sum(relative_pass(rest[step.verified], plain_s) for step in steps) / len(steps)
    read = [step.experts for step in steps if step.experts is not None]
    alone = sum(each.one for each in read)
    return {
        "tokens": tokens,
        "step": drafts + others,
        "drafting": drafts,
        "usual": tokens / (drafts + others),
        "plain_s": plain_s,
        "plain_steps": plain_steps,
        "masks": sum(step.times.mask_s for step in steps) / unit,
        "forced": sum(step.forced_accepted for step in steps) / len(steps),
        "experts": sum(each.total for each in read) / alone if alone else None,
    }


def _medians(
    steps: Iterable[Step], kind: Callable[[Step], Hashable], seconds: Callable[[Step], float]
) -> dict[Hashable, float]:
    """Return the median time of each kind of steps."""
    times: dict[Hashable, list[float]] = {}
    for step in steps:
        times.setdefault(kind(step), []).append(seconds(step))
    return {key: median(values) for key, values in times.items()}


def _times(generation: Generation) -> Json:
    ttft_s, times = time_split(generation.prefill, generation.steps)
    return {
        "new_tokens": len(generation.token_ids),
        "ttft_s": ttft_s,
        "decode_s": times.total_s,
        "tokens_per_second": tokens_per_second(generation.prefill, generation.steps),
    }


# -- the other sides -----------------------------------------------------------------------------


def transformers_speed(model: LanguageModel, recipe: Recipe, prompt: Sequence[int]) -> float | None:
    """Return the tokens per second of ``generate`` of `transformers`, after a warm-up and the first token.

    ``None`` if it ends too early to be timed. The model is as `transformers` has loaded it.
    """
    row, clock = (
        Row(OtherLibrary("transformers"), Condition(recipe.sampling.temperature)),
        clock_for(model.device),
    )
    longest, speed = recipe.decoding.max_new_tokens, 0.0
    for _ in range(2):
        tokens = int(max(_WARM_UP_TOKENS, min(_TIMED_TOKENS, _TIMED_S * speed)))
        decoding = recipe.decoding.with_changes(max_new_tokens=min(tokens, longest))
        outcome = generate_with_transformers(
            model, None, model, model.context_limit, row, prompt, decoding, recipe.sampling.seed, clock
        )
        timed = len(outcome.token_ids) - outcome.first_tokens
        if timed < 1 or not outcome.decode_s:
            return None
        speed = timed / outcome.decode_s
    return speed


def warm_up(loaded: LoadedRecipe, prompt: Sequence[int]) -> None:
    """Decode once with the drafter and once plainly, so that later times do not include the costs of a first use.

    With fixed tensor shapes, each new shape takes long at its first use, so whole outputs are decoded.
    """
    decoding = loaded.recipe.decoding
    if loaded.recipe.caching.cache not in ("static", "compiled"):
        decoding = decoding.with_changes(max_new_tokens=min(_WARM_UP_TOKENS, decoding.max_new_tokens))
    for plain in (False, True):
        for _ in loaded.start(prompt, plain=plain, decoding=decoding):
            pass


def compared_tokens(pairs: Pairs, loaded: LoadedRecipe, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the figures of the plain run, and where the tokens of a pair first differ."""
    found: dict[str, Any] = {"plain": summary(pairs.plain[0]), "identical": None}
    if not loaded.sampling.greedy:  # sampled outputs differ by design: the draws fall on other events
        return found
    both = [
        (fast.token_ids, slow.token_ids) for fast, slow in zip(pairs.speculative, pairs.plain, strict=False)
    ]
    differing = [(fast, slow) for fast, slow in both if fast != slow]
    found |= {"identical": not differing, "differing_repeats": len(differing)}
    if differing:
        decoding = loaded.recipe.decoding
        transforms = loaded.sampling.at(len(prompt), decoding.end_ids(loaded.target.end_ids))
        difference = find_difference(loaded.target.scorer, prompt, *differing[0], transforms)
        assert difference is not None
        texts = [None if token is None else token_text(loaded.target, token) for token in difference.tokens]
        rounding = str(loaded.target.scorer.rounding).removeprefix("torch.")
        found["difference"] = {**asdict(difference), "rounding": rounding, "texts": texts}
    return found


def token_text(target: Target, token: int) -> str:
    """Return the text of a token, special tokens included."""
    assert target.tokenizer is not None
    return str(target.tokenizer.decode([token], skip_special_tokens=False))
