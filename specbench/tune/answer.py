"""What a search came to: in words, as a table, as a `specbench.toml`, and as commands that export it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.base.record import NO_FIGURE, Estimate, Json
from specbench.base.textsafe import counted, one_line
from specbench.bench.grid import SweepConfig
from specbench.export.engines import ENGINES, export_fastest
from specbench.export.setting import Measured, Setting, settings_of_run
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import Tuned, TuningAnswer
from specbench.results.summary import disturbance
from specbench.show.document import Items, Paragraph, Part, Sheet, to_markdown, to_text
from specbench.tune.race import MARGIN, Race

if TYPE_CHECKING:
    from specbench.tune.search import Found

_NAMED = 5
"""How many configurations a sentence names."""


@dataclass(frozen=True)
class Tried:
    """What became of a configuration.

    Attributes:
        config, label: Its id, and its name in tables.
        predicted: Speedup, ``None`` if it could not be.
        blocks: In how many it was measured; ``None`` if it was not raced.
        speedup: Over plain decoding in these.
        outcome: In words; of what was raced with the bound that decides.
    """

    config: str
    label: str
    predicted: float | None
    blocks: int | None
    speedup: Estimate | None
    outcome: str


@dataclass(frozen=True)
class TuneAnswer:
    """Which way to decode.

    Attributes:
        headline: In a sentence.
        details: Sentences that qualify it.
        winner: What to decode with, plain decoding where speculation does not pay.
        provisional: Whether it is only the best so far: whether speculation pays is not sure yet.
        speedup: Of the leader; without a figure where nothing was compared.
        categories: Its speedups by category.
        tried: Everything that was tried, the leader first.
    """

    headline: str
    details: tuple[str, ...]
    winner: SweepConfig
    provisional: bool
    speedup: Estimate
    categories: Mapping[str, Estimate]
    tried: tuple[Tried, ...]


# -- the answer ------------------------------------------------------------------------------------


def find_answer(found: Found, configs: Sequence[SweepConfig], results: Results) -> TuneAnswer:
    """The answer of a search.

    Args:
        found: What it came to.
        configs: Of its grid.
        results: Its run.
    """
    race, by_id = found.race, {config.id: config for config in configs}
    disturbed = disturbance(results).partition(": ")[2]
    if not race.blocks:
        return _predicted(found, configs, disturbed)
    leader, verdict = race.leader, race.verdict
    best = leader if leader != race.plain else _runner_up(race)
    speedup = NO_FIGURE if best is None else _speedup(race, best)
    what = "" if best is None else f"{_described(by_id[best])}, {stats.ratio_text(speedup, ' ×')}"
    categories = {} if best is None else _categories(race, best)
    alone = len(race.names) > 1 and best is None
    if verdict == "faster":
        ratio = stats.ratio_text(speedup, " ×")
        headline = f"{_described(by_id[leader])}: {ratio} over plain decoding{_extremes(categories)}"
        headline += "." if race.open or _near(race) else "; nothing else is within 5%."
    elif alone:
        headline = "Plain decoding is a provisional setting: every drafter that was raced failed."
    elif best is None:
        headline = "Speculation does not pay here: nothing is predicted to come near plain decoding."
    elif verdict == "plain":
        headline = f"Speculation does not pay here: the best that was tried is {what} of plain decoding."
    elif verdict == "equal":
        headline = (
            f"Speculation makes a difference of less than 5% here: the best is {what} over plain decoding."
        )
    elif leader == race.plain:
        headline = (
            "Plain decoding is the best so far, a provisional setting: it is not sure yet that nothing is faster. Of"
            f" what drafts the best is {what} of plain decoding."
        )
    else:
        headline = (
            f"{what} over plain decoding: the best so far, a provisional setting. It is not sure yet that it is faster"
            " than plain decoding."
        )
    return TuneAnswer(
        headline,
        tuple(_details(found, by_id, disturbed)),
        by_id[race.plain] if verdict in ("equal", "plain") else by_id[leader],
        verdict == "open" or alone,
        speedup,
        categories,
        tuple(_tried(found, configs)),
    )


def _predicted(found: Found, configs: Sequence[SweepConfig], disturbed: str) -> TuneAnswer:
    """The answer where the time was up before all had decoded one prompt."""
    race, by_id = found.race, {config.id: config for config in configs}
    best = next(iter(race.names[1:]), race.plain)
    if found.predicted.get(best, 0.0) > 1.0:
        headline = (
            f"{_described(by_id[best])}: predicted {stats.decimals(found.predicted[best])} × over plain decoding, a"
            " provisional setting: the time was up before anything could be compared."
        )
    else:
        best = race.plain
        headline = (
            "Plain decoding is a provisional setting: nothing is predicted to be faster, and the time was up before"
            " anything could be compared."
        )
    details = [f"{_sentence(disturbed)} A quiet machine takes less time."] if disturbed else []
    details.append("More time compares them: --resume --overwrite --minutes N.")
    return TuneAnswer(
        headline, tuple(details), by_id[best], True, NO_FIGURE, {}, tuple(_tried(found, configs))
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _runner_up(race: Race) -> str | None:
    """The fastest that drafts, of those in question, or else of all."""
    drafting = [name for name in race.names if name != race.plain and race.num_blocks(name)]
    drafting = [name for name in drafting if name not in race.eliminated] or drafting
    return max(drafting, key=lambda name: _speedup(race, name).value, default=None)


def _speedup(race: Race, name: str) -> Estimate:
    return race.ratio(name, race.plain)


def _near(race: Race) -> list[str]:
    """Those that measure within the margin of the leader, but for plain decoding."""
    others = [name for name in race.names if name not in (race.leader, race.plain) and race.num_blocks(name)]
    return [name for name in others if race.ratio(name, race.leader).value >= 1.0 - MARGIN]


def _details(found: Found, by_id: Mapping[str, SweepConfig], disturbed: str) -> Iterator[str]:
    race = found.race
    near = [
        f"{_described(by_id[name])} ({stats.ratio_text(race.ratio(name, race.leader), ' ×')})"
        for name in _near(race)
    ]
    leader = _described(by_id[race.leader])
    if near:
        yield f"Within 5% of {leader}: {_listed(near)}."
    unclear = [
        f"{_described(by_id[name])} ({stats.decimals(race.ratio(name, race.leader).value)} ×, at most"
        f" {_bound(race, name)} ×, in {counted(race.num_blocks(name), 'block')})"
        for name in race.rivals
    ]
    if unclear:
        yield f"May still be more than 5% faster than {leader}: {_listed(unclear)}."
    if race.open:
        yield _time_wanted(found)
    if race.decided and race.leader != race.plain:
        yield "With 95% confidence nothing that was raced is more than 5% faster than what is chosen."
    yield from _many(found.batches)
    if disturbed and race.verdict == "open":
        yield f"{_sentence(disturbed)} A quiet machine tells more in the same time."
    elif disturbed:
        yield (
            f"{_sentence(disturbed)} All were measured in turn, and what held single generations up, as"
            " their passes tell, is taken off, so that the choice stands; the figures are those of a busy machine."
        )
    if race.leader != race.plain:
        count = len(race.names) - 1
        yield f"As the best of {count} on these prompts it is somewhat flattered: expect a little less on others."


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _many(batches: Mapping[int, float]) -> Iterator[str]:
    """Up to how many requests side by side it pays."""
    if not batches:
        return
    by = "As predicted from passes that several requests share"
    last = max(batches)
    if batches[last] >= 1.0:
        yield f"{by}, it pays up to batch {last} at least."
    else:
        pays = max((batch for batch in batches if batch != last), default=1)
        if pays == 1:
            yield f"{by}, it pays for one request at a time only, not for {last} side by side."
        else:
            yield f"{by}, it stops paying above batch {pays}."


def _time_wanted(found: Found) -> str:
    """How long it would take to tell apart what is open."""
    wanted = found.race.blocks_needed()
    if wanted is None:
        return "How much more time that takes cannot be told yet; --resume --overwrite goes on."
    minutes = math.ceil((wanted * found.block_s + found.aside_s) / 60)
    return f"About {counted(minutes, 'minute')} more would tell: --resume --overwrite --minutes {minutes}."


def _described(config: SweepConfig) -> str:
    if config.kind == "plain":
        return "plain decoding"
    rule = f"γ = {config.gamma}" if config.gamma is not None else config.policy
    return f"{one_line(config.drafter)} with {rule}"


def _categories(race: Race, name: str) -> dict[str, Estimate]:
    ratios = {category: race.ratio(name, race.plain, category) for category in race.categories(name)}
    return {one_line(category): ratio for category, ratio in ratios.items() if ratio.prompts}


def _extremes(categories: Mapping[str, Estimate]) -> str:
    """The category with the lowest and that with the highest speedup, of those with an interval."""
    known = {name: ratio for name, ratio in categories.items() if ratio.low is not None}
    if len(known) < 2:
        return ""
    ends = [pick(known, key=lambda name: known[name].value) for pick in (min, max)]
    low, high = (f"{name} {stats.ratio_text(known[name], ' ×')}" for name in ends)
    return f"; from {low} to {high}"


def _tried(found: Found, configs: Sequence[SweepConfig]) -> Iterator[Tried]:
    race, by_id = found.race, {config.id: config for config in configs}
    failed = [name for name in race.names if not race.num_blocks(name)]
    for name in (*(race.ranking if race.blocks else ()), *failed):
        blocks = race.num_blocks(name)
        yield Tried(
            name,
            one_line(by_id[name].label),
            found.predicted.get(name),
            blocks,
            _speedup(race, name) if blocks and name != race.plain else None,
            _outcome(race, name),
        )
    for name, reason in found.left_out.items():
        yield Tried(
            name, one_line(by_id[name].label), found.predicted.get(name), None, None, one_line(reason)
        )


def _outcome(race: Race, name: str) -> str:
    """The bound of somebody's speed over the leader's, and what follows from it."""
    fall = race.eliminated.get(name)
    if fall is not None and fall.bound is None:
        return "failed"
    if not race.num_blocks(name):
        return "not measured"
    if name == race.leader:
        return "leads" if race.open else "fastest measured"
    bound = _bound(race, name)
    if name in race.rivals or (name == race.plain and name in race.open):
        return f"{bound}, may be faster"
    return bound if fall is None else f"{bound}, out after {fall.blocks}"


def _bound(race: Race, name: str) -> str:
    """The most that somebody's speed may be over the leader's, never rounded down."""
    most = race.upper_bound(name, race.leader)
    return f"{math.ceil(100 * most) / 100:.2f}" if most < stats.WIDEST else "any"


# -- as text ---------------------------------------------------------------------------------------

_HEADINGS = ("raced", "blocks", "× plain", "at most × the first")
_BOUNDS = "At most: bounds that hold for all rows together, so they reach beyond single intervals."


def _rows(answer: TuneAnswer) -> list[list[str]]:
    """What was raced, a row each."""
    raced = [each for each in answer.tried if each.blocks is not None]
    return [[each.label, str(each.blocks), _over_plain(each), each.outcome] for each in raced]


def _over_plain(tried: Tried) -> str:
    if tried.speedup is None:
        return "1" if tried.blocks else "–"
    return stats.ratio_text(tried.speedup, "")


def _not_raced(answer: TuneAnswer) -> Iterator[str]:
    """What was not, a sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for each in answer.tried:
        if each.blocks is None:
            reasons.setdefault(each.outcome, []).append(each.label)
    for reason, (first, *others) in reasons.items():
        more = f" and {len(others)} more" if others else ""
        yield f"Not raced: {first}{more} ({reason.rstrip('.')})."


