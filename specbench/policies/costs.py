"""What a forward pass of the drafter and of the target costs: measured during the run, or given."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from specbench.base.errors import UsageError
from specbench.base.record import Json, Seconds
from specbench.decoding.protocols import NewPrompt
from specbench.decoding.theory import (
    SLOPE,
    PassCosts,
    fit_line,
    interpolate,
    never_falling,
    reading_seconds,
)

if TYPE_CHECKING:
    from specbench.decoding.records import Step

COST_NOTES = ("drafter_pass_s", "rest_s")
"""The notes under which results keep the two samples that ``MeasuredCosts`` takes from each step."""

READING_NOTE = "reading_s"
"""The note of the time that reading the context was expected to take, while the drafter had not read it."""

LATEST = 9
"""How many of the latest times of one kind of pass count."""

ASSUMED_C = 0.2
"""The cost ratio assumed before a drafter's pass is measured."""

INSTANT = 1e-9
"""A lower bound for times, as clocks may be coarse."""

_FIRST = 3
"""The longest draft before anything is timed."""

_NEAR = 0.02
"""The share by which a context has to grow before costs are computed again."""

_FAR = 4
"""The assumed slope weighs as much as one step with one token and one with this many more."""

_EQUAL = 0.1
"""The weight, in samples, of the assumption that a draft's first pass takes as long as each later one."""


def passes_of(step: Step) -> int:
    """Return the drafter's passes of a step, which are as many as draft tokens if they were not counted."""
    return step.gamma if step.passes is None else step.passes


class CostTable:
    """Seconds of forward passes, by which a policy decides; only their ratios matter.

    Attributes:
        first_s, later_s: The time of a draft's first pass, and of each later one.
        timings: How many drafts were timed; 0 while their time is assumed, infinite if it is given.
        longest: The longest draft whose time can be estimated.
        reading_s: The time in which the drafter's model reads what it has not read before it can draft.
    """

    first_s: float
    later_s: float
    timings: float = math.inf
    longest: float = math.inf

    @property
    def reading_s(self) -> float:
        return 0.0

    def verify_s(self, n: int) -> float:
        """Return the time of a step without its draft, in which ``n`` tokens are verified."""
        raise NotImplementedError

    def step_s(self, passes: int, n: int) -> float:
        """Return the time of a step with so many passes of the drafter, in which ``n`` tokens are verified."""
        return self.drafting_s(passes) + self.verify_s(n)

    def samples(self, n: int) -> float:  # noqa: ARG002
        """Return how many steps that verify ``n`` tokens were timed; infinite if their time is given."""
        return math.inf

    def drafting_s(self, passes: float, before: int = 0) -> float:
        """Return the time of so many passes of the drafter after ``before`` others in the same step."""
        if passes <= 0:
            return 0.0
        return (self.later_s if before else self.first_s) + (passes - 1) * self.later_s

    def begin(self, prompt: NewPrompt) -> None:
        """Start a prompt."""

    def time_prefill(self, seconds_per_token: float) -> None:
        """Note how long the target took to read the prompt."""

    def observe(self, step: Step) -> None:
        """Measure a finished step."""

    def to_dict(self) -> Json:
        """Return the costs as ``parse_costs`` takes them."""
        raise NotImplementedError


class GivenCosts(CostTable):
    """Costs that stay as given; if they were timed at several lengths of context, they follow the context.

    Args:
        costs: Of the target and of drafters.
        drafter: Which of these drafts.
    """

    def __init__(self, costs: PassCosts, drafter: str) -> None:
        self._costs, self._drafter = costs, drafter
        self._unread = 0
        self._move(costs.context or 0)

    def _move(self, context: int) -> None:
        """Take the costs at another length of context."""
        self._context, self._at = context, self._costs.at(context)
        self.first_s = self._at.drafter_s[self._drafter]
        self.later_s = self._at.later_s.get(self._drafter, self.first_s)
        self._verify_s: dict[int, float] = {}

    def begin(self, prompt: NewPrompt) -> None:
        self._unread = prompt.unread
        self._move(prompt.tokens)

    def observe(self, step: Step) -> None:
        if passes_of(step):
            self._unread = 0
        context = step.position + len(step.tokens)
        if self._costs.context_s and abs(context - self._context) > _NEAR * self._context:
            self._move(context)

    @property
    def reading_s(self) -> float:
        known = self._costs.reading_s.get(self._drafter)
        return reading_seconds(known, self._unread) if known and self._unread else 0.0

    def verify_s(self, n: int) -> float:
        if n not in self._verify_s:
            self._verify_s[n] = max(self._at.target_pass_s(n), INSTANT)
        return self._verify_s[n]

    def to_dict(self) -> Json:
        made: Json = msgspec.to_builtins(self._costs, str_keys=True)
        own = {name: made[name].get(self._drafter) for name in _BY_DRAFTER if name in made}
        return {name: each for name, each in (made | own).items() if each is not None}


