"""What a forward pass of the drafter and of the target costs: measured during the run, or given."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from specbench.base.errors import UsageError
from specbench.base.record import Count, Json, Seconds
from specbench.decoding.theory import PassCosts, PassSeconds, reading_seconds
from specbench.policies.width_times import INSTANT, LATEST_STEPS, WidthTimes, fit_drafts

if TYPE_CHECKING:
    from specbench.decoding.records import Step

COST_NOTES = ("drafter_pass_s", "rest_s")
"""The notes under which results keep the two samples that ``MeasuredCosts`` takes from each step."""

READING_NOTE = "reading_s"
"""The note of the time that reading the context was expected to take, while the drafter had not read it."""

LATEST_PASSES = 15
"""How many of the drafter's latest passes count."""

ASSUMED_C = 0.2
"""The cost ratio assumed before a drafter's pass is measured."""

FIRST_REACH = 3
"""The longest draft before anything is timed."""

_NEAR = 0.02
"""The share by which a context has to grow before costs are computed again."""

_ByDrafter = Seconds | Mapping[str, Seconds] | None


class _CostsFile(Struct):
    """Costs as a file has them (docs/results-format.md); those of drafters are given alone or by drafter."""

    target_pass_s: PassSeconds
    drafter_pass_s: _ByDrafter = None
    context_tokens: Count | None = None
    target_context_s: PassSeconds = {}
    drafter_context_s: _ByDrafter = None
    drafter_reading_s: Seconds | Mapping[str, Seconds | Mapping[str, Seconds]] | None = None
    drafter_later_pass_s: _ByDrafter = None
    steps: Sequence[tuple[Seconds | None, Seconds | None]] | None = None


COST_FIELDS = tuple(name for name in _CostsFile.__struct_fields__ if name != "steps")
"""The fields of costs that hold for every generation."""


class CostSource:
    """Seconds of forward passes, from which a policy decides; only their ratios matter."""

    @property
    def catching_up_s(self) -> float:
        """Seconds in which the drafter reads missing context before it can draft; 0 where that is not counted."""
        return 0.0

    @property
    def draft_s(self) -> float:
        """The time of a draft's first pass, including the draw of a token."""
        return self.next_draft_s(0)

    @property
    def timings(self) -> float:
        """How many steps have measured ``draft_s``; 0 while it is assumed, infinite if it is given."""
        raise NotImplementedError

    @property
    def reach(self) -> float:
        """The longest draft whose time can be estimated from what was seen."""
        raise NotImplementedError

    def samples(self, n: int) -> float:
        """Return how many steps that verify ``n`` tokens were timed; infinite if the time is given."""
        raise NotImplementedError

    def verify_s(self, widest: int) -> Sequence[float]:
        """Return the times of a step without its draft: item n is for n verified tokens, up to ``widest``."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was measured."""

    def start(self, context: int) -> None:
        """Note that a prompt of ``context`` tokens begins."""

    def reading_s(self, tokens: int, share: float, expected_s: float) -> float:  # noqa: ARG002
        """Return the time in which a drafter reads a context before it can draft; 0 where that is not counted.

        Args:
            tokens: How many tokens it has to read.
            share: The expected time over that of the target.
            expected_s: Expected seconds, from the target's reading or from another prompt that the drafter has read.
        """
        return 0.0

    def next_draft_s(self, passes: int) -> float:
        """Return the time of a drafter's pass after ``passes`` others in this step."""
        raise NotImplementedError

    def drafts_s(self, most: int) -> Sequence[float]:
        """Return the times of drafts of chains: item k is for k passes, up to ``most``."""
        return list(accumulate(map(self.next_draft_s, range(most)), initial=0.0))

    def rate(self, reached: float, plain: float) -> float:
        """Return how many tokens a second is worth, at least ``plain`` decoding's.

        Args:
            reached: Tokens per second of this request's steps, by these costs.
            plain: The same of steps without drafts.
        """
        return max(reached, plain)

    def may_test(self, due: bool) -> bool:
        """Return whether a step may test if drafting pays again; ``due``: this request has saved enough time."""
        return due

    def observe(self, step: Step, caught_up: bool, passes: int | None = None) -> None:
        """Measure a finished step.

        Args:
            step: The step.
            caught_up: Whether the drafter had read all context before the last step's tokens. Otherwise its first pass
                read more than usual, and the draft's time is only an upper bound.
            passes: Forward passes of its draft; ``None``: one per token.
        """

    def to_dict(self) -> Json:
        """Return the costs as ``parse_costs`` takes them."""
        raise NotImplementedError


