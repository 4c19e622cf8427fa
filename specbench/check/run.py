"""A check of one configuration, prompt by prompt, and its findings, which stay when it is interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from specbench.backends.torch.parity import Difference
from specbench.base.record import Json, finite
from specbench.check.deviation import DeviationResult, judge_deviations
from specbench.check.greedy import (
    Against,
    GreedyOutput,
    GreedyResult,
    Piece,
    Verdict,
    check_greedy,
    count_verdicts,
    difference_json,
    run_greedy,
    verdict_of,
    worst,
)
from specbench.check.invariants import Violation
from specbench.check.observe import plainly, scorer_of
from specbench.check.sampled import ExactCase, check_exact
from specbench.decoding.request import Request
from specbench.loaded import LoadedRecipe
from specbench.specs.policies import PolicySpec

Checked = Literal["plain", "transformers", "logits", "steps", "exact"]
"""What is checked of a configuration, as the rows of docs/check.md."""

_MAX_LISTED = 100
"""Violations listed in JSON; all are counted."""


@dataclass
class DecodingCheck:
    """A check of one configuration: iterate over ``check_steps``. The findings so far can be read at any time.

    Attributes:
        requests: By name of their prompts, in which alone they differ; at least one.
        references: Outputs of ``transformers`` by name; empty for no comparison.
        no_transformers: Why there are none; ``None`` if there are.
        bit_exact: Whether logits of plain and speculative decoding have to be equal bit for bit.
        plain_outputs: Outputs of plain decoding so far, by name. Checks with the same target, cache and stop rules
            share it.
        greedy: One result per prompt.
        exact: One result per prompt; empty for greedy decoding.
        complete: Whether all cases are checked.
    """

    requests: Mapping[str, Request]
    references: Mapping[str, Sequence[int]] = field(default_factory=dict)
    no_transformers: str | None = None
    bit_exact: bool = False
    plain_outputs: dict[str, GreedyOutput] = field(default_factory=dict)
    greedy: list[GreedyResult] = field(default_factory=list)
    exact: list[ExactCase] = field(default_factory=list)
    complete: bool = False

    def check_steps(self) -> Iterator[int]:
        """Check greedy outputs of all prompts, and above temperature 0 every step's distribution.

        Yields before each prompt how many are done.
        """
        for done, (name, request) in enumerate(self.requests.items()):
            yield done
            if name not in self.plain_outputs:
                self.plain_outputs[name] = run_greedy(plainly(request))
            plain = self.plain_outputs[name]
            self.greedy.append(check_greedy(request, name, self.references.get(name), plain))
            if self.sampled:
                self.exact.append(check_exact(request, name))
        self.complete = True

    @property
    def _first(self) -> Request:
        return next(iter(self.requests.values()))

    @property
    def drafter(self) -> str:
        return self._first.drafter.traits.name

    @property
    def draft_policy(self) -> str:
        return self._first.policy.name

    @property
    def plain(self) -> bool:
        """Whether plain decoding itself is checked, which drafts nothing."""
        return self.drafter == "none"

    @property
    def sampled(self) -> bool:
        """Whether the temperature is above 0."""
        return not self._first.sampling.greedy

    @property
    def label(self) -> str:
        """The configuration as tables of sweeps name it."""
        spec: PolicySpec | None = getattr(self._first.policy, "spec", None)
        policy = self.draft_policy if spec is None else spec.label
        return "plain" if self.plain else f"{self.drafter} {policy}"

    @property
    def deviations(self) -> DeviationResult | None:
        """Of the logits; ``None`` before there are any."""
        speculative = [value for result in self.greedy for value in result.output.deviations]
        plain = [value for result in self.greedy for value in result.plain.deviations]
        return judge_deviations(speculative, plain, scorer_of(self._first).rounding)

    @property
    def tested(self) -> int:
        """Draft tokens that were tested; of plain decoding, outputs that were compared with ``transformers``."""
        if self.plain:
            return len(self.exact) + len(self.differences("transformers"))
        if self.sampled:
            return sum(case.tested for case in self.exact)
        return sum(result.output.drafted for result in self.greedy)

    @property
    def tokens(self) -> int:
        """Tokens of all greedy outputs."""
        return sum(len(result.output.tokens) for result in self.greedy)

    @property
    def bitwise(self) -> tuple[int, int]:
        """Rows of logits that plain and speculative decoding share, and those of them that are bitwise equal."""
        rows = [equal for result in self.greedy for equal in result.bitwise]
        return len(rows), sum(rows)

    @property
    def violations(self) -> list[tuple[str, Violation]]:
        """All violated invariants, with the prompt's id."""
        results: list[GreedyResult | ExactCase] = [*self.greedy, *self.exact]
        return [(result.prompt, violation) for result in results for violation in result.violations]

    @property
    def steps(self) -> int:
        """Steps of speculative decoding that were checked."""
        return sum(result.output.steps for result in self.greedy) + sum(case.steps for case in self.exact)

    @property
    def largest_error(self) -> float:
        """Of all exact positions; 0 if there are none."""
        return max((position.error for case in self.exact for position in case.positions), default=0.0)

    def differences(self, against: Against) -> list[Difference | None]:
        """Return the first difference of every prompt."""
        return [result.differences[against] for result in self.greedy if against in result.differences]

    def verdict_against(self, against: Against) -> Verdict:
        """Return the verdict on the greedy outputs."""
        return worst([verdict_of(difference) for difference in self.differences(against)])

    @property
    def verdicts(self) -> dict[Checked, Verdict]:
        """The verdict on each part that was checked."""
        deviations, rows = self.deviations, self.bitwise
        sound: dict[Checked, bool] = {"steps": not self.violations}
        if deviations is not None:
            sound["logits"] = deviations.sound and (not self.bit_exact or rows[0] == rows[1])
        if self.exact:
            sound["exact"] = all(case.sound for case in self.exact)
        verdicts: dict[Checked, Verdict] = {"plain": self.verdict_against("plain")}
        if self.no_transformers is None:
            verdicts["transformers"] = self.verdict_against("transformers")
        return verdicts | {part: "identical" if fine else "wrong" for part, fine in sound.items()}

    @property
    def verdict(self) -> Verdict:
        """``wrong`` if anything is, ``nothing tested`` if nothing was drafted, else that on the greedy outputs."""
        return worst([*self.verdicts.values(), "identical" if self.tested else "nothing tested"])

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
                "tokens": self.tokens,
                "drafted": sum(result.output.drafted for result in self.greedy),
                "accepted": sum(result.output.accepted for result in self.greedy),
                "against_plain": self._comparison("plain", piece),
                "against_transformers": transformers,
                "not_compared": self.no_transformers,
            },
            "logits": deviations and {"sound": deviations.sound, **finite(asdict(deviations))},
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
        differences = [
            {"prompt": result.prompt, "verdict": verdict_of(difference)} | difference_json(difference, piece)
            for result in self.greedy
            if (difference := result.differences.get(against)) is not None
        ]
        return {**count_verdicts([*map(verdict_of, self.differences(against))]), "differences": differences}

    def _exact(self) -> Json:
        positions = [position for case in self.exact for position in case.positions]
        worst_position = max(positions, key=lambda position: position.error, default=None)
        return {
            "sound": all(case.sound for case in self.exact),
            "steps": sum(case.steps for case in self.exact),
            "positions": dict(Counter(position.kind for position in positions)),
            "largest_error": self.largest_error,
            "at": worst_position and asdict(worst_position),
        }


def checks_of(
    recipes: Sequence[LoadedRecipe],
    prompts: Mapping[str, Sequence[int]],
    references: Mapping[str, Sequence[int]],
    no_transformers: str | None,
) -> list[DecodingCheck]:
    """Return a check for each recipe, which share their target. For the arguments see ``DecodingCheck``."""
    plain_outputs: dict[str, GreedyOutput] = {}
    return [
        DecodingCheck(
            {name: recipe.start(ids).request for name, ids in prompts.items()},
            references,
            no_transformers,
            bit_exact=recipe.target.bit_exact,
            plain_outputs=plain_outputs,
        )
        for recipe in recipes
    ]


def verdict_on(checks: Sequence[DecodingCheck]) -> Verdict:
    """Return the verdict on several configurations together."""
    return worst([check.verdict for check in checks])


def checks_json(checks: Sequence[DecodingCheck], piece: Piece | None) -> Json:
    """Return the results as JSON data; see ``DecodingCheck.to_dict``."""
    return {"verdict": verdict_on(checks), "configurations": [check.to_dict(piece) for check in checks]}