class MeasuredCosts(CostTable):
    """Costs from the times of the steps of one output.

    Drafts are timed by number of passes, since a draft's first pass often takes longer than the next ones. A sample is
    scaled by how much faster or slower than usual the rest of its step was: a slow machine slows both models, and while
    nothing is drafted only the target's passes show that it has recovered.

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
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:
        self._unread, self._share = prompt.unread, prompt.prior.reading_share
        self._prefill_s = self._prompt_s = 0.0  # per token, and of what the drafter has to read
        self._samples: list[tuple[float | None, float | None]] = []
        # By passes, of each step: seconds per pass, seconds of the rest, verified tokens.
        self._drafts: dict[int, deque[tuple[float, float, int]]] = {}
        self._drafted = True  # in the last step
        self._rest = PassTimes()
        self.timings, self.longest = 0, _FIRST
        self.first_s = self.later_s = ASSUMED_C * self._rest.first_s

    def time_prefill(self, seconds_per_token: float) -> None:
        self._prefill_s = seconds_per_token

    def verify_s(self, n: int) -> float:
        return self._rest.seconds(n)

    def samples(self, n: int) -> float:
        return len(self._rest.seen.get(n, ()))

    @property
    def reading_s(self) -> float:
        if not self._unread:
            return 0.0
        if not self._rest.seen:
            return self._share * self._unread * self._rest.first_s
        return self._prompt_s

    def observe(self, step: Step) -> None:
        passes = passes_of(step)
        draft_s, rest_s = self._sample(step, passes)
        self._samples.append((draft_s, rest_s))
        if self._unread:
            expected_s = self._share * self._unread * self._prefill_s
            self._prompt_s = expected_s if self._earlier_s is None else self._earlier_s
        self._drafted = passes > 0
        if self._drafted:
            self._unread = 0
        if rest_s is None:
            return
        self._rest.add(step.verified, rest_s)
        if draft_s is not None:
            made = self._drafts.setdefault(passes, deque(maxlen=LATEST))
            made.append((draft_s, max(rest_s, INSTANT), step.verified))
            self.timings += 1
        if not self._drafts:
            self.first_s = self.later_s = ASSUMED_C * self._rest.first_s
            return
        self.longest = max(_FIRST, 2 * (max(self._rest.seen) - 1))
        scaled = {
            k: [k * seconds * self._rest.seconds(n) / rest for seconds, rest, n in made]
            for k, made in self._drafts.items()
        }
        self.first_s, self.later_s = fit_drafts(scaled)

    def _sample(self, step: Step, passes: int) -> tuple[float | None, float | None]:
        """Return seconds per drafter's pass and of the rest of the step; ``None`` where the step does not tell."""
        if self._history is not None:
            place = len(self._samples)
            draft_s, rest_s = self._history[place] if place < len(self._history) else (None, None)
            return draft_s, rest_s
        times = step.times
        rest_s = times.total_s - times.draft_s
        passes -= times.draft_prefill_s > 0  # the pass that read the prompt gave the first token too
        if passes < 1:
            return None, rest_s
        draft_s = max(0.0, times.draft_s - times.draft_prefill_s)
        # After steps without a draft the first pass has read more than usual, and the time is only an upper bound.
        if not self._drafted and draft_s >= self.drafting_s(passes):
            return None, rest_s
        return draft_s / passes, rest_s

    def to_dict(self) -> Json:
        return {
            "drafter_pass_s": self.first_s if self._drafts else None,
            "target_pass_s": {str(n): self.verify_s(n) for n in self._rest.seen},
            **({"drafter_reading_s": self._prompt_s} if self._prompt_s else {}),
            "steps": [list(sample) for sample in self._samples],
        }


class PassTimes:
    """Seconds by number of tokens, from samples.

    A time is the (lower) median of its latest samples, and none exceeds one with more tokens, so single disturbed
    samples do not count. Rarely seen numbers of tokens are pulled towards a straight line through the others, and that
    line towards a gentle slope.

    Attributes:
        seen: The numbers of tokens with samples.
        first_s: The line's time for one token.
    """

    def __init__(self) -> None:
        self.seen: dict[int, deque[float]] = {}
        self.first_s, self._slope_s = 1.0, SLOPE
        self._off_line: dict[int, float] = {}
        self._least_s = 1.0
        self._known: dict[int, float] = {}

    def seconds(self, n: int) -> float:
        """Return the time of ``n`` tokens."""
        if n not in self._known:
            line_s = self.first_s + self._slope_s * (n - 1)
            self._known[n] = max(line_s + interpolate(self._off_line, n), self._least_s)
        return self._known[n]

    def add(self, n: int, seconds: float) -> None:
        """Add a sample, fit a line through the medians, weighted by their samples, and keep the residuals."""
        self.seen.setdefault(n, deque(maxlen=LATEST)).append(seconds)
        weights = {n: float(len(made)) for n, made in self.seen.items()}
        medians = never_falling({n: median_low(made) for n, made in self.seen.items()})
        level = sum(w * medians[n] / (1 + SLOPE * (n - 1)) for n, w in weights.items()) / sum(
            weights.values()
        )
        points = [(n - 1, medians[n], w) for n, w in weights.items()]
        points += [(x, level * (1 + SLOPE * x), 1.0) for x in (0, _FAR)]
        self.first_s, self._slope_s = first, slope = fit_line(points)
        # n tokens never cost more together than separately.
        self._least_s = max(min(each / n for n, each in medians.items()), INSTANT)
        self._off_line = {
            n: (each - first - slope * (n - 1)) * weights[n] / (weights[n] + 1.0)
            for n, each in medians.items()
        }
        self._known.clear()