class GivenCosts(CostSource):
    """Costs that stay as given; if they were timed at several lengths of context, they follow the context.

    Args:
        draft_s: Seconds of a draft's first pass.
        passes: The target's, see ``PassCosts``.
        draft_context_s: By which a drafter's pass takes longer with each further token of context.
        reading_s: Seconds in which the drafter reads a context before it can draft, by its tokens.
        later_s: Seconds of each further pass of a draft; ``None``: as the first.
    """

    timings = reach = math.inf

    def __init__(
        self,
        draft_s: float,
        passes: PassCosts,
        draft_context_s: float = 0.0,
        reading_s: Mapping[int, float] | None = None,
        later_s: float | None = None,
    ) -> None:
        self.passes, self._reading_s = passes, reading_s or {}
        self._first_s, self._context_s = draft_s, draft_context_s
        self._later_s = draft_s if later_s is None else later_s
        self._at, self._context = passes, float(passes.context or 0)

    def start(self, context: int) -> None:
        if self.passes.context_s and abs(context - self._context) > _NEAR * self._context:
            self._at, self._context = self.passes.at(context), context

    def observe(
        self,
        step: Step,
        caught_up: bool,  # noqa: ARG002
        passes: int | None = None,  # noqa: ARG002
    ) -> None:
        self.start(step.position + len(step.tokens))

    def reading_s(self, tokens: int, share: float, expected_s: float) -> float:  # noqa: ARG002
        return reading_seconds(self._reading_s, tokens)

    def next_draft_s(self, passes: int) -> float:
        seconds = self._later_s if passes else self._first_s
        return max(0.0, seconds + self._context_s * (self._context - (self.passes.context or 0)))

    def samples(self, n: int) -> float:  # noqa: ARG002
        return math.inf

    def verify_s(self, widest: int) -> Sequence[float]:
        return [self._at.target_pass_s(n) for n in range(widest + 1)]

    def to_dict(self) -> Json:
        own = costs_to_dict(self._first_s, self.passes.target_s)
        if self._later_s != self._first_s:
            own["drafter_later_pass_s"] = self._later_s
        if self._reading_s:
            own["drafter_reading_s"] = _by_text(self._reading_s)
        if self.passes.context_s:
            own["context_tokens"] = self.passes.context
            own["target_context_s"] = _by_text(self.passes.context_s)
            own["drafter_context_s"] = self._context_s
        return own


