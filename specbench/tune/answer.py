"""The answer of a search: as sentences, a table, JSON, and commands that use and export the winner."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json
from specbench.base.textsafe import counted, listed, one_line
from specbench.export.output import export_fastest
from specbench.export.registry import load_engines
from specbench.export.setting import MeasuredSetting, RunSettings, Setting
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import Tuned, TuningAnswer
from specbench.results.summary import disturbance
from specbench.rows import Row
from specbench.show.document import Items, Paragraph, Part, Sheet, to_text
from specbench.tune.candidates import CLOSE_SHARE, NO_TIME
from specbench.tune.race import MARGIN, Race

if TYPE_CHECKING:
    from specbench.recipe import Recipe
    from specbench.tune.search import StoredSearch

_NAMED = 5
"""Configurations that a sentence lists at most."""

_LONG = 8 * 60
"""After this many minutes no longer search is advised."""


@dataclass(frozen=True)
class Tried:
    """The outcome of one configuration.

    Attributes:
        blocks: Number of blocks that it was measured in; ``None`` if it was not raced.
        speedup: Speedup over plain decoding in these blocks.
        outcome: The outcome in words; if it was raced, with the bound that decides.
    """

    config: str
    label: str
    predicted: float | None
    blocks: int | None
    speedup: Estimate | None
    outcome: str


# -- the answer ------------------------------------------------------------------------------------


def find_answer(search: StoredSearch[Any], results: Results) -> TuningAnswer:
    """Return the answer of a search; its choice is plain decoding if speculation does not pay."""
    race, rows = search.race, search.rows
    disturbed = disturbance(results).partition(": ")[2]
    if not race.blocks:
        return _predicted_answer(search, disturbed)
    leader, verdict, best = race.leader, race.verdict, _best_drafting(race)
    speedup = "" if best is None else stats.ratio_text(race.ratio(best, race.plain))
    what = "" if best is None else f"{_described(rows[best])}, {speedup}"
    all_failed = len(race.names) > 1 and best is None
    if verdict == "faster":
        headline = f"{_described(rows[leader])}: {speedup} over plain decoding"
        headline += "." if race.open or _near_leader(race) else "; nothing else is within 5%."
    elif all_failed:
        headline = "Plain decoding is the provisional choice: all drafters in the race failed."
    elif best is None:
        headline = "Speculation does not pay here: no drafter is predicted to come near plain decoding."
    elif verdict == "plain":
        headline = f"Speculation does not pay here: the best drafter is {what} of plain decoding."
    elif verdict == "equal":
        headline = f"Speculation gains less than 5% here: the best drafter is {what} over plain decoding."
    elif leader == race.plain:
        headline = f"Plain decoding is the best so far (provisional); the best drafter is {what} of it."
    else:
        headline = f"{what} over plain decoding: the best so far (provisional), in too few blocks to be sure."
    measured = [name for name in race.names if name != race.plain and race.num_blocks(name)]
    return TuningAnswer(
        headline=headline,
        details=[*_details(search, disturbed)],
        choice=race.plain if verdict in ("equal", "plain") else leader,
        provisional=verdict == "open" or all_failed,
        measured={
            name: Tuned(
                speedup=race.ratio(name, race.plain),
                categories={each: race.ratio(name, race.plain, each) for each in race.categories(name)},
                verdict=race.verdict_of(name),
            )
            for name in measured
        },
    )


def _predicted_answer(search: StoredSearch[Any], disturbed: str) -> TuningAnswer:
    """Return the answer of a search whose time was over before the first block was complete."""
    race = search.race
    best = next(iter(race.names[1:]), race.plain)
    if search.predicted.get(best, 0.0) > 1.0:
        predicted = stats.decimals(search.predicted[best])
        headline = (
            f"{_described(search.rows[best])}: predicted {predicted}× over plain decoding (provisional);"
            " the time was too short to compare anything."
        )
    else:
        best = race.plain
        headline = (
            "Plain decoding is the provisional choice: no drafter is predicted to be faster, and the time was too"
            " short to compare anything."
        )
    details = [f"More time compares them: {search.more} --minutes N."]
    if disturbed:
        details.append(f"{_capitalized(disturbed)} A quiet machine takes less time.")
    return TuningAnswer(headline=headline, details=details, choice=best, provisional=True, measured={})


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _best_drafting(race: Race) -> str | None:
    """Return the leader, or else the fastest candidate that drafts; those that are out only if there is no other."""
    if race.leader != race.plain:
        return race.leader
    drafting = [name for name in race.names if name != race.plain and race.num_blocks(name)]
    drafting = [name for name in drafting if name not in {*race.failed, *race.eliminated}] or drafting
    return max(drafting, key=lambda name: race.ratio(name, race.plain).value, default=None)


def _near_leader(race: Race) -> list[str]:
    """Return the drafting candidates whose measured speed is within the margin of the leader's."""
    others = [name for name in race.names if name not in (race.leader, race.plain) and race.num_blocks(name)]
    return [name for name in others if race.ratio(name, race.leader).value >= 1.0 - MARGIN]