def _by_category(answer: TuneAnswer) -> Iterator[str]:
    for name, ratio in sorted(answer.categories.items(), key=lambda each: -each[1].value):
        yield f"{name}: {stats.ratio_text(ratio, ' ×')}, {counted(ratio.prompts, 'prompt')}"


def _parts(answer: TuneAnswer) -> list[Part]:
    """The answer, its categories and the table of what was raced."""
    raced = Sheet(list(_HEADINGS), _rows(answer), left=frozenset(range(len(_HEADINGS))))
    return [
        Paragraph(answer.headline, "bold"),
        *map(Paragraph, answer.details),
        Items(list(_by_category(answer)), "By category:"),
        raced,
        *map(Paragraph, [_BOUNDS, *_not_raced(answer)]),
    ]


def as_text(answer: TuneAnswer) -> str:
    """The answer as lines of text, its table in 80 columns."""
    return to_text(*_parts(answer))


def as_markdown(answer: TuneAnswer) -> str:
    """The same as Markdown."""
    return to_markdown(*_parts(answer))


def stored(answer: TuneAnswer, found: Found) -> TuningAnswer:
    """The answer as ``run.json`` keeps it, for everything that shows the run."""
    race = found.race
    measured = [name for name in race.names if name != race.plain and race.num_blocks(name)]
    shares = {name: race.ratio(name, race.leader) for name in measured}
    return TuningAnswer(
        headline=answer.headline,
        details=list(answer.details),
        choice=answer.winner.id,
        provisional=answer.provisional,
        measured={
            name: Tuned(
                speedup=_speedup(race, name),
                share=shares[name] if shares[name].prompts else None,
                categories={
                    category: race.ratio(name, race.plain, category) for category in race.categories(name)
                },
                verdict=race.verdict_of(name),
            )
            for name in measured
        },
    )


