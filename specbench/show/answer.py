"""Does speculation pay? A run's answer in words, the same in the terminal, in ``summary.md`` and in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.compare import side_by_side
from specbench.results.requests import BatchCurve, RequestRow, batch_curves, batch_of, is_closed, request_rows
from specbench.results.results import Results
from specbench.results.run import FOREIGN, PLAIN, RunConfig, TuningAnswer, stored_recipes
from specbench.results.summary import Categories, CategoryRow, Summary, SummaryRow
from specbench.show.document import Code, Paragraph, Part
from specbench.show.tables import identity_text
from specbench.specs.policies import parse_policy

_FEW = 3  # categories that the answer names one by one
_TIES = 5  # configurations as good as the best that the answer names


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether speculation pays, at one temperature.

    Attributes:
        headline: The answer in a sentence.
        verdict: What it comes to, ``None`` where nothing was compared.
        rivals: What the best cannot be told from, in a sentence; empty where nothing was best of several.
        command: What to type to decode so; empty without a verdict.
        details: Sentences that qualify it.
    """

    headline: str
    verdict: stats.Verdict | None
    rivals: str = ""
    command: str = ""
    details: list[str] = field(default_factory=list)


def find_answers(
    results: Results,
    summary: Summary,
    categories: Categories,
    recipes: Mapping[str, Recipe] | None = None,
    more: Sequence[str] = (),
) -> list[Answer]:
    """One answer per temperature.

    Args:
        results: A run.
        summary, categories: Of it.
        recipes: By the ids of their configurations, with paths of models; ``None`` for those that the run has kept.
        more: Options that the commands have besides.
    """
    run = results.run
    known = {**stored_recipes(run), **(recipes or {})}

    def command(row: SummaryRow, *, drafts: bool) -> str:
        return generate_command(known.get(row.config.id), row.config, more, drafts=drafts)

    if run.tuning is not None and run.tuning.answer is not None:
        return [_answer_of_tuning(run.tuning.answer, summary, command)]
    temperatures = list(dict.fromkeys(row.config.temperature for row in summary.rows))
    found = []
    for temperature in temperatures:
        mine = [row for row in summary.rows if row.config.temperature == temperature]
        when = "" if len(temperatures) == 1 else _when(temperature)
        if mine[0].config.kind == "server":
            found.append(_answer_of_servers(results, summary, mine, categories.rows, when))
        elif any(row.config.batch is not None for row in mine):
            found.append(_answer_with_batches(results, summary, mine, command, when))
        else:
            found.append(_answer(results, summary, mine, categories.rows, command, when))
    return found


def _answer_of_tuning(told: TuningAnswer, summary: Summary, command: Command) -> Answer:
    """What `specbench tune` said, with the command for what it chose."""
    chosen = next((row for row in summary.rows if row.config.id == told.choice), None)
    verdict: stats.Verdict = "cannot tell"
    typed, outputs = "", []
    if chosen is not None:
        plain = chosen.config.kind == "plain"
        if not told.provisional:
            verdict = "slower" if plain else "faster"
        typed = command(chosen, drafts=not plain and chosen.verdict != "slower")
        if not math.isnan(chosen.identical_share):
            outputs = [identity_text([chosen], summary.dtype)]
    details = [*map(one_line, told.details), *outputs]
    return Answer(one_line(told.headline), verdict, command=typed, details=details)


def _when(temperature: float) -> str:
    return "Greedy: " if temperature == 0 else f"At temperature {temperature:g}: "


def _answer(
    results: Results,
    summary: Summary,
    rows: list[SummaryRow],
    cells: Sequence[CategoryRow],
    command: Command,
    when: str,
) -> Answer:
    """The answer for rows of one temperature."""
    plain = next((row for row in rows if row.config.kind == "plain" and row.generations), None)
    measured = [row for row in rows if row.config.kind == "speculative" and row.measured]
    others = [row for row in rows if row.config.kind in FOREIGN]
    if not measured:
        speed = (
            "nothing of plain decoding has finished"
            if plain is None
            else f"plain decoding runs at {_speed(plain)}"
        )
        headline = f"{when}No speculative decoding was measured to its end; {speed}."
        return Answer(headline, None, details=[*_references(others)])
    top = max(measured, key=lambda row: row.speedup.value)
    best = next((row for row in measured if row.config.id in summary.winners), top)
    best_is = f"{_described(best)}, {_both_speedups(best, PLAIN)}"
    if best.config.id in summary.winners:
        headline = f"{_described(best)}: {_both_speedups(best, PLAIN, cells)}."
    elif all(row.verdict == "slower" for row in measured):
        headline = f"Speculation does not pay here: the best of what was measured is {best_is}."
    else:
        headline = (
            f"It cannot be told whether speculation pays here. The best of what was measured is {best_is}."
        )
    return Answer(
        when + _provisionally(summary) + headline,
        best.verdict,
        _rivals(results, best, measured),
        _command(command, best),
        [*_details(best, top, measured, plain, summary.dtype), *_references(others)],
    )