def _details(search: StoredSearch[Any], disturbed: str) -> Iterator[str]:
    race = search.race
    if race.decided and race.leader != race.plain:
        yield "With 95% confidence no other candidate of the race is more than 5% faster than this choice."
    if race.open:
        needed = race.blocks_needed()
        if needed is None:
            yield f"More time is needed, how much is not known yet: {search.more} continues."
        else:
            minutes = math.ceil((needed * search.block_s + search.overhead_s) / 60)
            if minutes > _LONG:
                yield f"More than {_LONG // 60} hours would be needed to decide it: {search.more} continues."
            else:
                time = counted(minutes, "more minute")
                yield f"About {time} would decide it: {search.more} --minutes {minutes}."
    least = CLOSE_SHARE * search.predicted.get(race.leader, 1.0)
    untimed = [
        f"{_described(search.rows[name])} (predicted {stats.decimals(search.predicted[name])}×)"
        for name, reason in search.left_out.items()
        if reason.startswith(NO_TIME) and search.predicted.get(name, 0.0) >= least
    ]
    if untimed:
        yield f"Not raced, for lack of time: {listed(untimed, _NAMED)}. {search.more} --minutes N races more."
    leader = _described(search.rows[race.leader])
    near = [
        f"{_described(search.rows[name])} ({stats.ratio_text(race.ratio(name, race.leader))})"
        for name in _near_leader(race)
    ]
    if near:
        yield f"Within 5% of {leader}: {listed(near, _NAMED)}."
    unclear = [
        f"{_described(search.rows[name])} ({stats.decimals(race.ratio(name, race.leader).value)}×, at most"
        f" {_bound(race, name)}×, in {counted(race.num_blocks(name), 'block')})"
        for name in race.rivals
    ]
    if unclear:
        yield f"Possibly more than 5% faster than {leader}: {listed(unclear, _NAMED)}."
    if disturbed and race.verdict == "open":
        yield f"{_capitalized(disturbed)} A quiet machine needs less time."
    elif disturbed:
        yield (
            f"{_capitalized(disturbed)} Candidates were measured in turn and corrected for disturbances of single"
            " generations, so the choice stands; the figures are those of a busy machine."
        )
    if race.leader != race.plain:
        count = len(race.names) - 1
        yield f"The speedup is that of the best of {count} on these prompts: expect a little less on others."


def _described(config: Row) -> str:
    if config.id == config.baseline:
        return "plain decoding"
    if config.kind == "server":
        return one_line(config.label)
    policy = f"γ={config.gamma}" if config.gamma is not None else config.draft_policy
    return f"{one_line(config.drafter)} {policy}"


def _categories(best: Tuned | None) -> dict[str, Estimate]:
    """Return the speedups of the best candidate by category."""
    return {one_line(name): each for name, each in best.categories.items() if each.prompts} if best else {}