def fit_drafts(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Return the time of a draft's first pass and of each later one, not above it, from times by number of passes k.

    A draft's first pass also reads what was accepted, and next to other programs finds its core taken.
    The two are drawn towards equal ones, which is what they are while all times are of one k.
    """
    # Least squares of the relative errors of more + k · later; a long time, as disturbed ones are, weighs little.
    ones = k1 = kk = t1 = kt = 0.0
    for k, made in seconds.items():
        median = max(median_low(made), INSTANT)
        weight = len(made) / median**2
        ones += weight
        k1 += weight * k
        kk += weight * k * k
        t1 += weight * median
        kt += weight * k * median
    ones += _EQUAL * (kk / kt) ** 2
    more = max(0.0, (kk * t1 - k1 * kt) / (kk * ones - k1 * k1))
    later = (kt - more * k1) / kk
    return (more + later, later) if later >= 0.0 else (t1 / ones, 0.0)


# -- files -------------------------------------------------------------------------------------------

_BY_DRAFTER = ("drafter_pass_s", "drafter_later_pass_s", "drafter_context_s", "drafter_reading_s")
"""The fields of ``PassCosts`` that a file may have of one drafter alone, or by drafter."""


class _Samples(Struct):
    """What a file has of one earlier output."""

    steps: Sequence[tuple[Seconds | None, Seconds | None]]
    drafter_reading_s: Seconds | None = None


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
        samples = zip(*(notes[name] for name in COST_NOTES), strict=False)
        return {
            "steps": [*map(list, samples)],
            **({"drafter_reading_s": known[-1]} if known else {}),
        }
    return data


def check_costs(data: object) -> None:
    """Raise what ``parse_costs`` raises for the costs of any drafter."""
    drafters = data.get("drafter_pass_s") if isinstance(data, Mapping) else None
    for drafter in drafters if isinstance(drafters, Mapping) and drafters else (None,):
        parse_costs(data, drafter)


def parse_costs(data: object, drafter: str | None = None) -> CostTable:
    """Parse costs as ``to_dict`` returns them, or as a sweep measures them.

    Args:
        data: ``target_pass_s`` maps numbers of tokens to seconds; ``drafter_pass_s`` is seconds, or maps drafters'
            names to seconds; see ``PassCosts``. ``steps``, the samples of an earlier run, repeat that run's decisions.
        drafter: The drafter, if the costs are of several.

    Raises:
        UsageError: The costs have another form, or are not this drafter's.
    """
    if isinstance(data, Mapping) and data.get("steps") is not None:
        samples = _converted(data, _Samples)
        return MeasuredCosts(samples.steps, samples.drafter_reading_s)
    fields: Any = data
    if isinstance(data, Mapping):
        name = drafter or _only_drafter(data) or "drafter"
        fields = {
            **data,
            **{field: _named(field, data[field], name) for field in _BY_DRAFTER if data.get(field)},
        }
    costs = _converted(fields, PassCosts)
    if not costs.target_s:
        raise _bad("target_pass_s is empty")
    if not costs.drafter_s:
        raise _bad("there is no drafter_pass_s")
    if name not in costs.drafter_s:
        raise UsageError(
            f"The costs are of {', '.join(costs.drafter_s)}, not of {drafter or 'one drafter'}.",
            "Measure this drafter, or give its drafter_pass_s as a number.",
        )
    return GivenCosts(costs, name)


def _only_drafter(data: Mapping[str, Any]) -> str | None:
    times = data.get("drafter_pass_s")
    return next(iter(times)) if isinstance(times, Mapping) and len(times) == 1 else None


def _named(field: str, times: Any, drafter: str) -> Any:
    """Return times by drafter, which a file may have of one drafter alone."""
    by_drafter = isinstance(times, Mapping)
    if field == "drafter_reading_s":  # times by number of tokens, alone or by drafter
        by_drafter = by_drafter and all(isinstance(each, Mapping) for each in times.values())
    return times if by_drafter else {drafter: times}


def _converted(data: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _bad(str(error)) from error


def _bad(what: str) -> UsageError:
    return UsageError(
        f"The costs do not have the expected form: {what}.",
        'Give {"drafter_pass_s": 0.03, "target_pass_s": {"1": 0.12, "9": 0.13}}.',
    )