def _answer_of_servers(
    results: Results,
    summary: Summary,
    rows: list[SummaryRow],
    cells: Sequence[CategoryRow],
    when: str,
) -> Answer:
    """The answer for servers: which of them is faster than the first one, or up to which batch."""
    over = summary.over
    base = [row for row in rows if row.is_baseline and row.generations]
    measured = [row for row in rows if row.measured]
    if not measured:
        speeds = [f"{_speed(row)}{_at_batch(row)}" for row in base]
        headline = f"{over} runs at {', '.join(speeds)}." if base else f"Nothing of {over} has finished."
        return Answer(when + headline, None)
    lines = [
        line
        for line in batch_curves(summary)
        if line.rows[0].config.temperature == rows[0].config.temperature
    ]
    details = [*_throughputs(base)]
    if lines:
        told = [
            f"{_described(line.rows[0])}: {where_it_stops(line, summary.disturbance, over)}" for line in lines
        ]
        best = lines[0].rows[0] if lines[0].pays is None else lines[0].at(lines[0].pays)
        return Answer(when + told[0], best.verdict, details=[*told[1:], *details, *_same_texts([best], over)])
    best = max(measured, key=lambda row: (row.verdict == "faster", row.speedup.value))
    ratio = f"{_described(best)}: {_both_speedups(best, over)}"
    if best.verdict == "faster":
        headline = f"{_described(best)}: {_both_speedups(best, over, cells)}."
    elif all(row.verdict == "slower" for row in measured):
        headline = f"Nothing is faster than {over} here; {ratio}."
    else:
        headline = f"It cannot be told whether anything is faster than {over} here. {ratio}."
    if base:
        details.append(f"{_described(best)} decodes at {_speed(best)}, {over} at {_speed(base[0])}.")
    return Answer(
        when + _provisionally(summary) + headline,
        best.verdict,
        _rivals(results, best, measured),
        details=[*details, *_same_texts([best], over)],
    )


def _provisionally(summary: Summary) -> str:
    """Why verdicts are provisional, a sentence before others; empty where they are not."""
    return f"{summary.disturbance} " if summary.disturbance else ""


def _at_batch(row: SummaryRow) -> str:
    return "" if row.config.batch is None else f" at batch {row.config.batch}"


def _same_texts(rows: Sequence[SummaryRow], over: str) -> Iterator[str]:
    if not math.isnan(rows[0].identical_share):
        yield identity_text(rows, None, over)


def _answer_with_batches(
    results: Results,
    summary: Summary,
    rows: list[SummaryRow],
    command: Command,
    when: str,
) -> Answer:
    """The answer for requests side by side: up to which batch the best drafter and policy pay."""
    temperature = rows[0].config.temperature
    lines = [line for line in batch_curves(summary) if line.rows[0].config.temperature == temperature]
    plain = [row for row in rows if row.config.kind == "plain" and row.generations]
    details = [*_throughputs(plain), *_latencies(results, temperature)]
    if not lines:
        headline = "No speculative decoding was measured to its end in a closed loop of as many clients as the batch."
        return Answer(when + headline, None, details=details)
    best, *others = lines
    verdict: stats.Verdict = "cannot tell"
    if best.pays is not None:
        verdict = "faster"
    elif all(row.verdict == "slower" for row in best.rows):
        verdict = "slower"
    row = best.rows[0] if best.pays is None else best.at(best.pays)
    told = [
        f"{_described(line.rows[0])}: {where_it_stops(line, summary.disturbance)}"
        for line in (best, *others[:_TIES])
    ]
    if len(others) > _TIES:
        told.append(f"{len(others) - _TIES} more drafters and policies stand in the table.")
    if not math.isnan(row.identical_share):
        details.append(identity_text([row], summary.dtype))
    return Answer(
        when + told[0],
        verdict,
        command="" if verdict == "cannot tell" else _command(command, row),
        details=[*told[1:], *details],
    )


