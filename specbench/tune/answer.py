"""The answer of a search: as sentences, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from specbench.base.record import Estimate, Json
from specbench.base.textsafe import counted, listed, one_line
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import Tuned, TuningAnswer
from specbench.rows import Row
from specbench.show.document import Items, Paragraph, Part, Sheet, to_text
from specbench.tune.candidates import NO_TIME
from specbench.tune.race import MARGIN, Race
from specbench.tune.search import Search

_NAMED, _OTHERS = 5, 3
"""Configurations that a sentence lists at most, and rivals with their intervals."""

_LONG = 8 * 60
"""After this many minutes no longer search is advised."""


# -- the answer ------------------------------------------------------------------------------------


def find_answer(search: Search, results: Results) -> TuningAnswer:
    """Return the answer of a search; its choice is plain decoding if speculation does not pay.

    It is provisional if the race is not decided, or something that it needs was not measured: see ``race_needs``.
    """
    race, rows = search.race, search.rows
    disturbed = results.disturbance.partition(": ")[2]
    disturbed = disturbed[:1].upper() + disturbed[1:]
    if not race.blocks:
        return _predicted_answer(search, disturbed)
    leader, verdict, best = race.leader, race.verdict, race.best
    provisional = not race.decided or best is None or bool(_missing(search))
    what = "" if best is None else f"{_described(rows[best])}, {stats.ratio_text(race.speedup(best))}"
    if best is None:
        headline = "Not known: no drafter could be measured. Plain decoding is the provisional choice."
    elif verdict == "faster":
        headline = f"Yes: {what} over plain decoding."
        if provisional:
            headline += " Whether it is the fastest is not known yet (provisional)."
    elif verdict in ("plain", "equal") and not provisional:
        said = "does not pay" if verdict == "plain" else "gains less than 5%"
        headline = (
            f"No, speculation {said} here: the best drafter that was raced is {what} over plain decoding."
        )
    elif leader == race.plain:
        headline = (
            f"Not known yet: the provisional choice is plain decoding; the best drafter is {what} of it."
        )
    else:
        headline = f"Not known yet: the provisional choice is {what} over plain decoding{_above(race)}."
    return TuningAnswer(
        headline=headline,
        details=[*_details(search, disturbed)],
        choice=race.plain if verdict in ("equal", "plain") else leader,
        provisional=provisional,
        measured={
            name: Tuned(
                speedup=race.speedup(name),
                categories={each: race.ratio(name, race.plain, each) for each in race.categories(name)},
                verdict=race.verdict_of(name),
            )
            for name in race.names
            if name != race.plain and race.num_blocks(name)
        },
    )


def _predicted_answer(search: Search, disturbed: str) -> TuningAnswer:
    """Return the answer of a search whose time was over before the first block was complete."""
    race = search.race
    best = next(iter(race.names[1:]), race.plain)
    headline = "Not known: the time was too short to compare anything. The provisional choice is "
    if search.predicted.get(best, 0.0) > 1.0:
        headline += f"{_described(search.rows[best])}, predicted {stats.decimals(search.predicted[best])}×."
    else:
        best = race.plain
        headline += "plain decoding."
    details = ["More time compares them: --resume --minutes N."]
    if disturbed:
        details.append(f"{disturbed} A quiet machine takes less time.")
    return TuningAnswer(headline=headline, details=details, choice=best, provisional=True, measured={})


def _above(race: Race) -> str:
    """Return how many candidates were measured faster than the leader, which is chosen by predictions too."""
    speedup = race.speedup(race.leader).value
    above = [name for name in race.measured if race.speedup(name).value > speedup]
    return f"; {counted(len(above), 'other')} measured higher" if above else ""


def _missing(search: Search) -> list[str]:
    """Return what the race needed and did not measure."""
    able = {*search.race.measured}
    return [what for what, names in search.needs(search.predicted).items() if able.isdisjoint(names)]


def _details(search: Search, disturbed: str) -> Iterator[str]:
    """Yield sentences, the first three of which belong to every answer: what was raced, and what was not."""
    race = search.race
    yield from _raced(search)
    if race.open:
        yield _more_time(search)
    yield from _unraced(search)
    leader = _described(search.rows[race.leader])
    near = [
        f"{_described(search.rows[name])} ({stats.ratio_text(race.ratio(name, race.leader))})"
        for name in race.measured
        if name != race.leader and race.ratio(name, race.leader).value >= 1.0 - MARGIN
    ]
    if near:
        yield f"Within 5% of {leader}: {listed(near, _NAMED)}."
    gamma = fixed_gamma(search, race.leader)
    if gamma is not None:
        yield f"The best fixed γ with its drafter, for engines that need one, is {gamma}."
    if search.tokens is not None:
        yield f"The target is slow, so outputs were cut after {counted(search.tokens, 'token')}."
    if disturbed and race.verdict == "open":
        yield f"{disturbed} A quiet machine needs less time."
    elif disturbed:
        yield (
            f"{disturbed} Candidates were measured in turn and corrected for disturbances of single"
            " generations, so the choice stands; the figures are those of a busy machine."
        )
    if race.leader != race.plain and len(race.measured) > 1:
        count = len(race.measured)
        yield f"The speedup is that of the best of {count} on these prompts: expect a little less on others."


def fixed_gamma(search: Search, choice: str) -> int | None:
    """Return the best fixed γ with the drafter of a choice with another policy, by measurements before predictions."""
    race, chosen = search.race, search.rows[choice]
    if chosen.kind != "speculative" or chosen.gamma is not None:
        return None
    same = [
        each for each in search.rows.values() if each.drafter == chosen.drafter and each.gamma is not None
    ]
    able = {*race.measured}
    measured = [each for each in same if each.id in able]
    if measured:
        return max(measured, key=lambda each: race.ratio(each.id, race.plain).value).gamma
    same = [each for each in same if each.id in search.predicted]
    return max(same, key=lambda each: search.predicted[each.id]).gamma if same else None


def _raced(search: Search) -> Iterator[str]:
    """Yield a sentence on what else was raced, and how sure it is that none of it is faster."""
    race, best = search.race, search.race.best
    if best is None:
        return
    others = [
        f"{_described(search.rows[name])} {stats.ratio_text(race.speedup(name))}"
        for name in race.ranking
        if name in race.measured and name != best
    ]
    against = (
        f"beside plain decoding and {listed(others, _OTHERS)}" if others else "beside plain decoding alone"
    )
    prompts = counted(len(search.sweep.prompts), "prompt")
    sentence = f"Raced on {race.ratio(best, race.plain).prompts} of {prompts} {against}"
    if others and race.decided and best == race.leader:
        sentence += "; with 95% confidence none of these is more than 5% faster"
    yield f"{sentence}."


def _more_time(search: Search) -> str:
    """Return a sentence on the time that it takes to decide the race."""
    if len(search.sweep.prompts) == 1:
        return "One prompt says nothing of others: give more with --prompts."
    needed = search.race.blocks_needed()
    if needed is None:
        return "More time is needed, how much is not known yet: --resume continues."
    minutes = math.ceil(needed * search.block_s / 60)
    if minutes > _LONG:
        return f"More than {_LONG // 60} hours would be needed to decide it: --resume continues."
    return f"About {counted(minutes, 'more minute')} would decide it: --resume --minutes {minutes}."


def _unraced(search: Search) -> Iterator[str]:
    """Yield a sentence on the drafters without a measurement to the end, those first that a race needs."""
    race, missing, found = search.race, _missing(search), dict[str, str]()
    measured = {search.families[name] for name in race.measured}
    failed = [name for name in race.names if name in race.failed]
    names = [*failed, *sorted(search.left_out, key=lambda name: -search.predicted.get(name, 0.0))]
    for name in sorted(names, key=lambda name: search.families[name] not in missing):
        drafter = search.families[name]
        if drafter not in measured and drafter not in found:
            predicted = search.predicted.get(name)
            reason = search.left_out.get(name) or f"failed: {search.errors.get(name, '')}"
            reason = NO_TIME if reason.startswith(NO_TIME) else reason
            of_it = [f"predicted {stats.decimals(predicted)}×"] if predicted is not None else []
            reasons = [*of_it, *([reason] if not reason.startswith("predicted") else [])]
            found[drafter] = f"{one_line(drafter)} ({'; '.join(reasons).rstrip('.: ')})"
    if found:
        yield f"Not compared: {listed([*found.values()], _NAMED)}."


def _described(config: Row) -> str:
    return "plain decoding" if config.id == config.baseline else one_line(config.name)


def _categories(best: Tuned | None) -> dict[str, Estimate]:
    """Return the speedups of the best candidate by category."""
    return {one_line(name): each for name, each in best.categories.items() if each.prompts} if best else {}


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
    for each in tried(search):
        if each["blocks"] is not None:
            speedup = "1" if each["blocks"] else "–"
            if each["speedup"] is not None:
                speedup = stats.ratio_text(each["speedup"], "")
            rows.append([each["label"], str(each["blocks"]), speedup, each["outcome"]])
    return Sheet(list(_HEADINGS), rows, left=frozenset(range(len(_HEADINGS))))


def answer_parts(answer: TuningAnswer, search: Search) -> list[Part]:
    """Return the answer, its categories and the table of what was raced."""
    best = answer.measured.get(search.race.best or "")
    categories = [
        f"{name}: {stats.ratio_text(ratio)}, {counted(ratio.prompts, 'prompt')}"
        for name, ratio in sorted(_categories(best).items(), key=lambda each: -each[1].value)
    ]
    return [
        Paragraph(answer.headline, "bold"),
        *map(Paragraph, answer.details),
        Items(categories, "By category:"),
        _table(search),
        Paragraph(_BOUNDS),
    ]


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
        "categories": {name: _estimate(ratio) for name, ratio in _categories(best).items()},
        "tried": [
            {**each, "blocks": each["blocks"] or 0, **_estimate(each["speedup"])} for each in tried(search)
        ],
    }


def _estimate(ratio: Estimate | None) -> dict[str, float | None]:
    if ratio is None or math.isnan(ratio.value):
        return {"speedup": None, "low": None, "high": None}
    return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}
