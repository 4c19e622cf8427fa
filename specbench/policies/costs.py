"""What one pass of the drafter and one of the target cost: measured as the run goes, or given."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Protocol

from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.decoding.theory import SLOPE, PassCosts, interpolate, never_falling

if TYPE_CHECKING:
    from specbench.decoding.records import Step

COST_NOTES = ("drafter_pass_s", "rest_s")
"""Under these names the results of a sweep keep, step by step, the two samples that ``MeasuredCosts`` takes from it."""

LATEST_PASSES = 15
"""Of the drafter's passes, the latest so many are kept."""

_STEPS = 9
"""Of the steps with one number of tokens to verify, likewise."""

ASSUMED_C = 0.2
"""Cost ratio assumed before a drafter's pass was measured."""

_FAR = 4
"""The assumption about the slope counts as much as one step with one token and one with so many more."""

FIRST_REACH = 3
"""The longest draft before anything was timed."""

_INSTANT = 1e-9
"""No step takes less, whatever a coarse clock says."""


class CostSource(Protocol):
    """Where a policy has the seconds of the two kinds of passes from; only their ratios matter to it."""

    @property
    def draft_s(self) -> float:
        """One pass of the drafter, with the draw of a token."""
        ...

    @property
    def timings(self) -> float:
        """How many steps have told ``draft_s``; 0 while it is assumed, infinite if it is given."""
        ...

    @property
    def reach(self) -> float:
        """The longest draft whose time can be judged by what was seen."""
        ...

    @property
    def catching_up_s(self) -> float:
        """How long the drafter reads before it can draft, what it lacks of the context; 0 where nobody counts that."""
        ...

    def samples(self, n: int) -> float:
        """How many steps with ``n`` tokens to verify have been timed; infinite if the time is given."""
        ...

    def verify_s(self, widest: int) -> Sequence[float]:
        """A step without its draft, by the number n of tokens verified: item n for n from 1 to ``widest``."""
        ...

    def reset(self) -> None:
        """Forget what was measured."""
        ...

    def next_draft_s(self, passes: int, rows: int = 1) -> float:
        """One pass of the drafter in a step in which it has made so many before; ``draft_s`` is the first one's.

        Args:
            passes: How many it has made.
            rows: Nodes of a tree that it reads.
        """
        ...

    def rate(self, reached: float, plain: float) -> float:
        """Tokens per second that time is worth, at least those of plain decoding.

        Args:
            reached: What this request's steps have given per second, by these costs.
            plain: The same of steps without drafts.
        """
        ...

    def may_look(self, due: bool) -> bool:
        """Whether a step may spend time on finding out if drafting pays again.

        Args:
            due: This request has saved it up.
        """
        ...

    def observe(
        self, step: Step, caught_up: bool, passes: int | None = None, rows: int | None = None
    ) -> None:
        """Measure a finished step.

        Args:
            step: The step.
            passes: How many passes of a model its draft took; ``None``: one per token.
            caught_up: Whether the drafter had read the context but for the last step's end. Otherwise its first pass
                read more than usual, and the time of the draft is no more than a bound.
            rows: Behind how many tokens or nodes these passes gave what comes next; ``None``: one in each.
        """
        ...

    def to_dict(self) -> Json:
        """What ``parse_costs`` takes, ready for JSON."""
        ...


class _Alone:
    """Costs of a request whose passes are no others'."""

    catching_up_s = 0.0

    def rate(self, reached: float, plain: float) -> float:
        return max(reached, plain)

    def may_look(self, due: bool) -> bool:
        return due


