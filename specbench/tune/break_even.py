"""From how many tokens per step on drafts pay, by draft length and batch size: `specbench tune --break-even`.

A step takes (nearly) as long whatever is accepted in it. So drafts pay from as many tokens per step on as a step with
them takes longer than one of plain decoding, whatever the drafter. Engines that can pretend an acceptance are measured
at two of them, which tests the "nearly"; specbench's own decoder with the drafter's real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from specbench.base.errors import SpecbenchError
from specbench.base.record import Estimate, ratio
from specbench.bench.grid import PromptGroup, make_groups
from specbench.bench.serving import BenchRequest, Workload
from specbench.results import stats
from specbench.results.lines import Generation, RequestLine
from specbench.show.document import Items, Part, Sheet
from specbench.specs.sweeps import Closed
from specbench.tune.search import plain_failed

if TYPE_CHECKING:
    from specbench.bench.engines.engine import BenchEngine
    from specbench.bench.prompts import Prompt
    from specbench.export.start import EngineSetting, StartedEngine
    from specbench.options import DecodingOptions
    from specbench.rows import Row

GAMMAS = (2, 4, 8)

_SHARES = (0.25, 0.75)
"""Shares of a draft that are pretended to be accepted."""

_GROUPS = 6
"""Groups of prompts at each batch size, at most."""

_STRAIGHT = 1.05
"""By how much the time of a step may differ between two acceptances and still count as the same."""


Drafts: TypeAlias = tuple[str, int, float | None]
"""Drafter and draft length of a row, and how many tokens per step it pretends; ``None`` if acceptance is real."""


class BreakEven(Struct, frozen=True):
    """What a drafter needs with a draft length at a batch size.

    Attributes:
        tokens: Tokens per step from which it pays: the time of its step over that of a step of plain decoding.
        steps: These times apart, by the tokens per step that they were measured at.
    """

    drafter: str
    gamma: int
    batch: int
    tokens: Estimate
    steps: dict[float, Estimate]

    @property
    def most(self) -> float:
        """The speedup if every draft token were accepted."""
        return ratio(self.gamma + 1.0, self.tokens.value)

    @property
    def bend(self) -> float:
        """The time of a step at the highest acceptance over that at the lowest one."""
        return ratio(self.steps[max(self.steps)].value, self.steps[min(self.steps)].value)


def pretending(
    engine: StartedEngine, settings: Sequence[EngineSetting]
) -> tuple[list[EngineSetting], dict[str, Drafts]]:
    """Return plain decoding and each other setting with two acceptances, and what the latter draft, by name."""
    found, drafts = [each for each in settings if not each.gamma], dict[str, Drafts]()
    for each in settings:
        for length in [1.0 + share * each.gamma for share in _SHARES] if each.gamma else ():
            name = f"{each.name},length={length:g}"
            found.append(replace(each, name=name, options=engine.pretending(each.options, length)))
            drafts[name] = each.family, each.gamma, length
    return found, drafts


def measure(
    engine: BenchEngine[Any],
    rows: Sequence[Row],
    drafts: Mapping[str, Drafts],
    prompts: Sequence[Prompt],
    decoding: DecodingOptions,
    *,
    in_turn: bool,
    in_time: Callable[[], bool],
    report: Callable[[str, int, int], None],
) -> tuple[list[BreakEven], dict[str, str]]:
    """Time the steps of rows and of plain decoding on the same prompts; return what drafts need, and errors by label.

    Args:
        engine: What decodes.
        rows: Plain decoding and others, at each batch size.
        drafts: What the others draft, by id.
        prompts: At least as many as the largest batch.
        decoding: Options of each output.
        in_turn: Whether all rows decode a group before the next; otherwise each decodes all of them.
        in_time: Whether there is time for another group.
        report: Receives progress.

    Raises:
        RunError: Plain decoding failed.
    """
    named = {prompt.id: prompt for prompt in prompts}
    servers = [*dict.fromkeys(row.drafter for row in rows)]
    rows = sorted(rows, key=lambda row: servers.index(row.drafter))
    groups = {row.id: make_groups(prompts, Closed(row.condition.batch or 1))[:_GROUPS] for row in rows}
    numbers = [0, *range(_GROUPS)]  # the first group once more: then all is warm
    cells = (
        [(row, n) for n in numbers for row in rows]
        if in_turn
        else [(row, n) for row in rows for n in numbers]
    )
    taken: dict[str, dict[int, tuple[float, float]]] = {row.id: {} for row in rows}
    failed: dict[str, str] = {}
    for done, (row, n) in enumerate(cells):
        if n >= len(groups[row.id]) or not in_time():
            continue
        report(f"measuring {row.label}", done, len(cells))
        try:
            group, drafted = groups[row.id][n], drafts.get(row.id)
            taken[row.id][n] = _step(engine, row, group, named, decoding, drafted)
        except SpecbenchError as error:
            failed[row.label] = str(error)
            if row.id not in drafts and not taken[row.id] and n == len(groups[row.id]) - 1:
                raise plain_failed(error.message, "Its steps are what others are compared with.") from error
    same: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row.id in drafts:
            drafter, gamma, _ = drafts[row.id]
            same.setdefault((drafter, gamma, row.condition.batch or 1), []).append(row)
    found = []
    for what, pair in sorted(same.items()):
        steps: dict[float, Estimate] = {}
        whole: list[tuple[float, int, int]] = []
        for repeat, row in enumerate(pair):
            plain, own = taken[row.baseline], taken[row.id]
            over = [(ratio(own[n][0], plain[n][0]), n, repeat) for n in own.keys() & plain.keys()]
            if over:
                length = sum(tokens for _, tokens in own.values()) / len(own)
                steps[round(length, 3)] = _mean(over)
                whole += over
        if whole:
            found.append(BreakEven(*what, _mean(whole), steps))
    return found, failed


def _mean(over: Sequence[tuple[float, int, int]]) -> Estimate:
    ratios, groups, repeats = zip(*over, strict=True)
    return stats.geometric_mean(list(ratios), groups, repeats)


def _step(
    engine: BenchEngine[Any],
    row: Row,
    group: PromptGroup,
    prompts: Mapping[str, Prompt],
    decoding: DecodingOptions,
    drafts: Drafts | None,
) -> tuple[float, float]:
    """Return the seconds of a step, and its tokens; NaN where nothing came after the first tokens."""
    asked = [BenchRequest(engine.encode(prompts[name], []), 0) for name in group.prompts]
    outputs: Sequence[Generation | RequestLine]
    if row.condition.batch is None:
        outputs = [engine.generate(row, asked[0].prompt, decoding, seed=0)]
        counted: Any = outputs[0].server
    else:
        together = engine.generate_group(row, Workload(asked, len(asked), asked), decoding)
        outputs, counted = together.requests, together.speculation
    tokens = sum(each.new_tokens - each.first_tokens for each in outputs)
    steps = [len(each.steps.drafted) for each in outputs]
    length = 1.0
    if drafts is not None and any(steps):
        length = tokens / sum(steps)
    elif drafts is not None:
        known = counted is not None and counted.drafts and counted.accepted is not None
        length = 1.0 + counted.accepted / counted.drafts if known else drafts[2] or math.nan
    return ratio(sum(each.decode_s for each in outputs), tokens) * length, length


def break_even_parts(found: Sequence[BreakEven], notes: Sequence[str]) -> Iterator[Part]:
    """Yield a table of what drafts need, and what it rests on."""
    rows = []
    for each in found:
        measured = ", ".join(f"{stats.decimals(step.value)} at {at:.3g}" for at, step in each.steps.items())
        most = f"{stats.decimals(each.most)}×"
        tokens = stats.ratio_text(each.tokens, "")
        rows.append([each.drafter, str(each.gamma), str(each.batch), tokens, most, measured])
    headings = [
        "drafter",
        "γ",
        "batch",
        "pays from tokens/step",
        "at most",
        "step over plain's at tokens/step",
    ]
    yield Sheet(headings, rows, ranks=[0, 0, 0, 0, 1, 2], left=frozenset({5}), elsewhere="with --json")
    lines = ["Brackets: 95% intervals over prompts. At most: the speedup if every draft token is accepted."]
    worst = max(found, key=lambda each: abs(math.log(each.bend)))
    if not 1 / _STRAIGHT < worst.bend < _STRAIGHT:
        lines.append(
            f"A step of {worst.drafter} at γ = {worst.gamma} takes {stats.decimals(worst.bend)} times as long at the"
            " higher acceptance, or the machine was busy: what pays is between the two."
        )
    yield Items([*lines, *notes])
