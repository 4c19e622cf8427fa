"""Calibration of self-drafting: find the cheaper form of the target that drafts fastest on this machine, in minutes.

The predicted speedup of a form follows from how often its one-token drafts are the target's own choice and from the
cost of its forward passes (``theory.predicted_speedup``). The search leaves out one decoder layer after the other, each
time the layer without which the distributions stay closest to the target's, until the predicted speedup decreases.
Skipping whole layers without training is the idea of self-speculative decoding (Zhang et al. 2023, arXiv 2309.08168);
the greedy search replaces their Bayesian one.

Acceptance is measured at all positions of an answer in one forward pass. The target's keys and values of the whole text
are in the cache. The form gets all tokens of the answer, and a mask lets each token see the target's entries of the
tokens before it and its own entry. A drafter on the target's cache sees exactly this when it drafts its first token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.kernels.attention import FOLDED, RAGGED
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.bench.passes import pass_costs, time_passes
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.theory import PassCosts, best_length, expected_tokens, predicted_speedup
from specbench.drafters.layers import cheaper_form, skippable_layers
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import SelfDrafter
from specbench.generate import GenerationRun
from specbench.models.calibrations import Choice
from specbench.policies import FixedLength
from specbench.specs.drafters import Lookup, SelfForm

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.models.target import Target

_LONGEST_DRAFT = 8
_WIDTHS = (1, 2, 3, 5, 7, 9)
_TIMED = 7  # passes of each kind; the median counts
_HELD_OUT = 3  # every third prompt is not searched on
_PATIENCE = 2  # removals in a row that may lower the predicted speedup
_TRIED = 8  # removals tried in later rounds, the best of earlier ones
_SHORTEST_ANSWER = 2
_MASKED_ATTENTION = ("sdpa", "eager", FOLDED, RAGGED)


def greedy_answer(target: Target, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Decode a prompt greedily, with lookup for speed, and return the answer's token ids."""
    run = GenerationRun(
        prompt, target, LookupDrafter(Lookup(None)), policy=FixedLength(4), max_new_tokens=tokens
    )
    for _ in run:
        pass
    return run.result().token_ids


@dataclass(frozen=True)
class Agreement:
    """How well one-token drafts agree with the target.

    Attributes:
        accepted: Share of drafts that were the target's greedy choice.
        overlap: Mean of ``sum_x min(p(x), q(x))`` at temperature 1. It is less noisy than ``accepted``, and layers
            chosen by it do better on other prompts (docs/drafters.md).
    """

    accepted: float
    overlap: float
    tested: int


@dataclass(frozen=True)
class FormCosts:
    """Times of passes of the target and of some of its forms.

    Attributes:
        passes: Times of the target's forward passes, and by name those of two forms of each precision.
        layers: Number of layers of these forms, by (name, int8).
    """

    passes: PassCosts
    layers: dict[tuple[str, bool], int]

    def c(self, layers: int, int8: bool) -> float:
        """Return the time of a drafter's forward over the target's with one token, linear in the number of layers."""
        (few, at_few), (all_, at_all) = sorted(
            (count, self.passes.c(name)) for (name, kind), count in self.layers.items() if kind == int8
        )
        per_layer = max(0.0, (at_all - at_few) / (all_ - few))
        return max(at_all - per_layer * (all_ - layers), 0.0)