class MeasuredCosts(CostSource):
    """Costs from the times of recorded steps, see ``WidthTimes``.

    Drafts are timed by number of passes, since a draft's first pass often takes longer than the next ones; without
    evidence all take equally long. A sample is scaled by how much faster or slower than usual the rest of its step
    was: a slow machine slows both models, and while nothing is drafted only the target's passes show that it has
    recovered. First steps of later prompts are left out: they may read the prompt.

    Until anything was timed, the target is assumed to read a token in no more than a pass over one.

    Args:
        history: Samples of an earlier run (``to_dict()["steps"]``) to use in place of this run's times. Steps after
            its end are not measured.
        reading_s: The time to read the prompt by which an earlier run decided.
    """

    def __init__(
        self, history: Sequence[Sequence[float | None]] | None = None, reading_s: float | None = None
    ) -> None:
        self._history, self._earlier_s = history, reading_s
        self.reset()

    def reset(self) -> None:
        self._samples: list[tuple[float | None, float | None]] = []
        # By passes, of each step: seconds per pass, seconds of the rest, verified tokens.
        self._drafts: dict[int, deque[tuple[float, float, int]]] = {}
        self._first_s = self._later_s = 0.0
        self._steps = WidthTimes()
        self._reading_s = 0.0

    def _passes_s(self, passes: int) -> float:
        """Return the time of a draft of so many passes over one row each."""
        if not self._drafts:
            return passes * ASSUMED_C * self._steps.first_s
        return self._first_s + (passes - 1) * self._later_s if passes else 0.0

    def next_draft_s(self, passes: int) -> float:
        return self._passes_s(passes + 1) - self._passes_s(passes)

    def reading_s(self, tokens: int, share: float, expected_s: float) -> float:
        if not self._steps.seen:
            return share * tokens * self._steps.first_s
        self._reading_s = expected_s if self._earlier_s is None else self._earlier_s
        return self._reading_s

    @property
    def timings(self) -> float:
        return sum(map(len, self._drafts.values()))

    @property
    def reach(self) -> float:
        return max(FIRST_REACH, 2 * (max(self._steps.seen, default=1) - 1)) if self._drafts else FIRST_REACH

    def samples(self, n: int) -> float:
        return self._steps.samples(n)

    def verify_s(self, widest: int) -> Sequence[float]:
        return [self._steps(n) for n in range(widest + 1)]

    def observe(self, step: Step, caught_up: bool, passes: int | None = None) -> None:
        passes = step.gamma if passes is None else passes
        draft_s, verify_s = self._sample(step, caught_up, passes)
        self._samples.append((draft_s, verify_s))
        if verify_s is None:
            return
        self._steps.add(step.verified, verify_s)
        if draft_s is not None:
            made = self._drafts.setdefault(passes, deque(maxlen=LATEST_STEPS))
            made.append((draft_s, max(verify_s, INSTANT), step.verified))
        if self._drafts:
            self._first_s, self._later_s = fit_drafts(
                {
                    k: [k * seconds * self._steps(n) / rest for seconds, rest, n in made]
                    for k, made in self._drafts.items()
                }
            )

    def _sample(self, step: Step, caught_up: bool, passes: int) -> tuple[float | None, float | None]:
        """Return seconds per drafter's pass and of the rest of the step; ``None`` where the step does not tell."""
        if self._history is not None:
            place = len(self._samples)
            draft_s, verify_s = self._history[place] if place < len(self._history) else (None, None)
            return draft_s, verify_s
        if step.index == 0 and self._samples:
            return None, None
        times = step.times
        verify_s = times.total_s - times.draft_s
        passes -= times.draft_prefill_s > 0  # the pass that read the prompt gave the first token too
        if passes < 1:
            return None, verify_s
        draft_s = max(0.0, times.draft_s - times.draft_prefill_s) / passes
        return draft_s if caught_up or passes * draft_s < self._passes_s(passes) else None, verify_s

    def to_dict(self) -> Json:
        draft_s, steps = self.draft_s if self._drafts else None, self._steps
        return {
            **costs_to_dict(draft_s, {n: steps(n) for n in steps.seen}),
            **({"drafter_reading_s": self._reading_s} if self._reading_s else {}),
            "steps": [list(sample) for sample in self._samples],
        }


def costs_to_dict(draft_s: float | None, target_s: Mapping[int, float]) -> Json:
    """Return costs in seconds as ``parse_costs`` takes them."""
    return {"drafter_pass_s": draft_s, "target_pass_s": _by_text(target_s)}


def _by_text(seconds: Mapping[int, float]) -> dict[str, float]:
    return {str(n): each for n, each in seconds.items()}


