"""Drafters from outside the package, held to what every drafter promises.

They are given copies of all that decides the output, and what they return is checked and copied. Their tokens are drawn
by the package. So a drafter that breaks a promise is refused or slow, but does not change the output's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.decoding.drafts import Guess, StepOutcome
from specbench.drafters.free import CandidateDrafter, FreeDrafter
from specbench.specs.drafters import Outside
from specbench.specs.own_code import told

if TYPE_CHECKING:
    from specbench.decoding.protocols import ScorerLike
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
        UsageError: There is no such file or class, it is no drafter, it lacks a method, or it has a ``propose``.
        RunError: Its module cannot be imported.
    """
    kind = spec.load()
    if not (isinstance(kind, type) and issubclass(kind, FreeDrafter)):
        raise UsageError(
            f"The drafter {spec} is {'missing' if kind is None else one_line(repr(kind))}.",
            "Name a class there that derives from specbench.FreeDrafter.",
        )
    base = CandidateDrafter if issubclass(kind, CandidateDrafter) else FreeDrafter
    for method in ("take_in", "candidates" if base is CandidateDrafter else "guess"):
        if getattr(kind, method) is getattr(base, method, None):
            raise UsageError(
                f"The drafter {spec} lacks the method {method}.",
                "Define it; docs/drafters.md says what each method does.",
            )
    if kind.propose is not base.propose:
        raise UsageError(
            f"The drafter {spec} has a propose of its own, whose draws cannot be checked.",
            "Define guess or candidates, or pass it to speculative_generate as an object.",
        )
    return kind


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

    def begin(self, prompt: Sequence[int]) -> None:
        before, self._context = self.epoch, tuple(prompt)
        with self._told("begin"):
            super().begin(self._context)
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
            q = None if guess.q is None else self._distribution(guess.q)
            return Guess(self._token(guess.token), _share("match_confidence", guess.match_confidence), q)

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        with self._told("candidates"):
            candidates = super().candidates(self._frozen(context), tuple(drafted))  # type: ignore[misc]
            if not isinstance(candidates, Mapping):
                raise UsageError(f"candidates returns {one_line(repr(candidates))}, which is no dict")
            return {self._token(token): _share("chance", chance) for token, chance in candidates.items()}

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

    def _token(self, token: Any) -> int:
        known = isinstance(token, Integral) and 0 <= int(token) < self.vocab_size
        _require(known, f"it drafts the token {token!r}, and the target's are 0 to {self.vocab_size - 1}")
        return int(token)

    def _distribution(self, q: Any) -> torch.Tensor:
        """Return a copy of a distribution, [vocab], with a sum of exactly 1, where the target computes."""
        fits = isinstance(q, torch.Tensor) and q.is_floating_point() and q.shape == (self.vocab_size,)
        _require(fits, f"q is no float tensor with the shape [{self.vocab_size}]")
        copy: torch.Tensor = q.detach().to(self.device, torch.float32, copy=True)
        total = float(copy.sum())
        known = abs(total - 1.0) < 1e-3 and not bool((copy < 0.0).any())
        _require(known, f"q sums to {total:.4g}, not to 1, or is negative")
        return copy.div_(total)


def _share(name: str, value: Any) -> float:
    known = isinstance(value, Real) and 0.0 <= float(value) <= 1.0
    _require(known, f"the {name} is {value!r} and not 0 to 1")
    return float(value)


def _require(kept: bool, what: str) -> None:
    if not kept:
        raise UsageError(one_line(what))
