"""The answer of a search: as sentences, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from specbench.base.record import Estimate, Json
from specbench.base.textsafe import one_line
from specbench.findings.catalog import Finding
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import Tuned, TuningAnswer
from specbench.rows import Row
from specbench.show.document import Paragraph, Part, Sheet, to_text
from specbench.tune.candidates import NO_TIME
from specbench.tune.race import Race
from specbench.tune.search import Search

_LONG = 8 * 60
"""After this many minutes no longer search is advised."""


# -- the answer ------------------------------------------------------------------------------------


def find_answer(search: Search, results: Results) -> TuningAnswer:
    """Return the answer of a search; its choice is plain decoding if speculation does not pay.

    It is provisional if the race is not decided, or something that it needs was not measured: see ``race_needs``.
    """
    race, best = search.race, search.race.best
    disturbed = results.disturbance.partition(": ")[2]
    verdict = race.verdict if race.blocks else "open"
    provisional = not race.blocks or not race.decided or best is None or bool(_missing(search))
    choice = race.plain if verdict in ("equal", "plain") else race.leader
    name = "tune.open-plain" if race.leader == race.plain else "tune.open"
    if not race.blocks:  # the time was over before the first one was complete
        name, best = "tune.no-time", next(iter(race.names[1:]), race.plain)
        choice = best if search.predicted.get(best, 0.0) > 1.0 else race.plain
    elif best is None:
        name = "tune.unmeasured"
    elif verdict == "faster":
        name = "tune.yes-provisional" if provisional else "tune.yes"
    elif verdict != "open" and not provisional:
        name = "tune.no" if verdict == "plain" else "tune.equal"
    numbers = (
        {}
        if best is None or not race.blocks
        else {"name": _described(search.rows[best]), "speedup": race.speedup(best)}
    )
    headline = Finding(name, choice=_described(search.rows[choice]), **numbers)
    details = [*_details(search)] if race.blocks else [Finding("tune.resume")]
    if disturbed:
        name = "tune.busy" if verdict == "open" else "tune.busy-decided"
        details.append(Finding(name, why=disturbed[:1].upper() + disturbed[1:]))
    return TuningAnswer(
        headline=headline.text,
        details=[finding.text for finding in details],
        choice=choice,
        provisional=provisional,
        measured={
            name: Tuned(
                speedup=race.speedup(name),
                categories={kind: race.ratio(name, race.plain, kind) for kind in race.categories(name)},
                verdict=race.verdict_of(name),
            )
            for name in race.names
            if name != race.plain and race.num_blocks(name)
        },
    )


def _missing(search: Search) -> list[str]:
    """Return what the race needed and did not measure."""
    able = {*search.race.measured}
    return [what for what, names in search.needs(search.predicted).items() if able.isdisjoint(names)]


def _details(search: Search) -> Iterator[Finding]:
    """Yield findings, the first of which belong to every answer: what was raced, and what was not."""
    race = search.race
    yield from _raced(search)
    if race.open:
        yield _more_time(search)
    if unraced := [*_unraced(search)]:
        yield Finding("tune.unraced", names=unraced)
    if search.tokens is not None:
        yield Finding("tune.cut", tokens=search.tokens)
    if race.leader != race.plain and len(race.measured) > 1:
        yield Finding("holds.chosen", count=len(race.measured))


def _raced(search: Search) -> Iterator[Finding]:
    """Yield what else was raced, and how sure it is that none of it is faster."""
    race, best = search.race, search.race.best
    if best is None:
        return
    others = [
        f"{_described(search.rows[name])} {stats.ratio_text(race.speedup(name))}"
        for name in race.ranking
        if name in race.measured and name != best
    ]
    name = "tune.raced-alone"
    if others:
        name = "tune.raced-sure" if race.decided and best == race.leader else "tune.raced"
    blocks = race.ratio(best, race.plain).prompts
    yield Finding(name, blocks=blocks, prompts=len(search.sweep.prompts), others=others)


def _more_time(search: Search) -> Finding:
    """Return the time that it takes to decide the race."""
    needed = search.race.blocks_needed()
    if len(search.sweep.prompts) == 1:
        return Finding("tune.one-prompt")
    if needed is None:
        return Finding("tune.time-unknown")
    minutes = math.ceil(needed * search.block_s / 60)
    return Finding("tune.hours" if minutes > _LONG else "tune.minutes", minutes=minutes)


def _unraced(search: Search) -> Iterator[str]:
    """Yield the drafters without a measurement to the end, with the reason, those first that a race needs."""
    race, missing = search.race, _missing(search)
    measured = {search.families[name] for name in race.measured}
    failed = [name for name in race.names if name in race.failed]
    names = [*failed, *sorted(search.left_out, key=lambda name: -search.predicted.get(name, 0.0))]
    for name in sorted(names, key=lambda name: search.families[name] not in missing):
        drafter = search.families[name]
        if drafter not in measured:
            measured.add(drafter)
            predicted = search.predicted.get(name)
            reason = search.left_out.get(name) or f"failed: {search.errors.get(name, '')}"
            reason = NO_TIME if reason.startswith(NO_TIME) else reason
            reasons = [f"predicted {stats.decimals(predicted)}×"] if predicted is not None else []
            reasons += [] if reason.startswith("predicted") else [reason]
            yield f"{drafter} ({'; '.join(reasons).rstrip('.: ')})"


def _described(config: Row) -> str:
    return "plain decoding" if config.id == config.baseline else one_line(config.name)


def tried(search: Search) -> Iterator[Json]:
    """Yield everything that was tried, the leader first.

    ``blocks``, and ``speedup`` over plain decoding in these blocks, are ``None`` for what was not raced; ``outcome`` is
    in words, with the bound that decides.
    """
    race = search.race
    failed = [name for name in race.names if not race.num_blocks(name)]
    raced = [*(race.ranking if race.blocks else ()), *failed]
    for name in (*raced, *search.left_out):
        blocks = race.num_blocks(name) if name in raced else None
        yield {
            "config": name,
            "label": one_line(search.rows[name].label),
            "predicted": search.predicted.get(name),
            "blocks": blocks,
            "speedup": race.speedup(name) if blocks and name != race.plain else None,
            "outcome": _outcome(race, name) if name in raced else one_line(search.left_out[name]),
        }


def _outcome(race: Race, name: str) -> str:
    """Return the bound of a candidate's speed over the leader's, and what follows from it."""
    if name in race.failed:
        return "failed"
    if not race.num_blocks(name):
        return "not measured"
    if name == race.leader:
        return "provisional choice" if race.open else "leader"
    value = race.upper_bound(name, race.leader)
    bound = f"{math.ceil(100 * value) / 100:.2f}" if value < stats.WIDEST else "any"
    if name in race.rivals or (name == race.plain and name in race.open):
        return f"{bound}, may be faster"
    return f"{bound}, out after {race.eliminated[name]}" if name in race.eliminated else bound


# -- as text ---------------------------------------------------------------------------------------

_HEADINGS = ("raced", "blocks", "× plain", "bound over leader")
_BOUNDS = (
    "Bound: the upper limit of a configuration's speed, as a multiple of the leader's. Bounds hold for all"
    " configurations together, so they are wider than single intervals."
)


def _table(search: Search) -> Sheet:
    """Return the table of the raced configurations."""
    rows = []
    for row in tried(search):
        if row["blocks"] is not None:
            speedup = "1" if row["blocks"] else "–"
            if row["speedup"] is not None:
                speedup = stats.ratio_text(row["speedup"], "")
            rows.append([row["label"], str(row["blocks"]), speedup, row["outcome"]])
    return Sheet(list(_HEADINGS), rows, left=frozenset(range(len(_HEADINGS))))


def answer_parts(answer: TuningAnswer, search: Search) -> list[Part]:
    """Return the answer and the table of what was raced."""
    said = [Paragraph(answer.headline, "bold"), *map(Paragraph, answer.details)]
    return [*said, _table(search), Paragraph(_BOUNDS)]


def answer_text(answer: TuningAnswer, search: Search, lines: Iterable[str], *, verbose: bool) -> str:
    """Return the answer and further lines as text: its first sentences, or all of it with its table in 80 columns."""
    said = "".join(f"{line}\n" for line in (answer.headline, *answer.details[:3]))
    if verbose:
        said = to_text(*answer_parts(answer, search))
    return said + "".join(f"{line}\n" for line in lines)


def as_json(answer: TuningAnswer, search: Search) -> Json:
    """Return the answer as JSON data; missing numbers are ``None``."""
    best = answer.measured.get(search.race.best or "")
    return {
        "headline": answer.headline,
        "details": answer.details,
        "verdict": search.race.verdict,
        "ending": search.race.ending,
        "winner": answer.choice,
        "provisional": answer.provisional,
        "leader": search.race.leader,
        "blocks": search.race.blocks,
        **_estimate(best.speedup if best else None),
        "categories": {
            one_line(name): _estimate(ratio)
            for name, ratio in (best.categories.items() if best else ())
            if ratio.prompts
        },
        "tried": [
            {**row, "blocks": row["blocks"] or 0, **_estimate(row["speedup"])} for row in tried(search)
        ],
    }


def _estimate(ratio: Estimate | None) -> dict[str, float | None]:
    if ratio is None or math.isnan(ratio.value):
        return {"speedup": None, "low": None, "high": None}
    return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}
