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

_REPLAYED, _REPLAYED_TOKENS = 8, 4
"""How many of a loaded drafter's first steps draft a chain twice to compare, and its length."""

_RIGHT = "Correct it; docs/write-a-drafter.md says what a drafter promises."
_PACKAGE = str(Path(__file__).parents[1])


def make_outside(spec: Outside, target: Any) -> FreeDrafter:
    """Make a drafter from outside for a target; it is checked while it drafts.

    Raises:
        UsageError, RunError: See ``find_class``, or it cannot be made.
    """
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
    """Turn an exception within the block into an error that says in which line of the user's it was raised."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)
        own = [each for each in trace if _is_users(each.filename)]
        place = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else _place_of(kind, method)
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{Path(error.filename).name}, line {error.lineno}"
        said = (
            one_line(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {one_line(error)}"
        )
        raise RunError(f"{what} ({place}): {said.rstrip('. ')}.", _RIGHT) from error


def _is_users(file: str) -> bool:
    return not file.startswith((_PACKAGE, "<", str(Path(importlib.util.__file__).parent)))


def _place_of(kind: type | None, method: str) -> str:
    """Return where the user's class defines a method, or what the package's own method calls in its place."""
    for name in (method, "guess", "candidates"):
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None and _is_users(code.co_filename):
            return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    return getattr(kind, "__module__", "its package")


class _Checked(FreeDrafter):
    """Stands before the class of a drafter from outside, and checks what it gives.

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

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        before = self.epoch
        with self._told("begin"):
            super().begin(prompt, cached_tokens)
        if self.epoch == before:
            raise self._broken("begin", "does not call super().begin(prompt)")

    def take_in(self, context: Sequence[int], first: int) -> None:
        with self._told("take_in"):
            super().take_in(context, first)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        with self._told("guess"):
            guess = super().guess(context, drafted, sampling)
        if guess is None:
            return None
        if not isinstance(guess, Guess):
            raise self._broken("guess", f"guesses {one_line(repr(guess))}, which is neither a Guess nor None")
        self._check("guess", guess.token, guess.q)
        return guess

    def update(self, outcome: StepOutcome) -> None:
        with self._told("update"):
            super().update(outcome)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        if self.replays[0] > 0 and plan.budget > 0:
            self.replays[0] -= 1
            first = yield from self._rolled_back(context, plan)
            again = yield from self._rolled_back(context, plan)
            if first != again:
                raise self._broken(
                    "propose",
                    f"drafts {first}, and after a roll-back {again} in its place: it must not learn from what it"
                    " drafts, and draw only from the q of a Guess",
                )
        return (yield from self._proposed(context, plan))

    def _rolled_back(self, context: Sequence[int], plan: StepPlan) -> Decoding[list[int]]:
        """Draft a chain that is never verified, and return its tokens."""
        most = min(plan.budget, _REPLAYED_TOKENS)
        chain = replace(plan, budget=most, policy=FixedLength(most), random=Randomness(0))
        draft = yield from self._proposed(context, chain)
        tokens = list(draft.tokens)
        self.update(StepOutcome(context, 0, torch.empty(1, self.vocab_size), tokens))
        return tokens

    def _proposed(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        before = len(context)
        with self._told("propose"):
            draft = yield from super().propose(context, plan)
        if not isinstance(draft, Draft):
            raise self._broken("propose", f"proposes {one_line(repr(draft))} in place of a Draft")
        if len(context) != before:
            raise self._broken("propose", "changes the context")
        if draft.parents is not None and not plan.policy.branches:
            raise self._broken("propose", f"proposes a tree, and {plan.policy.name} wants a chain")
        longest = max((len(draft.branch(node)) for node in range(len(draft.tokens))), default=0)
        if longest > plan.budget:
            raise self._broken("propose", f"drafts {longest} tokens where {plan.budget} fit")
        for node in range(-1, len(draft.tokens)):
            for drawn in draft.draws(node):
                for place, token in enumerate(drawn.tokens):
                    self._check("propose", token, drawn.q if place == 0 else None)
        return draft

    def _check(self, method: str, token: Any, q: torch.Tensor | None) -> None:
        """Check a token, and the distribution that it was drawn from."""
        if type(token) is not int or not 0 <= token < self.vocab_size:
            what = (
                f"drafts the token {one_line(repr(token))}, and the target's are 0 to {self.vocab_size - 1}"
            )
            raise self._broken(method, what)
        if q is None:
            return
        if q.shape != (self.vocab_size,):
            raise self._broken(method, f"has a q of shape {list(q.shape)}, not [{self.vocab_size}]")
        if not abs(float(q.sum()) - 1.0) < 1e-3 or float(q.min()) < 0.0:
            raise self._broken(method, f"has a q that sums to {float(q.sum()):.4g}, not to 1, or is negative")
        if method == "propose" and not float(q[token]) > 0.0:
            raise self._broken(method, f"drafts the token {token}, to which its q gives no probability")

    def _told(self, method: str) -> Any:
        return _told(f"The drafter {self.spec_name} fails", type(self).__mro__[2], method)

    def _broken(self, method: str, what: str) -> RunError:
        return RunError(
            f"The drafter {self.spec_name} ({_place_of(type(self).__mro__[2], method)}) {what}.", _RIGHT
        )