class GivenCosts(_Alone):
    """Costs that stay as they are; no clock has a say.

    Args:
        draft_s: Seconds of a drafter's pass.
        passes: The target's, see ``PassCosts.target_pass_s``.
    """

    timings = reach = math.inf

    def __init__(self, draft_s: float, passes: PassCosts) -> None:
        self.draft_s, self._passes = draft_s, passes

    @property
    def passes(self) -> PassCosts:
        """The target's."""
        return self._passes

    def next_draft_s(self, passes: int, rows: int = 1) -> float:  # noqa: ARG002
        return self.draft_s

    def samples(self, n: int) -> float:  # noqa: ARG002
        return math.inf

    def verify_s(self, widest: int) -> Sequence[float]:
        return [self._passes.target_pass_s(n) for n in range(widest + 1)]

    def reset(self) -> None:
        """Nothing was measured."""

    def observe(
        self, step: Step, caught_up: bool, passes: int | None = None, rows: int | None = None
    ) -> None:
        """Nothing is measured."""

    def to_dict(self) -> Json:
        return costs_to_dict(self.draft_s, self._passes.target_s)


class WidthTimes:
    """Seconds by a number of tokens, from samples.

    A time is the (lower) median of its latest samples, and none is longer than one with more tokens: single disturbed
    samples do not count. Numbers of tokens that were seen rarely or never are drawn towards a straight line through the
    others, and that one towards a gentle slope.

    Args:
        first: Where the gentle slope begins to be assumed; ``None``: at the fewest tokens seen.

    Attributes:
        widest: The most tokens of a sample.
        count: Samples so far.
    """

    def __init__(self, first: int | None = 1) -> None:
        self._first = first
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._latest: dict[int, int] = {}
        self._medians: dict[int, float] = {}
        self._line = (1.0, SLOPE)
        self._off_line: dict[int, float] = {}
        self._least = 1.0
        self.widest = self.count = 0
        self._known: dict[int, float] = {}

    def add(self, n: int, seconds: float, step: int = 1, when: int = 0) -> None:
        """Take in a sample; numbers of tokens up to the same multiple of ``step`` count as one, along the line."""
        place, slope = step * -(-n // step), self.slope_s
        self._latest[place] = when
        self._samples.setdefault(place, deque(maxlen=_STEPS)).append((n, seconds))
        self.widest = max(self.widest, n)
        self.count += 1
        if step == 1:
            self._medians[place] = median_low(seconds for _, seconds in self._samples[place])
        else:
            for each, samples in self._samples.items():
                self._medians[each] = median_low(
                    seconds + slope * (each - number) for number, seconds in samples
                )
        self._fit()

    def forget(self, before: int) -> None:
        """Drop numbers of tokens whose latest sample is older."""
        old = [place for place, when in self._latest.items() if when < before]
        if not old:
            return
        for place in old:
            del self._samples[place], self._medians[place], self._latest[place]
        self.count = sum(map(len, self._samples.values()))
        self.widest = max((n for samples in self._samples.values() for n, _ in samples), default=0)
        self._known.clear()
        if self._samples:
            self._fit()

    def samples(self, n: int) -> int:
        """How many there are of so many tokens."""
        return len(self._samples.get(n, ()))

    @property
    def seen(self) -> Sequence[int]:
        """The numbers of tokens there are samples of, ascending."""
        return sorted(self._samples)

    @property
    def any(self) -> bool:
        """Whether there are samples."""
        return bool(self._samples)

    @property
    def first_s(self) -> float:
        """Of one token, by the line."""
        return self._line[0]

    @property
    def slope_s(self) -> float:
        """Of another token, by the line; 0 before there is one."""
        return self._line[1] if self._samples else 0.0

    def __call__(self, n: int) -> float:
        """Of ``n`` tokens."""
        if n not in self._known:
            first, slope = self._line
            self._known[n] = max(first + slope * (n - 1) + interpolate(self._off_line, n), self._least)
        return self._known[n]

    def _fit(self) -> None:
        """Lay a line through the medians, weighted by their samples, and keep what they lie off it."""
        medians = never_falling(self._medians)
        weights = {n: float(len(self._samples[n])) for n in medians}
        level = sum(w * medians[n] / (1 + SLOPE * (n - 1)) for n, w in weights.items()) / sum(
            weights.values()
        )
        points = [(n - 1.0, medians[n], w) for n, w in weights.items()]
        start = (min(medians) if self._first is None else self._first) - 1.0
        points += [(x, level * (1 + SLOPE * x), 1.0) for x in (start, start + _FAR)]
        # n tokens never cost more together than one by one.
        self._least = max(min(seconds / n for n, seconds in medians.items()), _INSTANT)
        total = sum(w for _, _, w in points)
        x_mean = sum(w * x for x, _, w in points) / total
        y_mean = sum(w * y for _, y, w in points) / total
        spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
        slope = max(0.0, sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread)
        first = y_mean - slope * x_mean
        self._line = (first, slope)
        self._off_line = {
            n: (seconds - first - slope * (n - 1)) * weights[n] / (weights[n] + 1)
            for n, seconds in medians.items()
        }
        self._known.clear()


class MeasuredCosts(_Alone):
    """Costs from the times in the records of the steps, see ``WidthTimes``.

    That of a drafter's pass is the median of its latest samples, taken as of one row, and each scaled by how much
    faster or slower than usual the rest of its step was: a machine that was slow for a while was so for both models,
    and while nothing is drafted only the target's passes tell that it has recovered. The first steps of later prompts
    are left out, for they may read the prompt.

    Args:
        history: What was measured step by step in an earlier run (``to_dict()["steps"]``), to be used again in place of
            the times of this run. Steps behind its end are not measured.
    """

    def __init__(self, history: Sequence[Sequence[float | None]] | None = None) -> None:
        self._history = history
        self.reset()

    def reset(self) -> None:
        self._samples: list[tuple[float | None, float | None]] = []
        # Of each step the drafter's pass and its rows, and the time of the rest with the number of tokens verified.
        self._drafts: deque[tuple[float, int, float, int]] = deque(maxlen=LATEST_PASSES)
        self._draft_rows = WidthTimes()
        self._steps = WidthTimes()
        self._draft_s = ASSUMED_C

    @property
    def draft_s(self) -> float:
        return self._draft_s if self._drafts else ASSUMED_C * self._steps.first_s

    def next_draft_s(self, passes: int, rows: int = 1) -> float:  # noqa: ARG002
        return self.draft_s * (self._draft_rows(rows) / self._draft_rows(1) if rows > 1 else 1.0)

    @property
    def timings(self) -> float:
        return len(self._drafts)

    @property
    def reach(self) -> float:
        return max(FIRST_REACH, 2 * (max(self._steps.seen, default=1) - 1)) if self._drafts else FIRST_REACH

    def samples(self, n: int) -> float:
        return self._steps.samples(n)

    def verify_s(self, widest: int) -> Sequence[float]:
        return [self._steps(n) for n in range(widest + 1)]

    def observe(
        self, step: Step, caught_up: bool, passes: int | None = None, rows: int | None = None
    ) -> None:
        passes = step.gamma if passes is None else passes
        draft_s, verify_s = self._sample(step, caught_up, passes)
        self._samples.append((draft_s, verify_s))
        if verify_s is None:
            return
        self._steps.add(step.verified, verify_s)
        if draft_s is not None:
            width = 1 if rows is None or not passes else max(1, round(rows / passes))
            self._draft_rows.add(width, draft_s)
            self._drafts.append((draft_s, width, max(verify_s, _INSTANT), step.verified))
        if self._drafts:
            one = self._draft_rows(1)
            self._draft_s = median_low(
                seconds * one / self._draft_rows(width) * self._steps(n) / rest
                for seconds, width, rest, n in self._drafts
            )

    def _sample(self, step: Step, caught_up: bool, passes: int) -> tuple[float | None, float | None]:
        """Seconds per drafter's pass, and seconds of the rest of the step; ``None`` for what the step does not tell."""
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
        return draft_s if caught_up or draft_s < self.draft_s else None, verify_s

    def to_dict(self) -> Json:
        draft_s = self.draft_s if self._drafts else None
        return {
            **costs_to_dict(draft_s, {n: self._steps(n) for n in self._steps.seen}),
            "steps": [list(sample) for sample in self._samples],
        }


def costs_to_dict(draft_s: float | None, target_s: Mapping[int, float]) -> Json:
    """What ``parse_costs`` takes, of a drafter's pass and the target's by number of tokens, in seconds."""
    return {
        "drafter_pass_s": draft_s,
        "target_pass_s": {str(n): seconds for n, seconds in target_s.items()},
    }


def read_costs(path: str | Path, drafter: str | None = None) -> CostSource:
    """Costs from a JSON file, for one drafter: see ``load_costs`` and ``parse_costs``.

    Raises:
        UsageError: There is no such file, or no costs in it.
    """
    return parse_costs(load_costs(path), drafter)


def load_costs(path: str | Path) -> object:
    """What a JSON file says of costs, not checked yet.

    It may hold them alone or under ``costs``, as ``run.json`` and what ``generate --json`` prints do, or be a line of
    ``generations.jsonl``, whose steps have the times that the policy went by.

    Raises:
        UsageError: There is no such file, or it is no JSON.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The costs cannot be read: {error.strerror}.", "Name a JSON file.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError("The file with the costs is no JSON.", "Name one that specbench wrote.") from error
    if not isinstance(data, dict):
        return data
    if isinstance(data.get("costs"), dict):
        return data["costs"]
    steps = data.get("steps")
    notes = steps.get("policy") if isinstance(steps, dict) else None
    if isinstance(notes, dict) and all(isinstance(notes.get(name), list) for name in COST_NOTES):
        return {
            "target_pass_s": {},
            "steps": list(map(list, zip(*(notes[name] for name in COST_NOTES), strict=False))),
        }
    return data


def check_costs(data: object) -> None:
    """Refuse what are no costs, whichever drafter they are of.

    Raises:
        UsageError: As ``parse_costs``.
    """
    drafters = data.get("drafter_pass_s") if isinstance(data, Mapping) else None
    for drafter in drafters if isinstance(drafters, Mapping) and drafters else (None,):
        parse_costs(data, drafter)


def parse_costs(data: object, drafter: str | None = None) -> CostSource:
    """Costs as ``to_dict`` gives them, or as a sweep measures them.

    Args:
        data: ``target_pass_s`` maps numbers of tokens to seconds. ``drafter_pass_s`` is a number of seconds, or maps
            names of drafters to it. With ``steps``, the samples of an earlier run, that run's decisions are repeated
            one by one.
        drafter: Which of several drafters is meant.

    Raises:
        UsageError: They are of another form, or not of this drafter.
    """
    if not isinstance(data, Mapping):
        raise _bad("they are no object")
    target = data.get("target_pass_s")
    if not isinstance(target, Mapping):
        raise _bad("target_pass_s does not map numbers of tokens to seconds")
    for n, seconds in target.items():
        if not (str(n).isdecimal() and int(n) > 0 and _is_time(seconds) and seconds > 0):
            raise _bad(f"target_pass_s has {n!r}: {seconds!r}")
    steps = data.get("steps")
    if steps is not None:
        if isinstance(steps, str) or not isinstance(steps, Sequence) or not all(map(_is_sample, steps)):
            raise _bad("steps is no list of pairs of seconds")
        return MeasuredCosts(steps)
    if not target:
        raise _bad("target_pass_s is empty")
    drafters = data.get("drafter_pass_s")
    if isinstance(drafters, Mapping):
        if drafter is None and len(drafters) == 1:
            drafters = next(iter(drafters.values()))
        elif drafter in drafters:
            drafters = drafters[drafter]
        else:
            raise UsageError(
                f"The costs are of {', '.join(map(str, drafters)) or 'no drafter'}, not of {drafter or 'one drafter'}.",
                "Measure this drafter, or give its drafter_pass_s as a number.",
            )
    if not _is_time(drafters):
        raise _bad(f"drafter_pass_s is {drafters!r}")
    passes = PassCosts({int(n): float(seconds) for n, seconds in target.items()})
    return GivenCosts(float(drafters), passes)  # type: ignore[arg-type]


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _is_sample(sample: object) -> bool:
    if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) != 2:
        return False
    return all(value is None or _is_time(value) for value in sample)


def _bad(what: str) -> UsageError:
    return UsageError(
        f"The costs are not of the form expected: {what}.",
        'Give {"drafter_pass_s": 0.03, "target_pass_s": {"1": 0.12, "9": 0.13}}.',
    )