@dataclass(frozen=True)
class Candidate:
    """A form with its prediction.

    Attributes:
        cost: c.
        gamma: The draft length with the highest predicted speedup.
        speedup: That speedup.
    """

    form: SelfForm
    agreement: Agreement
    cost: float
    gamma: int
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        return self.speedup, self.agreement.overlap


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        path: The best form with 0, 1, 2, ... layers left out, in the order of the search.
        best: The form with the highest predicted speedup.
        choice: This form with its results on the held-out prompts, to store.
        complete: Whether the search ended before its time limit.
    """

    path: tuple[Candidate, ...]
    best: Candidate
    choice: Choice
    complete: bool


def calibrate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 24,
    int8: bool | None = None,
    seconds: float = 600.0,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Calibration:
    """Search for the form of itself that a target drafts with fastest. Nothing is stored.

    Args:
        target: The target in the state in which it will decode: on a CPU packed, int8 or int4.
        prompts: Token ids of typical prompts, at least 2. Every third only checks the choice.
        tokens: Length of the answers whose tokens are drafted.
        int8: Whether int8 layers are considered; ``None`` on a CPU, unless the target is int8 or int4 itself.
        seconds: Time limit of the search, which then returns the best form so far.
        clock: A function that returns the time; ``None`` for the clock of the target's device.

        Raises:
            UsageError: The model cannot skip layers and has no int8 form, the prompts are unsuitable, or a value is out
            of its range.
    """
    if tokens < _SHORTEST_ANSWER:
        raise UsageError(
            f"Calibration answers of {tokens} tokens are too short.", f"Ask for at least {_SHORTEST_ANSWER}."
        )
    if not seconds > 0:
        raise UsageError(f"The search time is {seconds:g} s.", "Give more than 0.")
    clock = clock or clock_for(str(target.scorer.device))
    kinds, skippable = _possible(target, int8)
    if len(prompts) < 2:
        raise UsageError("A calibration needs at least 2 prompts.", "Name more prompts.")
    texts = _answered(target, prompts, tokens, progress)
    held_out = texts[_HELD_OUT - 1 :: _HELD_OUT] or texts[-1:]
    searched = [text for text in texts if text not in held_out]
    forms = _Forms(target, kinds)
    costs = _time_passes(target, forms, texts[0].tokens, skippable, clock, progress)
    v = [costs.passes.v(n) for n in range(_LONGEST_DRAFT + 2)]

    def judged(form: SelfForm, texts: Sequence[_Text] = searched) -> Candidate:
        agreement = _agreement(forms.model(form), texts)
        c = costs.c(forms.layers - len(form.skip), form.int8)
        tokens = [expected_tokens(agreement.accepted, gamma) for gamma in range(_LONGEST_DRAFT + 1)]
        gamma = best_length(tokens, lambda length: length * c, v, least=1)
        return Candidate(form, agreement, c, gamma, predicted_speedup(tokens[gamma], gamma, c, v[gamma + 1]))

    cheapest_first = sorted(kinds, key=lambda int8: costs.c(forms.layers, int8))
    end = clock.now() + seconds
    path, complete = _search(judged, cheapest_first, skippable, clock, end, progress)
    best = max(path, key=lambda candidate: candidate.rank)
    checked = judged(best.form, held_out)
    choice = Choice(
        target=target.name,
        layers=forms.layers,
        int8=best.form.int8,
        skip=best.form.skip,
        accepted=checked.agreement.accepted,
        tested=checked.agreement.tested,
        cost=best.cost,
        gamma=checked.gamma,
        speedup=checked.speedup,
    )
    return Calibration(tuple(path), best, choice, complete)


def _possible(target: Target, int8: bool | None) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return the precisions to consider, and the layers that may be left out."""
    on_cpu = target.scorer.device.type == "cpu"
    if int8 and target.quantization is not None:
        raise UsageError(f"The target is {target.quantization} already.", "Leave --int8 out.")
    int8 = on_cpu and target.quantization is None if int8 is None else int8
    model = target.language_model.model
    skippable = skippable_layers(model.config)
    try:
        cheaper_form(model, range(target.language_model.layers), int8=False)
    except ValueError:
        skippable = ()
    if not skippable or not {"position_ids", "attention_mask"} <= set(
        inspect.signature(model.forward).parameters
    ):
        raise UsageError(
            "The target cannot leave out layers, so there is nothing to calibrate.",
            "Use self:int8 on a CPU, or a drafter model.",
        )
    if model.config._attn_implementation not in _MASKED_ATTENTION:
        raise UsageError(
            f"The target's attention, {model.config._attn_implementation}, takes no custom mask.",
            "Load the target with sdpa or eager attention.",
        )
    return (True, False) if int8 else (False,), skippable