def where_it_stops(line: BatchCurve, disturbance: str = "", over: str = PLAIN) -> str:
    """At which batch speculation stops paying, in a sentence, as far as the intervals tell.

    Args:
        line: A drafter and a policy over batches.
        disturbance: Why verdicts are provisional; empty where they are not.
        over: The baseline, in words.
    """

    def at(batch: int) -> str:
        return f"{stats.ratio_text(line.at(batch).speedup)} over {over} at the same batch"

    first, last = line.batches[0], line.batches[-1]
    if disturbance:
        if line.pays is None:
            return f"{disturbance} At batch {last} it measured {at(last)}."
        return f"{disturbance} The largest batch at which it pays is {line.pays}, {at(line.pays)}."
    told = [row for row in line.rows if row.speedup.basis == "prompts"]
    untold = [batch_of(row) for row in line.rows if row not in told]
    if not told:
        return (
            "too few groups of prompts for intervals, so it cannot be told where it stops paying; at batch"
            f" {last} it measured {at(last)}."
        )
    if untold:
        batches = ", ".join(map(str, untold))
        rest = f"Too few groups of prompts for an interval at batch {batches}."
        return f"{where_it_stops(BatchCurve(told), over=over)} {rest}"
    pays, stops = line.pays, line.stops
    if stops is None:
        every = f"pays at all batches from {first} to {last}, at the last {at(last)}"
        only = f"pays at batch {first}, the only one measured, {at(first)}"
        return f"{only if first == last else every}; where it stops was not seen."
    reaches = "lies below 1" if line.at(stops).verdict == "slower" else "reaches below 1"
    if pays is None and first == last:
        return f"does not surely pay at batch {first}, the only one measured: the interval {reaches}, {at(first)}."
    if pays is None:
        return f"surely pays at no batch from {first} to {last}: at batch {stops} the interval {reaches}, {at(stops)}."
    if pays < stops:
        return f"pays up to batch {pays}, {at(pays)}; at batch {stops} the interval {reaches}, {at(stops)}."
    return (
        f"the largest batch at which it surely pays is {pays}, {at(pays)}; yet at batch {stops} the interval {reaches},"
        f" {at(stops)}."
    )


def _throughputs(plain: Sequence[SummaryRow]) -> Iterator[str]:
    """How much a batch brings by itself."""
    if not plain:
        return
    what = _described(plain[0]) if plain[0].config.kind == "server" else "Plain decoding"
    closed = sorted((row for row in plain if is_closed(row.config)), key=batch_of)
    if len(closed) > 1:
        low, high = closed[0], closed[-1]
        gain = high.tokens_per_second.value / low.tokens_per_second.value
        yield (
            f"{what} gives {_speed(low)} at batch {low.config.batch} and {_speed(high)} at batch"
            f" {high.config.batch}, {stats.decimals(gain)} times as much."
        )


def _latencies(results: Results, temperature: float) -> Iterator[str]:
    """What requests saw that came by the clock, or from more clients than the batch: plainly, and with the best."""
    rows = [row for row in request_rows(results) if row.config.temperature == temperature]
    for plain in rows:
        if plain.config.kind != "plain" or is_closed(plain.config):
            continue
        mine = [row for row in rows if row.config.baseline == plain.config.id and row is not plain]
        mine = [row for row in mine if not math.isnan(row.latency_s["p50"])]
        if not mine:
            continue
        best = min(mine, key=lambda row: row.latency_s["p50"])
        seconds = [f"{stats.decimals(row.latency_s[p])} s" for p in ("p50", "p95") for row in (best, plain)]
        yield (
            f"{one_line(plain.config.arrivals or '')} at batch {plain.config.batch}: an answer takes {seconds[0]} with"
            f" {_described(best)} and {seconds[1]} plainly (medians; 95th percentiles {seconds[2]} and {seconds[3]})."
        )


def _rivals(results: Results, best: SummaryRow, measured: Sequence[SummaryRow]) -> str:
    if best.verdict != "faster" or len(measured) < 2:
        return ""
    ties = [one_line(row.config.label) for row in measured if row is not best and _tied(results, best, row)]
    if not ties:
        return "Everything else that was measured is slower than it."
    more = f" and {len(ties) - _TIES} more" if len(ties) > _TIES else ""
    return f"These cannot be told from it: {', '.join(ties[:_TIES])}{more}."


def _details(
    best: SummaryRow,
    top: SummaryRow,
    measured: Sequence[SummaryRow],
    plain: SummaryRow | None,
    dtype: str | None,
) -> Iterator[str]:
    basis = best.speedup.basis
    if basis == "repeats":
        yield "Only one prompt was measured: the interval is over its repeats and says nothing about other prompts."
    elif basis != "prompts":
        yield "Too few prompts or repeats for an interval: other runs may give something else altogether."
    if plain is not None:
        yield f"It decodes at {_speed(best)}, plain decoding at {_speed(plain)}."
    if not math.isnan(best.acceptance_rate.value):
        yield (
            f"A step emits {best.tokens_per_step.value:.2f} tokens; {best.acceptance_rate.value:.0%} of the drafted"
            " tokens are accepted."
        )
    if not math.isnan(best.identical_share):
        yield identity_text([best], dtype)
    if top is not best:
        ratio = stats.ratio_text(top.speedup)
        yield f"{_described(top)} measures more, {ratio}, but cannot be told from plain decoding."
    if basis == "prompts" and len(measured) > 1:
        yield (
            f"As the best of {len(measured)} on these prompts it is somewhat flattered: expect a little less on others."
        )