def tried(search: StoredSearch[Any]) -> Iterator[Tried]:
    """Yield everything that was tried, the leader first."""
    race, rows = search.race, search.rows
    failed = [name for name in race.names if not race.num_blocks(name)]
    for name in (*(race.ranking if race.blocks else ()), *failed):
        blocks = race.num_blocks(name)
        speedup = race.ratio(name, race.plain) if blocks and name != race.plain else None
        label = one_line(rows[name].label)
        yield Tried(name, label, search.predicted.get(name), blocks, speedup, _outcome(race, name))
    for name, reason in search.left_out.items():
        label = one_line(rows[name].label)
        yield Tried(name, label, search.predicted.get(name), None, None, one_line(reason))


def _outcome(race: Race, name: str) -> str:
    """Return the bound of a candidate's speed over the leader's, and what follows from it."""
    if name in race.failed:
        return "failed"
    if not race.num_blocks(name):
        return "not measured"
    if name == race.leader:
        return "leads" if race.open else "leader"
    bound = _bound(race, name)
    if name in race.rivals or (name == race.plain and name in race.open):
        return f"{bound}, may be faster"
    return f"{bound}, out after {race.eliminated[name]}" if name in race.eliminated else bound


def _bound(race: Race, name: str) -> str:
    """Return the upper bound of a candidate's speed over the leader's, rounded up."""
    bound = race.upper_bound(name, race.leader)
    return f"{math.ceil(100 * bound) / 100:.2f}" if bound < stats.WIDEST else "any"


# -- as text ---------------------------------------------------------------------------------------

_HEADINGS = ("raced", "blocks", "× plain", "bound over leader")
_BOUNDS = (
    "Bound: the upper limit of a configuration's speed, as a multiple of the leader's. Bounds hold for all"
    " configurations together, so they are"
    " wider than single intervals."
)


def _table(search: StoredSearch[Any]) -> Sheet:
    """Return the table of the raced configurations."""
    rows = [
        [each.label, str(each.blocks), _speedup_cell(each), each.outcome]
        for each in tried(search)
        if each.blocks is not None
    ]
    return Sheet(list(_HEADINGS), rows, left=frozenset(range(len(_HEADINGS))))


def _speedup_cell(each: Tried) -> str:
    if each.speedup is None:
        return "1" if each.blocks else "–"
    return stats.ratio_text(each.speedup, "")


def _not_raced(search: StoredSearch[Any]) -> Iterator[str]:
    """Yield a sentence for each reason why configurations were not raced."""
    reasons: dict[str, list[str]] = {}
    for name, reason in search.left_out.items():
        reasons.setdefault(one_line(reason), []).append(one_line(search.rows[name].label))
    for reason, labels in reasons.items():
        yield f"Not raced: {listed(labels, 1)} ({reason.rstrip('.')})."


def answer_parts(answer: TuningAnswer, search: StoredSearch[Any]) -> list[Part]:
    """Return the answer, its categories and the table of what was raced."""
    best = answer.measured.get(_best_drafting(search.race) or "")
    categories = [
        f"{name}: {stats.ratio_text(ratio)}, {counted(ratio.prompts, 'prompt')}"
        for name, ratio in sorted(_categories(best).items(), key=lambda each: -each[1].value)
    ]
    return [
        Paragraph(answer.headline, "bold"),
        *map(Paragraph, answer.details),
        Items(categories, "By category:"),
        _table(search),
        *map(Paragraph, [_BOUNDS, *_not_raced(search)]),
    ]


def short_text(answer: TuningAnswer, command: str, exported: Sequence[Exported] | None) -> str:
    """Return the answer in at most four lines: headline, most important detail, how to decode, how to deploy.

    Args:
        command: The command that decodes with the winner; empty for none.
        exported: Exports for other engines, see ``exports``; ``None`` if nothing is faster than plain decoding.
    """
    lines = [answer.headline, *answer.details[:1]]
    lines += [f"Decode:  {command}"] if command else []
    if exported:
        first = next((each for each in exported if each.setting.fastest is None), exported[0])
        same = [each.engine for each in exported if each.measured.config == first.measured.config]
        others = f"  (or {', '.join(same[1:])})" if same[1:] else ""
        own = "" if first.setting.fastest is None else f"specbench serve, or {first.measured}:  "
        lines.append(f"Deploy:  {own}{first.command}{others}")
    elif exported is not None:
        lines.append(
            "Deploy:  specbench serve  (other engines support no configuration that measured faster than plain"
            " decoding)"
        )
    return "".join(f"{line}\n" for line in lines)