def load_costs(path: str | Path) -> object:
    """Load costs from a JSON file without checking them.

    The file holds them alone, or under ``costs`` (``run.json``, ``generate --json``), or is a line of
    ``generations.jsonl``, whose steps have the times that the policy used.

    Raises:
        UsageError: There is no such file, or it is not JSON.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The costs cannot be read: {error.strerror}.", "Name a JSON file.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError("The costs file is not JSON.", "Name a file that specbench wrote.") from error
    if not isinstance(data, dict):
        return data
    if isinstance(data.get("costs"), dict):
        return data["costs"]
    steps = data.get("steps")
    notes = steps.get("policy") if isinstance(steps, dict) else None
    if isinstance(notes, dict) and all(isinstance(notes.get(name), list) for name in COST_NOTES):
        known = [each for each in notes.get(READING_NOTE) or () if each]
        return {
            "target_pass_s": {},
            "steps": list(map(list, zip(*(notes[name] for name in COST_NOTES), strict=False))),
            **({"drafter_reading_s": known[-1]} if known else {}),
        }
    return data


def check_costs(data: object) -> None:
    """Raise what ``parse_costs`` raises for the costs of any drafter."""
    drafters = data.get("drafter_pass_s") if isinstance(data, Mapping) else None
    for drafter in drafters if isinstance(drafters, Mapping) and drafters else (None,):
        parse_costs(data, drafter)


def parse_costs(data: object, drafter: str | None = None) -> CostSource:
    """Parse costs as ``to_dict`` returns them, or as a sweep measures them.

    Args:
        data: ``target_pass_s`` maps numbers of tokens to seconds; ``drafter_pass_s`` is seconds, or maps drafters'
            names to seconds. ``steps``, the samples of an earlier run, repeat that run's decisions.
        drafter: The drafter, if the costs are of several.

    Raises:
        UsageError: The costs have another form, or are not this drafter's.
    """
    try:
        given = msgspec.convert(data, _CostsFile, str_keys=True)
    except msgspec.ValidationError as error:
        raise _bad(str(error)) from error
    reading = given.drafter_reading_s
    if given.steps is not None:
        if isinstance(reading, Mapping):
            raise _bad("drafter_reading_s is not a number")
        return MeasuredCosts(given.steps, reading)
    if not given.target_pass_s:
        raise _bad("target_pass_s is empty")
    first_s = _of(given.drafter_pass_s, drafter)
    if first_s is None and isinstance(given.drafter_pass_s, Mapping):
        raise UsageError(
            f"The costs are of {', '.join(given.drafter_pass_s) or 'no drafter'}, not of {drafter or 'one drafter'}.",
            "Measure this drafter, or give its drafter_pass_s as a number.",
        )
    if first_s is None:
        raise _bad("there is no drafter_pass_s")
    if given.target_context_s and given.context_tokens is None:
        raise _bad("there are no context_tokens")
    passes = PassCosts(
        {n: max(seconds, INSTANT) for n, seconds in given.target_pass_s.items()},
        context=given.context_tokens if given.target_context_s else None,
        context_s=given.target_context_s,
    )
    if isinstance(reading, Mapping) and any(isinstance(each, Mapping) for each in reading.values()):
        reading = _of(reading, drafter)
    times: Any = reading or {}
    try:
        reading_s = {int(n): seconds for n, seconds in times.items()}
    except (AttributeError, ValueError) as error:
        raise _bad("drafter_reading_s does not map numbers of tokens to seconds") from error
    growing_s = _of(given.drafter_context_s, drafter) or 0.0
    return GivenCosts(
        first_s,
        passes,
        growing_s if given.target_context_s else 0.0,
        dict(sorted(reading_s.items())),
        _of(given.drafter_later_pass_s, drafter),
    )


def _of(times: Any, drafter: str | None) -> Any:
    """Return the times of a drafter, which are given alone or by drafter."""
    if not isinstance(times, Mapping):
        return times
    return next(iter(times.values())) if drafter is None and len(times) == 1 else times.get(drafter)


def _bad(what: str) -> UsageError:
    return UsageError(
        f"The costs do not have the expected form: {what}.",
        'Give {"drafter_pass_s": 0.03, "target_pass_s": {"1": 0.12, "9": 0.13}}.',
    )
