"""Drafters from outside the package, held to what every drafter promises.

A file runs only where the user names it (``./mine.py:MyDrafter``): stored results do not know its folder. Whatever goes
wrong in such a drafter is told in a sentence with the file and the line.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import one_line
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.sampling import Randomness
from specbench.drafters.free import FreeDrafter, Guess
from specbench.policies import FixedLength
from specbench.specs.drafters import Outside, installed_drafters

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, StepPlan
    from specbench.decoding.sampling import Sampling

_REPLAYED = 8
"""How many of a loaded drafter's first steps draft a chain twice to compare."""

_OTHERS = ("<", str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent / "importlib"))
"""Beginnings of file names in a traceback that do not belong to the user's code."""


def make_outside(spec: Outside, target: Any) -> FreeDrafter:
    """Make a drafter from outside for a target; it is checked while it drafts."""
    kind = find_class(spec)
    own = {"spec_name": str(spec), "vocab_size": target.vocab_size, "replays": [_REPLAYED]}
    with _told(f"The drafter {spec} cannot be made", kind):
        made: FreeDrafter = type(kind.__name__, (_Checked, kind), own)(str(spec), target)
    return made


def find_class(spec: Outside) -> type[FreeDrafter]:
    """Return the class of a drafter from outside.

    Raises:
        UsageError: There is no such file or class, or it is no drafter.
        RunError: Its module cannot be imported.
    """
    if spec.file is None:
        with _told(f"The drafter {spec} cannot be imported"):
            found = installed_drafters()[spec.cls].load()
    else:
        path = Path(spec.file.source).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"There is no file {spec.file.source!r}.", "Check the path.")
        found = _names_in(path, path.stat().st_mtime_ns).get(spec.cls)
    if not (isinstance(found, type) and issubclass(found, FreeDrafter)):
        raise UsageError(
            f"The drafter {spec} is {'missing' if found is None else one_line(repr(found))}.",
            "Name a class there that derives from specbench.FreeDrafter.",
        )
    return found


@cache
def _names_in(path: Path, changed: int) -> dict[str, Any]:  # noqa: ARG001 - a changed file runs again
    """Run a file as a module, and return its names."""
    spec = importlib.util.spec_from_file_location(f"specbench_drafter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with _told(f"{path.name} cannot be imported"):
        spec.loader.exec_module(module)
    return vars(module)


@contextmanager
def _told(what: str, kind: type | None = None, method: str = "__init__") -> Iterator[None]:
    """Turn an exception within the block into a sentence with the line of the user's that raised it.

    Args:
        what: The sentence's beginning.
        kind, method: The user's class, and the method that is at fault if no line of the user's raised it.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        places = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
        codes = (
            getattr(getattr(kind, name, None), "__code__", None) for name in ("candidates", "guess", method)
        )
        places = [(code.co_filename, code.co_firstlineno) for code in codes if code] + places
        if isinstance(error, SyntaxError):
            places.append((error.filename or "", error.lineno))
        own = [(file, line) for file, line in places if not file.startswith(_OTHERS)]
        place = f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else "its package"
        said = (
            one_line(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {one_line(error)}"
        )
        hint = "Correct it; docs/write-a-drafter.md says what a drafter promises."
        raise RunError(f"{what} ({place}): {said.rstrip('. ')}.", hint) from error


class _Checked(FreeDrafter):
    """Wraps a drafter from outside the package, and checks everything it returns.

    Attributes:
        spec_name: Its name.
        vocab_size: The target's.
        replays: How many steps are still repeated; one list for all forks.
    """

    spec_name: str
    vocab_size: int
    replays: list[int]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.traits = replace(self.traits, name=self.spec_name)

    def _told(self, method: str) -> Any:
        return _told(f"The drafter {self.spec_name} fails", type(self).__mro__[2], method)

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        before = self.epoch
        with self._told("begin"):
            super().begin(prompt, cached_tokens)
            _require(self.epoch != before, "begin does not call super().begin(prompt)")

    def take_in(self, context: Sequence[int], first: int) -> None:
        with self._told("take_in"):
            super().take_in(context, first)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        with self._told("guess"):
            guess = super().guess(context, drafted, sampling)
            if guess is not None and not isinstance(guess, Guess):
                raise UsageError(f"guess returns {one_line(repr(guess))}, which is neither a Guess nor None")
            if guess is not None:
                self._check(guess.token, guess.q, Integral)
                sure: Any = guess.match_confidence
                known = isinstance(sure, Real) and 0.0 <= float(sure) <= 1.0
                _require(known, f"the match_confidence is {sure!r} and not 0 to 1")
        return guess

    def update(self, outcome: StepOutcome) -> None:
        with self._told("update"):
            super().update(outcome)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        if self.replays[0] > 0 and plan.budget > 0:
            self.replays[0] -= 1
            first = yield from self._rolled_back(context, plan)
            again = yield from self._rolled_back(context, plan)
            with self._told("propose"):
                _require(
                    first == again,
                    f"it drafts {first}, and after a roll-back {again} in its place; it must not learn from what it"
                    " drafts, and draw only from the q of a Guess",
                )
        return (yield from self._proposed(context, plan))

    def _rolled_back(self, context: Sequence[int], plan: StepPlan) -> Decoding[list[int]]:
        """Draft a chain that is never verified, and return its tokens."""
        most = min(plan.budget, 4)
        chain = replace(plan, budget=most, policy=FixedLength(most), random=Randomness(0))
        draft = yield from self._proposed(context, chain)
        tokens = list(draft.tokens)
        self.update(StepOutcome(context, 0, torch.empty(1, self.vocab_size), tokens))
        return tokens

    def _proposed(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        before = len(context)
        with self._told("propose"):
            draft = yield from super().propose(context, plan)
            _require(len(context) == before, "it changes the context")
            if not isinstance(draft, Draft):
                raise UsageError(f"it proposes {one_line(repr(draft))} in place of a Draft")
            wanted = plan.policy.branches or draft.parents is None
            _require(wanted, f"it proposes a tree, and {plan.policy.name} wants a chain")
            longest = max((len(draft.branch(node)) for node in range(len(draft.tokens))), default=0)
            _require(longest <= plan.budget, f"it drafts {longest} tokens where {plan.budget} fit")
            for drawn in (each for node in range(-1, len(draft.tokens)) for each in draft.draws(node)):
                for token in drawn.tokens:
                    self._check(token, None)
                if drawn.q is not None:
                    self._check(drawn.tokens[0], drawn.q)
                    likely = float(drawn.q[drawn.tokens[0]]) > 0.0
                    _require(
                        likely, f"it drafts the token {drawn.tokens[0]}, to which its q gives no probability"
                    )
        return draft

    def _check(self, token: Any, q: Any, kind: Any = int) -> None:
        """Check a token, and the distribution that it was drawn from."""
        known = isinstance(token, kind) and 0 <= token < self.vocab_size
        _require(known, f"it drafts the token {token!r}, and the target's are 0 to {self.vocab_size - 1}")
        if q is None:
            return
        fits = isinstance(q, torch.Tensor) and q.shape == (self.vocab_size,)
        _require(fits, f"q is no tensor with the shape [{self.vocab_size}]")
        total = float(q.sum())
        _require(
            abs(total - 1.0) < 1e-3 and float(q.min()) >= 0.0,
            f"q sums to {total:.4g}, not to 1, or is negative",
        )


def _require(kept: bool, what: str) -> None:
    if not kept:
        raise UsageError(one_line(what))
