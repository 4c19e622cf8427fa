"""What a check found, as frozen records: verdicts, and everything ready for JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specbench.backends.torch.parity import Difference
from specbench.base.record import Json
from specbench.check.chisquare import POWER
from specbench.check.deviation import DeviationResult
from specbench.check.greedy import GreedyResult, Verdict, verdict_of
from specbench.check.invariants import Violation
from specbench.check.outputs import OutputResult, Refused
from specbench.check.sampled import ExactCase, SampledTest

Piece = Callable[[int], str]
"""A token's own text."""

_MOST_LISTED = 100
"""Violations listed one by one; all are counted."""


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on several outputs together; ``identical`` if there are none."""
    order: tuple[Verdict, ...] = ("wrong", "numerical tie")
    return next((verdict for verdict in order if verdict in verdicts), "identical")


@dataclass(frozen=True)
class CheckResult:
    """What the check of a configuration found so far.

    Attributes:
        greedy: One result per prompt.
        deviations: What their logits amount to; ``None`` before there are any.
        exact: One result per prompt; empty in greedy decoding.
        sampled: The test of sampled tokens; ``None`` if it was not requested or not finished.
        no_transformers: Why there is no comparison with ``transformers``; ``None`` if there is one.
        bit_exact: Whether plain and speculative logits have to be the same to the last bit.
        complete: False if the check was interrupted.
    """

    greedy: tuple[GreedyResult, ...] = ()
    deviations: DeviationResult | None = None
    exact: tuple[ExactCase, ...] = ()
    sampled: SampledTest | None = None
    no_transformers: str | None = None
    bit_exact: bool = False
    complete: bool = True

    @property
    def bitwise(self) -> tuple[int, int]:
        """Rows of logits that plain and speculative decoding have in common, and how many are bitwise equal."""
        return sum(each.bitwise_rows for each in self.greedy), sum(each.bitwise_equal for each in self.greedy)

    @property
    def violations(self) -> list[tuple[str, Violation]]:
        """All invariants that do not hold, with the prompt's id."""
        found = [(each.prompt, violation) for each in self.greedy for violation in each.violations]
        return found + [(each.prompt, violation) for each in self.exact for violation in each.violations]

    @property
    def steps(self) -> int:
        """Steps of speculative decoding that were looked at one by one."""
        return sum(each.steps for each in self.greedy) + sum(each.steps for each in self.exact)

    @property
    def largest_error(self) -> float:
        """Of all exact positions; 0 if there are none."""
        return max((place.error for case in self.exact for place in case.positions), default=0.0)

    def differences(self, against: Literal["plain", "transformers"]) -> list[Difference | None]:
        """Of every prompt."""
        if against == "plain":
            return [each.against_plain for each in self.greedy]
        return [each.against_transformers for each in self.greedy if each.compared_with_transformers]

    def verdict_against(self, against: Literal["plain", "transformers"]) -> Verdict:
        """On the greedy outputs."""
        return worst([verdict_of(each) for each in self.differences(against)])

    @property
    def verdict(self) -> Verdict:
        """On everything together: ``wrong`` if anything is, ``numerical tie`` if greedy outputs part in ties only."""
        faulty = (
            bool(self.violations)
            or (self.deviations is not None and not self.deviations.sound)
            or not all(case.sound for case in self.exact)
            or (self.sampled is not None and not self.sampled.sound)
            or (self.bit_exact and self.bitwise[0] != self.bitwise[1])
        )
        if faulty:
            return "wrong"
        return worst([self.verdict_against("plain"), self.verdict_against("transformers")])

    def to_dict(self, piece: Piece | None) -> Json:
        """What ``--json`` prints of it. ``piece`` gives the texts of differing tokens; ``None`` leaves them out."""
        violations = self.violations
        deviations = self.deviations
        return {
            "verdict": self.verdict,
            "complete": self.complete,
            "greedy": {
                "prompts": len(self.greedy),
                "tokens": sum(each.tokens for each in self.greedy),
                "drafted": sum(each.drafted for each in self.greedy),
                "accepted": sum(each.accepted for each in self.greedy),
                "against_plain": self._comparison("plain", piece),
                "against_transformers": self._comparison("transformers", piece)
                if self.no_transformers is None
                else None,
                "not_compared": self.no_transformers,
            },
            "logits": None
            if deviations is None
            else {"sound": deviations.sound, **_finite(asdict(deviations))},
            "bitwise": {"asked": self.bit_exact, "rows": self.bitwise[0], "equal": self.bitwise[1]},
            "exact": self._exact(),
            "sampled": self._sampled(),
            "invariants": {
                "steps": self.steps,
                "violated": dict(Counter(violation.invariant for _, violation in violations)),
                "violations": [
                    {"prompt": prompt, **asdict(violation)} for prompt, violation in violations[:_MOST_LISTED]
                ],
            },
        }

    def _comparison(self, against: Literal["plain", "transformers"], piece: Piece | None) -> Json:
        differences = self.differences(against)
        verdicts = Counter(verdict_of(each) for each in differences)
        found = [
            {
                "prompt": result.prompt,
                "verdict": verdict_of(difference),
                **_finite(asdict(difference)),
                "texts": None
                if piece is None
                else [None if token is None else piece(token) for token in difference.tokens],
            }
            for result in self.greedy
            for difference in [result.against_plain if against == "plain" else result.against_transformers]
            if difference is not None
        ]
        return {
            "verdict": self.verdict_against(against),
            "identical": verdicts["identical"],
            "ties": verdicts["numerical tie"],
            "wrong": verdicts["wrong"],
            "differences": found,
        }

    def _exact(self) -> Json | None:
        if not self.exact:
            return None
        places = [place for case in self.exact for place in case.positions]
        sharpest = max(places, key=lambda place: place.error, default=None)
        acceptances = [value for case in self.exact for value in case.acceptances]
        return {
            "sound": all(case.sound for case in self.exact),
            "steps": sum(case.steps for case in self.exact),
            "positions": dict(Counter(place.kind for place in places)),
            "largest_error": self.largest_error,
            "at": None if sharpest is None else asdict(sharpest),
            "mean_acceptance": statistics.fmean(acceptances) if acceptances else None,
        }

    def _sampled(self) -> Json | None:
        if self.sampled is None:
            return None
        return {"sound": self.sampled.sound, "power": POWER, **asdict(self.sampled)}