# -- texts -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Text:
    """A prompt with the target's answer, prefilled.

    Attributes:
        tokens: Tokens of prompt and answer; all tokens of the answer except the first are drafted.
        drafted: Number of drafted tokens.
        cache: The target's keys and values of all tokens except the last.
        chosen: The target's choices for the drafted tokens, [drafted].
        p: Its distributions there, [drafted, vocab].
    """

    tokens: list[int]
    drafted: int
    cache: Any
    chosen: torch.Tensor
    p: torch.Tensor


def _answered(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    progress: Progress | None,
) -> list[_Text]:
    """Return the prompts with the target's greedy answers, without those too short to draft in."""
    window = _shortest_window(target)
    texts = []
    for done, prompt in enumerate(prompts):
        if progress is not None:
            progress.update("answering the prompts", done, len(prompts))
        limit = target.scorer.context_limit
        # During a pass, the cache holds the drafted tokens a second time.
        if len(prompt) + 2 * tokens > min(window, math.inf if limit is None else limit):
            continue
        answer = greedy_answer(target, prompt, tokens)
        if len(answer) >= _SHORTEST_ANSWER:
            texts.append(_read(target, [*prompt, *answer], len(answer) - 1))
    target.scorer.begin()
    if len(texts) < 2:
        raise UsageError(
            "Fewer than 2 prompts are suitable: the others do not fit the context or a sliding window, or their"
            " answers end immediately.",
            "Choose shorter prompts, or others.",
        )
    return texts


def _shortest_window(target: Target) -> float:
    layers = DynamicCache(config=target.language_model.model.config).layers
    return min((getattr(layer, "sliding_window", None) or math.inf for layer in layers), default=math.inf)


def _read(target: Target, tokens: list[int], drafted: int) -> _Text:
    """Prefill a text into a cache of its own."""
    model = target.language_model.model
    scorer = Scorer(model, make_cache("dynamic", model.config))
    logits = scorer.logits(tokens[:-1], rows=drafted)
    scorer.rollback(len(tokens) - 1)
    return _Text(tokens, drafted, scorer.cache, logits.argmax(dim=-1), logits.float().softmax(dim=-1))


# -- agreement ---------------------------------------------------------------------------------------


def _agreement(model: Any, texts: Sequence[_Text]) -> Agreement:
    """Draft every token of the answers with a form of the target, on the target's cache."""
    same, overlap, tested = 0, 0.0, 0
    for text in texts:
        logits = _drafting_logits(model, text)
        same += int((logits.argmax(dim=-1) == text.chosen).sum())
        q = logits.float().softmax(dim=-1)
        overlap += float(torch.minimum(q, text.p).sum())
        tested += text.drafted
    return Agreement(same / tested, overlap / tested, tested)


@torch.inference_mode()
def _drafting_logits(model: Any, text: _Text) -> torch.Tensor:
    """Return the logits from which a drafter on the target's cache drafts
    each token, [drafted, vocab], in one forward.
    """
    cached_len, count = len(text.tokens) - 1, text.drafted
    first = cached_len - count  # position of the token that the first draft follows
    embeddings = model.get_input_embeddings().weight
    ids = torch.tensor([text.tokens[first:cached_len]], device=embeddings.device)
    positions = torch.arange(first, cached_len, device=embeddings.device)
    # [drafted, cached_len + drafted]: the tokens before the fed one, then the fed token itself.
    before = torch.arange(cached_len, device=embeddings.device)[None, :] < positions[:, None]
    sees = torch.cat([before, torch.eye(count, dtype=torch.bool, device=embeddings.device)], dim=1)
    mask = torch.zeros(sees.shape, dtype=model.dtype, device=embeddings.device)
    mask.masked_fill_(~sees, torch.finfo(model.dtype).min)
    arguments = text.cache.model_kwargs()
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = count
    try:
        logits: torch.Tensor = model(
            input_ids=ids, position_ids=positions[None], attention_mask=mask[None, None], **arguments
        ).logits[0, -count:]
    finally:
        text.cache.rollback(cached_len)
    return logits.to(text.p.device)


