"""What to race of specbench's own configurations: predicted from a few plain outputs and the times of single passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, cast

from specbench.base.errors import RunError
from specbench.bench.grid import Cell
from specbench.bench.passes import pass_costs
from specbench.results.lines import Generation
from specbench.tune.candidates import BLOCKS, best_of_each, select, with_policies
from specbench.tune.race import Block
from specbench.tune.search import Search, plain_failed, race_end

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.session import Session
    from specbench.decoding.theory import PassCosts
    from specbench.recipe import Recipe
    from specbench.results.run import Tuning
    from specbench.specs.drafters import DrafterSpec

_COST_ROUNDS = 3
"""Rounds of timing single passes, if these are short."""

_TIMING, _ANSWERING = 0.05, 0.2
"""Shares of the time: no further timing round after the first, and no further plain output after the second."""

ANSWERS = 8
"""Plain outputs that predictions rest on, at most."""

_WARMUP_TOKENS = 8

_OUTPUTS = 16
"""Plain outputs in whose time a search is done that may take more time than it was given."""

_RACE_OUTPUTS, _SLOW_S, _FEWEST_TOKENS = 20, 180.0, 16
"""Plain outputs in whose time a small race is done; seconds that it may take at least without a limit; and tokens that
outputs have at least, however slow the target is."""

_SPARE = 1.25
"""Time for what has to be raced, as a multiple of what is predicted, if there is no limit."""

_MORE_TIME = 4
"""Time to advise where it was too short, as a multiple of what was spent."""


def search_models(
    session: Session,
    base: Recipe,
    given: Sequence[DrafterSpec],
    began: float,
    seconds: float,
    *,
    longer: bool,
    progress: Progress,
) -> Search:
    """Return the search among configurations of loaded models; for ``longer`` see ``choose``."""
    from specbench.models.default import default_drafter
    from specbench.tune.loading import asked_for

    engine, rows = cast("ModelEngine", session.engine), session.sweep.configs
    return Search(
        session,
        partial(choose, longer=longer),
        {row.id: row.drafter for row in rows[1:]},
        seconds=seconds,
        until=race_end(began, seconds),
        asked=asked_for(rows, engine, given, default_drafter(base)),
        progress=progress,
    )


def choose(search: Search, *, longer: bool = False) -> Tuning:
    """Decode some prompts plainly, predict all configurations from that, and choose what to race.

    Args:
        search: The search.
        longer: Whether it may take more time where plain decoding is slow.

    Raises:
        RunError: Plain decoding fails, passes cannot be timed, or the time is up.
    """
    from specbench.predict.here import predict_rows

    engine, sweep = cast("ModelEngine", search.engine), search.sweep
    costs = _measure_costs(search)
    search.tokens = _affordable(search, costs.target_s.get(1, 0.0), longer=longer)
    plain = _decode_plainly(search, longer=longer)
    outputs = {name: each.token_ids for name, each in plain.items()}
    found, failed = predict_rows(engine, sweep, sweep.configs[0], outputs, costs, search.report)
    predicted = with_policies(sweep.configs, {name: each.speedup.value for name, each in found.items()})
    plain_s = fmean(each.decode_s for each in plain.values())
    first_s = fmean(each.ttft_s for each in plain.values())
    needed = best_of_each(search.needs(predicted), predicted)
    rest_s = max(0, BLOCKS - len(plain)) * (first_s + plain_s)

    def race_s(name: str) -> float:
        return BLOCKS * (first_s + plain_s / max(predicted[name], 0.1))

    if longer:
        most_s = _SPARE * (rest_s + sum(map(race_s, needed)))
        search.until = max(search.until, search.clock() + most_s)
    if search.left_s < 0:
        spent = max(search.seconds, search.seconds - search.left_s)
        raise RunError(
            "The time was too short to compare anything.",
            "Results so far are kept; continue with --resume --minutes"
            f" {math.ceil(_MORE_TIME * spent / 60)}.",
        )
    return select(
        predicted,
        race_s,
        search.left_s - rest_s,
        search.families,
        failed,
        lengths={row.id for row in sweep.configs if row.gamma is not None},
        needed=needed,
    )


def _affordable(search: Search, pass_s: float, *, longer: bool) -> int | None:
    """Return how many tokens an output may have so that there is time for a race; ``None`` for all."""
    decoding = search.sweep.options.decoding
    seconds = max(search.left_s, _SLOW_S if longer else 0.0)
    tokens = max(_FEWEST_TOKENS, decoding.min_new_tokens, int(seconds / _RACE_OUTPUTS / max(pass_s, 1e-9)))
    return tokens if tokens < decoding.max_new_tokens else None


def _decode_plainly(search: Search, *, longer: bool) -> dict[str, Generation]:
    """Decode the first prompts plainly, which is their share of the race too; return the outputs by prompt."""
    prompts, began = search.sweep.prompts[:ANSWERS], search.clock()
    first, error = prompts[0].id, ""
    warmup = Cell(search.plain, first, 0, 0, 0, warmup=True, seed=search.seed(first, "warm-up"))
    search.measured(warmup, _WARMUP_TOKENS)
    found: dict[str, Generation] = {}
    for done, prompt in enumerate(prompts):
        if found and search.clock() - began > _ANSWERING * search.seconds:
            break
        search.report("decoding plainly", done, ANSWERS)
        measured = search.measured(search.cell(search.plain, Block(prompt.id)), search.tokens)
        if not isinstance(measured.result, Generation):
            error = str(measured.line.error)
            continue
        found[prompt.id] = measured.result
        if longer and done == 0:
            spent = search.seconds - search.left_s
            more = max(0.0, spent + _OUTPUTS * measured.result.total_s - search.seconds)
            search.seconds, search.until = search.seconds + more, search.until + more
    if not found:
        raise plain_failed(error)
    return found


def _measure_costs(search: Search) -> PassCosts:
    """Return the times of single passes: those that are stored, or new ones."""
    if not search.store.costs():
        began = search.clock()
        for done in range(_COST_ROUNDS):
            if done and search.clock() - began > _TIMING * search.seconds:
                break
            search.report("timing passes", done, _COST_ROUNDS)
            search.session.measure_costs()
            if search.session.problem:
                raise RunError(f"Single passes could not be timed: {search.session.problem}")
    return pass_costs(search.store.costs())