def as_json(answer: TuneAnswer, found: Found) -> Json:
    """The same as data; ``None`` where there is no figure."""
    return {
        "headline": answer.headline,
        "details": list(answer.details),
        "verdict": found.race.verdict,
        "ending": found.ending,
        "winner": answer.winner.id,
        "provisional": answer.provisional,
        "leader": found.race.leader,
        "batches": {str(batch): ratio for batch, ratio in found.batches.items()},
        "blocks": found.race.blocks,
        **_ends(answer.speedup),
        "categories": {name: _ends(ratio) for name, ratio in answer.categories.items()},
        "tried": [
            {
                "config": each.config,
                "predicted": each.predicted,
                "blocks": each.blocks or 0,
                **_ends(each.speedup),
                "outcome": each.outcome,
            }
            for each in answer.tried
        ],
    }


def _ends(ratio: Estimate | None) -> dict[str, float | None]:
    if ratio is None or math.isnan(ratio.value):
        return {"speedup": None, "low": None, "high": None}
    return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}


# -- for engines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """What there is for an engine.

    Attributes:
        engine: Its name.
        command: What exports the setting.
        setting: The fastest that the engine has.
        measured: What the run says of that.
    """

    engine: str
    command: str
    setting: Setting
    measured: Measured


def exports(results: Results, folder: Path) -> list[Exported]:
    """The fastest setting that each engine has, for those where it measured faster than plain decoding.

    Args:
        results: A run.
        folder: Where that is.
    """
    settings = settings_of_run(results)
    found = []
    for name, engine in ENGINES.items():
        try:
            setting, _ = export_fastest(engine, settings, results)
        except UsageError:
            continue
        measured = setting.measured
        if measured is not None and measured.speedup.value > 1.0:
            command = shlex.join(["specbench", "export", str(folder), "--to", name])
            found.append(Exported(name, command, setting, measured))
    return found


def exports_text(found: Sequence[Exported]) -> str:
    """How to deploy what was found, as lines: by setting, which commands export it, and by how much it is slower."""
    if not found:
        return "Nothing that other engines have was faster than plain decoding. Deploy it with `specbench serve`.\n"
    lines = ["Deploy it, or what comes nearest to it there:"]
    for config in dict.fromkeys(each.measured.config for each in found):
        same = [each for each in found if each.measured.config == config]
        beside = same[0].setting.replaces
        low = same[0].measured.speedup.low
        unsure = ", not surely faster than that" if low is None or low <= 1.0 else ""
        lines.append(f"  {same[0].measured}{unsure}{'' if beside is None else f'; {beside}'}")
        lines += [f"    {each.command}" for each in same]
    without = [name for name in ENGINES if name not in {each.engine for each in found}]
    if without:
        lines.append(f"Nothing faster than plain decoding: {', '.join(without)}.")
    if all(each.setting.replaces is not None for each in found):
        lines.append("The fastest is deployed by `specbench serve`.")
    return "".join(f"{line}\n" for line in lines)


def exports_json(found: Sequence[Exported]) -> list[Json]:
    """The same as data, an object for each engine; ``share`` is of the fastest setting's speed."""
    return [
        {
            "engine": each.engine,
            "command": each.command,
            "config": each.measured.config,
            **_ends(each.measured.speedup),
            "share": None if each.setting.replaces is None else _ends(each.setting.replaces.share),
        }
        for each in found
    ]
