"""Drafters from outside the package, held to what every drafter promises.

They are given copies of all that decides the output, and their distributions are copied and compared with what was
drawn. So a drafter that keeps no promise is refused or slow, but does not change the output's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.decoding.drafts import Draft, Draws, StepOutcome
from specbench.drafters.drawn import RecordedDraws, find_undrawn
from specbench.drafters.free import CandidateDrafter, FreeDrafter, Guess
from specbench.specs.drafters import Outside
from specbench.specs.own_code import told

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan
    from specbench.decoding.sampling import Sampling


def make_outside(spec: Outside, target: Any) -> FreeDrafter:
    """Make a drafter from outside for a target; it is checked while it drafts."""
    kind = find_class(spec)
    own = {"spec_name": str(spec), "vocab_size": target.vocab_size, "device": target.scorer.device}
    with told(f"The drafter {spec} cannot be made", kind, "guess", "__init__"):
        made: FreeDrafter = type(kind.__name__, (_Checked, kind), own)(str(spec), target)
    return made


def find_class(spec: Outside) -> type[FreeDrafter]:
    """Return the class of a drafter from outside.

    Raises:
        UsageError: There is no such file or class, it is no drafter, or it lacks a method.
        RunError: Its module cannot be imported.
    """
    found = spec.load()
    if not (isinstance(found, type) and issubclass(found, FreeDrafter)):
        raise UsageError(
            f"The drafter {spec} is {'missing' if found is None else one_line(repr(found))}.",
            "Name a class there that derives from specbench.FreeDrafter.",
        )
    base = CandidateDrafter if issubclass(found, CandidateDrafter) else FreeDrafter
    for method in ("take_in", "candidates" if base is CandidateDrafter else "guess"):
        if found.propose is base.propose and getattr(found, method) is getattr(base, method, None):
            raise UsageError(
                f"The drafter {spec} lacks the method {method}.",
                "Define it; docs/write-a-drafter.md says what each method does.",
            )
    return found


class _Checked(FreeDrafter):
    """Wraps a drafter from outside the package: it is given copies, and everything it returns is checked and copied.

    Attributes:
        spec_name: Its name.
        vocab_size, device: The target's.
    """

    spec_name: str
    vocab_size: int
    device: torch.device
    _context: tuple[int, ...] = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.traits = replace(self.traits, name=self.spec_name)

    def _told(self, method: str) -> Any:
        own = type(self).__mro__[2]
        return told(f"The drafter {self.spec_name} fails", own, "candidates", "guess", method)

    def _frozen(self, context: Sequence[int]) -> tuple[int, ...]:
        """Return a context as a tuple, of which there is one for all calls of a step."""
        if len(context) != len(self._context):  # it only grows
            self._context = tuple(context)
        return self._context

    def fork(self, scorer_like: ScorerLike) -> FreeDrafter:
        with self._told("fork"):
            fork = super().fork(scorer_like)
            own = isinstance(fork, _Checked) and fork is not self
            _require(own, "fork returns no new drafter of its class: type(self)(self.spec, self.target)")
        return fork

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        before, self._context = self.epoch, tuple(prompt)
        with self._told("begin"):
            super().begin(self._context, cached_tokens)
            _require(self.epoch != before, "begin does not call super().begin(prompt)")

    def take_in(self, context: Sequence[int], first: int) -> None:
        with self._told("take_in"):
            super().take_in(self._frozen(context), first)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        with self._told("guess"):
            guess = super().guess(self._frozen(context), tuple(drafted), sampling)
            if guess is None:
                return None
            if not isinstance(guess, Guess):
                raise UsageError(f"guess returns {one_line(repr(guess))}, which is neither a Guess nor None")
            sure: Any = guess.match_confidence
            known = isinstance(sure, Real) and 0.0 <= float(sure) <= 1.0
            _require(known, f"the match_confidence is {sure!r} and not 0 to 1")
            q = None if guess.q is None else self._distributions(guess.q)
            return Guess(self._token(guess.token), float(sure), q)

    def update(self, outcome: StepOutcome) -> None:
        if getattr(type(self).__mro__[2], "update", None) is FreeDrafter.update:
            return
        given = replace(
            outcome,
            context=self._frozen(outcome.context),
            logits=outcome.logits.clone(),
            tokens=tuple(outcome.tokens),
            path=tuple(outcome.path),
        )
        with self._told("update"):
            super().update(given)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        random = RecordedDraws(plan.random)
        with self._told("propose"):
            draft = yield from super().propose(self._frozen(context), replace(plan, random=random))
            if not isinstance(draft, Draft):
                raise UsageError(f"it proposes {one_line(repr(draft))} in place of a Draft")
            wanted = plan.policy.branches or draft.parents is None
            _require(wanted, f"it proposes a tree, and {plan.policy.name} wants a chain")
            draft = self._copied(draft)
            longest = max((len(draft.branch(node)) for node in range(len(draft.tokens))), default=0)
            _require(longest <= plan.budget, f"it drafts {longest} tokens where {plan.budget} fit")
            if not plan.sampling.greedy:
                undrawn = find_undrawn(draft, random.draws)
                _require(undrawn is None, f"{undrawn}; draw each token with plan.random.draw(q), and keep it")
        return draft

    def _copied(self, draft: Draft) -> Draft:
        """Return a copy of a draft whose lists fit together, which the drafter does not hold."""
        count, numbers = len(draft.tokens), (draft.prefill_s, 0 if draft.passes is None else draft.passes)
        known = all(isinstance(number, Real) for number in numbers)
        _require(known, "prefill_s or passes of its Draft is no number")
        for name, least in (("logits", count), ("match_confidence", 0)):
            values = getattr(draft, name)
            enough = values is None or len(values) >= least
            _require(enough, f"{count} tokens are drafted, and {name} has less")
        tokens = [self._token(token) for token in draft.tokens]
        if draft.parents is None:
            _require(draft.candidates is None, "it proposes a chain with candidates")
            q = None if draft.q is None else self._distributions(draft.q, count)
            return replace(draft, tokens=tokens, q=q)
        parents = list(draft.parents)
        fits = len(parents) == count and all(-1 <= parent < node for node, parent in enumerate(parents))
        _require(fits and isinstance(draft.candidates, Mapping), "the nodes of its tree do not fit together")
        assert draft.candidates is not None
        candidates = {
            node: [
                Draws([*map(self._token, each)], q if q is None else self._distributions(q))
                for each, q in groups
            ]
            for node, groups in draft.candidates.items()
        }
        for node in range(-1, count):
            drafted = sorted(token for token, parent in zip(tokens, parents, strict=True) if parent == node)
            groups = candidates.get(node, [])
            named = sorted({token for each, _ in groups for token in each})
            _require(named == drafted, f"the nodes after node {node} are not its candidates")
            sure = [q is None for _, q in groups]  # these may depend on what was drawn
            _require(sure == sorted(sure), "a certain candidate comes before one that is drawn")
        return replace(draft, tokens=tokens, parents=parents, candidates=candidates, q=None)

    def _token(self, token: Any) -> int:
        known = isinstance(token, Integral) and 0 <= int(token) < self.vocab_size
        _require(known, f"it drafts the token {token!r}, and the target's are 0 to {self.vocab_size - 1}")
        return int(token)

    def _distributions(self, q: Any, *rows: int) -> torch.Tensor:
        """Return a copy of distributions, [*rows, vocab], with sums of exactly 1, where the target computes."""
        fits = isinstance(q, torch.Tensor) and q.is_floating_point() and q.shape == (*rows, self.vocab_size)
        _require(fits, f"q is no float tensor with the shape {[*rows, self.vocab_size]}")
        copy: torch.Tensor = q.detach().to(self.device, torch.float32, copy=True)
        sums = copy.sum(dim=-1, keepdim=True)
        off = next((each for each in sums.flatten().tolist() if not abs(each - 1.0) < 1e-3), 1.0)
        known = off == 1.0 and not bool((copy < 0.0).any())
        _require(known, f"q sums to {off:.4g}, not to 1, or is negative")
        return copy.div_(sums)


def _require(kept: bool, what: str) -> None:
    if not kept:
        raise UsageError(one_line(what))