def full_text(
    answer: TuningAnswer, search: StoredSearch[Any], command: str, exported: Sequence[Exported] | None
) -> str:
    """Return everything about the answer as text, its table in 80 columns; see ``short_text``."""
    text = to_text(*answer_parts(answer, search))
    text += f"\nDecode with it:\n    {command}\n" if command else ""
    return text if exported is None else f"{text}\n{exports_text(exported)}"


def as_json(answer: TuningAnswer, search: StoredSearch[Any]) -> Json:
    """Return the answer as JSON data; missing numbers are ``None``."""
    best = answer.measured.get(_best_drafting(search.race) or "")
    return {
        "headline": answer.headline,
        "details": answer.details,
        "verdict": search.race.verdict,
        "ending": search.race.ending,
        "winner": answer.choice,
        "provisional": answer.provisional,
        "leader": search.race.leader,
        "batches": {
            str(batch): {str(gamma): ratio for gamma, ratio in ratios.items()}
            for batch, ratios in search.batches.items()
        },
        "blocks": search.race.blocks,
        **_estimate(best.speedup if best else None),
        "categories": {name: _estimate(ratio) for name, ratio in _categories(best).items()},
        "tried": [
            {
                "config": each.config,
                "predicted": each.predicted,
                "blocks": each.blocks or 0,
                **_estimate(each.speedup),
                "outcome": each.outcome,
            }
            for each in tried(search)
        ],
    }


def _estimate(ratio: Estimate | None) -> dict[str, float | None]:
    if ratio is None or math.isnan(ratio.value):
        return {"speedup": None, "low": None, "high": None}
    return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}


# -- other engines ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """A setting that can be exported to an engine.

    Attributes:
        command: The command that exports it.
        setting: The fastest setting that the engine supports.
        measured: Its measurements in the run.
    """

    engine: str
    command: str
    setting: Setting
    measured: MeasuredSetting


def exports(results: Results, folder: Path, recipes: Mapping[str, Recipe] | None = None) -> list[Exported]:
    """Return the fastest setting that each engine supports, if it measured faster than plain decoding.

    Args:
        results: The run.
        folder: Its folder.
        recipes: Recipes with the paths of models, by configuration id.
    """
    settings = RunSettings(results).all()
    found = []
    for name, engine in load_engines().items():
        try:
            setting, _ = export_fastest(engine, settings)
        except UsageError:
            continue
        measured = setting.measured
        if measured is not None and measured.speedup.value > 1.0:
            words = ["specbench", "export", str(folder), "--to", name]
            recipe = (recipes or {}).get(measured.config)
            for model in (
                () if recipe is None else (recipe.target, *(each.model for each in recipe.drafter.models))
            ):
                words += ["--model", model.source] if model.kind in ("folder", "gguf") else []
            command = shlex.join(map(one_line, words))
            found.append(Exported(name, command, setting, measured))
    return found


def exports_text(found: Sequence[Exported]) -> str:
    """Return which commands export which setting, as lines."""
    if not found:
        return (
            "Other engines support no configuration that measured faster than plain decoding. Deploy it with"
            " `specbench serve`.\n"
        )
    lines = ["Deploy it, or the fastest setting that an engine supports:"]
    for config in dict.fromkeys(each.measured.config for each in found):
        same = [each for each in found if each.measured.config == config]
        lines.append(f"  {same[0].measured}")
        lines += [f"    {each.command}" for each in same]
    return "".join(f"{line}\n" for line in lines)


def exports_json(found: Sequence[Exported]) -> list[Json]:
    """Return the exports as JSON data, an object for each engine."""
    return [
        {
            "engine": each.engine,
            "command": each.command,
            "config": each.measured.config,
            **_estimate(each.measured.speedup),
        }
        for each in found
    ]