@dataclass(frozen=True)
class OutputsResult:
    """What the check of outputs from elsewhere found so far.

    Attributes:
        outputs: One result per line that was scored.
        refused: Lines that cannot be checked.
        failed: Lines whose scoring failed.
        complete: False if the check was interrupted.
    """

    outputs: tuple[OutputResult, ...] = ()
    refused: tuple[Refused, ...] = ()
    failed: tuple[Refused, ...] = ()
    complete: bool = True

    @property
    def verdict(self) -> Verdict:
        return worst([each.verdict for each in self.outputs])

    def to_dict(self, piece: Piece | None) -> Json:
        """What ``--json`` prints of it. ``piece`` gives the texts of tokens; ``None`` leaves them out."""

        def shown(result: OutputResult) -> Json:
            fields = _finite(asdict(result))
            for name in ("first", "first_wrong"):
                if fields[name] is not None and piece is not None:
                    fields[name]["texts"] = [piece(fields[name]["token"]), piece(fields[name]["best"])]
            return {"verdict": result.verdict, **fields}

        verdicts = Counter(each.verdict for each in self.outputs)
        return {
            "verdict": self.verdict,
            "complete": self.complete,
            "tokens": sum(each.tokens for each in self.outputs),
            "identical": verdicts["identical"],
            "ties": verdicts["numerical tie"],
            "wrong": verdicts["wrong"],
            "outputs": [shown(each) for each in self.outputs],
            "refused": [asdict(each) for each in self.refused],
            "failed": [asdict(each) for each in self.failed],
        }


def _finite(fields: Mapping[str, Any]) -> Json:
    """Infinities, which JSON lacks, as ``None``."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
