"""The findings of a check as frozen records, with their verdicts and their JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specbench.backends.torch.parity import Difference
from specbench.base.record import Json
from specbench.check.deviation import DeviationResult
from specbench.check.greedy import GreedyResult, Verdict, verdict_of
from specbench.check.invariants import Violation
from specbench.check.outputs import OutputResult, RejectedLine
from specbench.check.sampled import ExactCase

Against = Literal["plain", "transformers"]
Piece = Callable[[int], str]
"""Returns a token's own text."""

_MAX_LISTED = 100
"""Violations listed in JSON; all are counted."""


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on several outputs together; ``identical`` if there are none."""
    order: tuple[Verdict, ...] = ("wrong", "nothing tested", "numerical tie")
    return next((verdict for verdict in order if verdict in verdicts), "identical")


@dataclass(frozen=True)
class CheckResult:
    """The findings on one configuration so far.

    Attributes:
        drafter, draft_policy: Names of what is checked.
        greedy: One result per prompt.
        deviations: Of their logits; ``None`` before there are any.
        exact: One result per prompt; empty for greedy decoding.
        no_transformers: Why there is no comparison with ``transformers``; ``None`` if there is one.
        bit_exact: Whether logits of plain and speculative decoding have to be equal bit for bit.
        sampled: Whether the temperature is above 0.
    """

    drafter: str = "none"
    draft_policy: str = "none"
    greedy: tuple[GreedyResult, ...] = ()
    deviations: DeviationResult | None = None
    exact: tuple[ExactCase, ...] = ()
    no_transformers: str | None = None
    bit_exact: bool = False
    sampled: bool = False
    complete: bool = True

    @property
    def plain(self) -> bool:
        """Whether plain decoding itself is checked, which drafts nothing."""
        return self.drafter == "none"

    @property
    def label(self) -> str:
        """The configuration as sweeps name it."""
        return "none" if self.plain else f"{self.drafter}@{self.draft_policy.removeprefix('fixed:gamma=')}"

    @property
    def tested(self) -> int:
        """Draft tokens that were tested; of plain decoding, outputs that were compared with ``transformers``."""
        if self.plain:
            return len(self.exact) + len(self.differences("transformers"))
        if self.sampled:
            return sum(each.kind == "tested" for case in self.exact for each in case.positions)
        return sum(each.drafted for each in self.greedy)

    @property
    def bitwise(self) -> tuple[int, int]:
        """Rows of logits that plain and speculative decoding share, and those of them that are bitwise equal."""
        return sum(each.bitwise_rows for each in self.greedy), sum(each.bitwise_equal for each in self.greedy)

    @property
    def violations(self) -> list[tuple[str, Violation]]:
        """All violated invariants, with the prompt's id."""
        results: list[GreedyResult | ExactCase] = [*self.greedy, *self.exact]
        return [(each.prompt, found) for each in results for found in each.violations]

    @property
    def steps(self) -> int:
        """Steps of speculative decoding that were checked."""
        return sum(each.steps for each in self.greedy) + sum(each.steps for each in self.exact)

    @property
    def largest_error(self) -> float:
        """Of all exact positions; 0 if there are none."""
        return max((each.error for case in self.exact for each in case.positions), default=0.0)

    def differences(self, against: Against) -> list[Difference | None]:
        """Return the first difference of every prompt."""
        if against == "plain":
            return [each.against_plain for each in self.greedy]
        return [each.against_transformers for each in self.greedy if each.compared_with_transformers]

    def verdict_against(self, against: Against) -> Verdict:
        """Return the verdict on the greedy outputs."""
        return worst([verdict_of(each) for each in self.differences(against)])

    @property
    def verdict(self) -> Verdict:
        """``wrong`` if anything is, ``nothing tested`` if nothing was drafted, else that on the greedy outputs."""
        faulty = (
            bool(self.violations)
            or (self.deviations is not None and not self.deviations.sound)
            or not all(case.sound for case in self.exact)
            or (self.bit_exact and self.bitwise[0] != self.bitwise[1])
        )
        if faulty:
            return "wrong"
        found = [self.verdict_against("plain"), self.verdict_against("transformers")]
        return worst(found if self.tested else [*found, "nothing tested"])

    def to_dict(self, piece: Piece | None) -> Json:
        """Return the JSON object. ``piece`` gives the texts of differing tokens; ``None`` leaves them out."""
        violations, deviations = self.violations, self.deviations
        transformers = self._comparison("transformers", piece) if self.no_transformers is None else None
        return {
            "drafter": self.drafter,
            "draft_policy": self.draft_policy,
            "verdict": self.verdict,
            "complete": self.complete,
            "greedy": {
                "prompts": len(self.greedy),
                "tokens": sum(each.tokens for each in self.greedy),
                "drafted": sum(each.drafted for each in self.greedy),
                "accepted": sum(each.accepted for each in self.greedy),
                "against_plain": self._comparison("plain", piece),
                "against_transformers": transformers,
                "not_compared": self.no_transformers,
            },
            "logits": deviations and {"sound": deviations.sound, **_finite(asdict(deviations))},
            "bitwise": {"required": self.bit_exact, "rows": self.bitwise[0], "equal": self.bitwise[1]},
            "exact": self._exact() if self.exact else None,
            "invariants": {
                "steps": self.steps,
                "violated": dict(Counter(violation.invariant for _, violation in violations)),
                "violations": [
                    {"prompt": prompt, **asdict(violation)} for prompt, violation in violations[:_MAX_LISTED]
                ],
            },
        }

    def _comparison(self, against: Against, piece: Piece | None) -> Json:
        verdicts = Counter(map(verdict_of, self.differences(against)))
        found = []
        for result in self.greedy:
            difference = result.against_plain if against == "plain" else result.against_transformers
            if difference is not None:
                tokens = difference.tokens
                texts = piece and [None if token is None else piece(token) for token in tokens]
                verdict = {"prompt": result.prompt, "verdict": verdict_of(difference)}
                found.append({**verdict, **_finite(asdict(difference)), "texts": texts})
        return {
            "verdict": self.verdict_against(against),
            "identical": verdicts["identical"],
            "ties": verdicts["numerical tie"],
            "wrong": verdicts["wrong"],
            "differences": found,
        }

    def _exact(self) -> Json:
        positions = [each for case in self.exact for each in case.positions]
        worst_position = max(positions, key=lambda each: each.error, default=None)
        acceptances = [value for case in self.exact for value in case.acceptances]
        return {
            "sound": all(case.sound for case in self.exact),
            "steps": sum(case.steps for case in self.exact),
            "positions": dict(Counter(each.kind for each in positions)),
            "largest_error": self.largest_error,
            "at": worst_position and asdict(worst_position),
            "mean_acceptance": statistics.fmean(acceptances) if acceptances else None,
        }


@dataclass(frozen=True)
class OutputsResult:
    """The findings on outputs of another engine so far."""

    outputs: tuple[OutputResult, ...] = ()
    rejected: tuple[RejectedLine, ...] = ()
    failed: tuple[RejectedLine, ...] = ()
    complete: bool = True

    @property
    def verdict(self) -> Verdict:
        return worst([each.verdict for each in self.outputs] or ["nothing tested"])

    def to_dict(self, piece: Piece | None) -> Json:
        """Return the JSON object. ``piece`` gives the texts of tokens; ``None`` leaves them out."""

        def shown(result: OutputResult) -> Json:
            fields = _finite(asdict(result))
            for name in ("first", "first_wrong"):
                if fields[name] is not None and piece is not None:
                    fields[name]["texts"] = list(map(piece, fields[name]["tokens"]))
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
            "rejected": [asdict(each) for each in self.rejected],
            "failed": [asdict(each) for each in self.failed],
        }


def _finite(fields: Mapping[str, Any]) -> Json:
    """Replace infinities, which JSON lacks, by ``None``."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