def _tied(results: Results, best: SummaryRow, other: SummaryRow) -> bool:
    """Whether two configurations cannot be told apart, side by side."""
    pairs = side_by_side(results, best.config.id, other.config.id)
    ratio = stats.geometric_mean(
        (pairs["a"] / pairs["b"]).to_numpy(), pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
    )
    return stats.verdict(ratio, disturbed=best.provisional) == "cannot tell"


def _references(rows: Sequence[SummaryRow]) -> Iterator[str]:
    shown = [f"{one_line(row.config.label)} {stats.ratio_text(row.speedup)}" for row in rows if row.measured]
    if shown:
        yield f"For comparison, over the same plain decoding: {', '.join(shown)}."


def _both_speedups(row: SummaryRow, over: str, cells: Sequence[CategoryRow] = ()) -> str:
    """The speedup after the first token, by category where ``cells`` has these, and that of the whole time."""
    text = f"{stats.ratio_text(row.speedup)} over {over}{_by_category(row, cells)}"
    if math.isnan(row.speedup_total.value):
        return text
    return f"{text}; with the time to the first token {stats.ratio_text(row.speedup_total)}"


def _by_category(best: SummaryRow, cells: Sequence[CategoryRow]) -> str:
    """Few categories are all named, of many the lowest and the highest; none that has no interval."""
    mine = [cell for cell in cells if cell.config.id == best.config.id and cell.speedup.low is not None]
    if len(mine) < 2:
        return ""
    named = {cell.category: f"{one_line(cell.category)} {stats.ratio_text(cell.speedup)}" for cell in mine}
    if len(mine) <= _FEW:
        return f"; {', '.join(named.values())}"
    ranked = sorted(mine, key=lambda cell: cell.speedup.value)
    return f"; from {named[ranked[0].category]} to {named[ranked[-1].category]}"


def _described(row: SummaryRow | RequestRow) -> str:
    config = row.config
    if config.kind == "server":
        return one_line(config.drafter)
    fixed = _rule_word(config) == "fixed" and config.gamma is not None
    return (
        f"{one_line(config.drafter)} with {f'γ = {config.gamma}' if fixed else one_line(config.draft_policy)}"
    )


def _speed(row: SummaryRow) -> str:
    speed = row.tokens_per_second
    if speed.low is None or speed.high is None:
        return f"{stats.decimals(speed.value)} tokens/s"
    return (
        f"{stats.decimals(speed.value)} tokens/s [{stats.decimals(speed.low)}, {stats.decimals(speed.high)}]"
    )


# --- What to type -----------------------------------------------------------------------------------


Command = Callable[..., str]
"""What to type to decode as a row of the summary, ``drafts`` or plainly."""


def _command(command: Command, row: SummaryRow) -> str:
    """What to type to decode so, plainly where that is slower; empty without a verdict."""
    if row.verdict is None or row.verdict == "cannot tell":
        return ""
    return command(row, drafts=row.verdict != "slower")


def generate_command(
    recipe: Recipe | None, config: RunConfig, more: Sequence[str] = (), *, drafts: bool = True
) -> str:
    """A call of ``specbench generate`` that decodes as a configuration did, or without drafting.

    Args:
        recipe: The configuration's; without one there is no such call.
        config: The configuration.
        more: Other options, at the end.
        drafts: Whether to draft as it did.
    """
    if recipe is None:
        return ""
    recipe = replace(recipe if drafts else recipe.plain, decoding=DecodingOptions())
    words = [*recipe.arguments(), *more]
    if config.batch is not None:
        batch = ["--prompts", "PROMPTS.jsonl", "--batch", f"{config.batch}"]
        return f"specbench generate {shlex.join(map(one_line, [*words, *batch]))}"
    return f'specbench generate {shlex.join(map(one_line, words))} "Your prompt"'


def _rule_word(config: RunConfig) -> str:
    with suppress(UsageError):  # a stored run may be of another version
        return parse_policy(config.draft_policy).word
    return ""


# --- As a document -------------------------------------------------------------------------------------------


def answer_parts(answer: Answer) -> list[Part]:
    """The answer as the parts of a document, without what qualifies it."""
    parts: list[Part] = [Paragraph(answer.headline, "bold")]
    if answer.rivals:
        parts.append(Paragraph(answer.rivals))
    if answer.command:
        parts.append(Code(answer.command))
    return parts