# -- costs -------------------------------------------------------------------------------------------


class _Forms:
    """Models of all forms of a target, which share the target's weights and one int8 copy of them."""

    def __init__(self, target: Target, kinds: Sequence[bool]) -> None:
        self.target, self.kinds = target, kinds
        self.layers = target.language_model.layers
        whole = target.language_model.model
        self._whole = {
            int8: cheaper_form(whole, range(self.layers), int8=True) if int8 else whole for int8 in kinds
        }

    def model(self, form: SelfForm) -> Any:
        return cheaper_form(self._whole[form.int8], form.kept(self.layers), int8=False)

    def drafter(self, form: SelfForm) -> SelfDrafter:
        """Return a drafter on the target's cache."""
        return SelfDrafter(Scorer(self.model(form), self.target.scorer.cache), str(form))


def _time_passes(
    target: Target,
    forms: _Forms,
    text: Sequence[int],
    skippable: Sequence[int],
    clock: Clock,
    progress: Progress | None,
) -> FormCosts:
    """Time passes of the target, and of its forms with all layers and with two thirds of them, in turn."""
    fewer = skippable[:: max(1, round(len(skippable) / max(1, forms.layers // 3)))]
    timed = [SelfForm(int8=int8, skip=tuple(skip)) for int8 in forms.kinds for skip in ((), fewer)]
    drafters = {str(form): forms.drafter(form) for form in timed}
    times = time_passes(target.scorer, drafters, text, _WIDTHS, clock, _TIMED, Random(0), progress)
    layers = {(str(form), form.int8): forms.layers - len(form.skip) for form in timed}
    return FormCosts(pass_costs(times), layers)


# -- the search --------------------------------------------------------------------------------------


def _search(
    judge: Callable[[SelfForm], Candidate],
    kinds: Sequence[bool],
    skippable: Sequence[int],
    clock: Clock,
    end: float,
    progress: Progress | None,
) -> tuple[list[Candidate], bool]:
    """Leave out one layer after the other: each time the one whose removal keeps the largest overlap.

    The first round tries every layer. Later rounds try only the layers whose removal kept the largest overlap when last
    tried: removing a layer that was expensive before is seldom cheap after others are gone. The first precision is used
    for the search; the others are measured on the forms that it finds.

    Args:
        kinds: Precisions to consider, the one to search with first.
        skippable: Layers that may be left out.
        clock, end: The search ends at this time.

    Returns:
        The best form for every number of layers left out, and whether the search ended before its time limit.
    """
    skip: tuple[int, ...] = ()
    path: list[Candidate] = []
    overlaps = dict.fromkeys(skippable, math.inf)  # by layer, when last tried
    if True in kinds:  # without int8 the whole target would draft at its own cost
        path.append(judge(SelfForm(int8=True)))
    falls, complete = 0, True
    while falls < _PATIENCE and len(skip) < len(skippable):
        left = [layer for layer in skippable if layer not in skip]
        if skip:
            left = sorted(left, key=overlaps.__getitem__, reverse=True)[:_TRIED]
        tried: list[Candidate] = []
        for done, layer in enumerate(left):
            if progress is not None:
                removed = counted(len(skip) + 1, "layer")
                progress.update(f"trying to leave out {removed}", done, len(left))
            if clock.now() >= end:
                complete = False
                break
            tried.append(judge(SelfForm(int8=kinds[0], skip=tuple(sorted((*skip, layer))))))
            overlaps[layer] = tried[-1].agreement.overlap
        if not complete:
            break
        found = max(tried, key=lambda candidate: candidate.agreement.overlap)
        skip = found.form.skip
        others = [judge(SelfForm(int8=int8, skip=skip)) for int8 in kinds[1:]]
        found = max((found, *others), key=lambda candidate: candidate.rank)
        falls = 0 if not path or found.speedup >= max(each.speedup for each in path) else falls + 1
        path.append(found)
    if not path:
        raise UsageError("The time was too short for one round of the search.", "Allow more minutes.")
    return path, complete
