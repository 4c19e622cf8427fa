"""Does speculation pay? A run's answer in sentences, the same in the terminal, in ``summary.md`` and in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.compare import side_by_side
from specbench.results.contexts import ContextCurve, context_curves, context_of
from specbench.results.experts import experts_by_rows, experts_sentence
from specbench.results.requests import (
    BatchCurve,
    RequestRow,
    batch_curves,
    batch_of,
    is_closed,
    request_rows,
)
from specbench.results.results import Results
from specbench.results.run import FOREIGN, PLAIN, RunConfig, stored_recipes
from specbench.results.summary import Categories, Summary, SummaryRow
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
        verdict: Verdict on the best configuration; ``None`` if nothing was compared.
        rivals: A sentence on configurations that can be as good as the best; empty if there was no choice.
        command: The command that decodes like the best configuration; empty without a verdict.
        details: Sentences that qualify the answer.
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
    """Return one answer per temperature.

    Args:
        results: A run.
        summary, categories: The run's metrics, in total and by category.
        recipes: Recipes with the paths of models, by configuration id; ``None`` for the recipes stored in the run.
        more: Additional options of the commands.
    """
    recipes = {**stored_recipes(results.run), **(recipes or {})}
    temperatures = list(dict.fromkeys(row.config.temperature for row in summary.rows))
    if results.run.tuning is not None and results.run.tuning.answer is not None:
        return [_Answers(results, summary, categories, recipes, more, summary.rows).of_tuning()]
    found = []
    for temperature in temperatures:
        rows = [row for row in summary.rows if row.config.temperature == temperature]
        answers = _Answers(results, summary, categories, recipes, more, rows)
        if any(row.config.context is not None for row in rows):
            answer = answers.of_contexts()
        elif rows[0].config.kind == "server":
            answer = answers.of_servers()
        elif any(row.config.batch is not None for row in rows):
            answer = answers.of_batches()
        else:
            answer = answers.of_one_request()
        if len(temperatures) > 1:
            when = "Greedy" if temperature == 0 else f"At temperature {temperature:g}"
            answer = replace(answer, headline=f"{when}: {answer.headline}")
        found.append(answer)
    return found


@dataclass(frozen=True)
class _Answers:
    """Finder of the answer for some rows of a run's summary; for the attributes see ``find_answers``."""

    results: Results
    summary: Summary
    categories: Categories
    recipes: Mapping[str, Recipe]
    more: Sequence[str]
    rows: Sequence[SummaryRow]

    def of_tuning(self) -> Answer:
        """Return the stored answer of `specbench tune`, with the command for its choice."""
        tuning = self.results.run.tuning
        assert tuning is not None
        assert tuning.answer is not None
        stored = tuning.answer
        chosen = next((row for row in self.rows if row.config.id == stored.choice), None)
        verdict: stats.Verdict = "cannot tell"
        command, outputs = "", []
        if chosen is not None:
            plain = chosen.config.kind == "plain"
            if not stored.provisional:
                verdict = "slower" if plain else "faster"
            command = self._command(chosen, drafts=not plain and chosen.verdict != "slower")
            if not math.isnan(chosen.identical_share):
                outputs = [identity_text([chosen], self.summary.dtype)]
        details = [*map(one_line, stored.details), *outputs]
        return Answer(one_line(stored.headline), verdict, command=command, details=details)

    def of_one_request(self) -> Answer:
        """Return the answer for prompts decoded one after the other."""
        plain = self._baselines("plain")
        measured = [row for row in self.rows if row.config.kind == "speculative" and row.measured]
        references = [
            f"{one_line(row.config.label)} {stats.ratio_text(row.speedup)}"
            for row in self.rows
            if row.config.kind in FOREIGN and row.measured
        ]
        details = [f"For comparison, over the same plain decoding: {', '.join(references)}."][
            : len(references)
        ]
        if not measured:
            speed = (
                f"plain decoding runs at {_speed(plain[0])}" if plain else "no plain generation has finished"
            )
            return Answer(f"No speculative generation has finished; {speed}.", None, details=details)
        top = max(measured, key=lambda row: row.speedup.value)
        best = next((row for row in measured if row.config.id in self.summary.winners), top)
        if best.config.id in self.summary.winners:
            headline = self._speedups(best, by_category=True)
        elif all(row.verdict == "slower" for row in measured):
            headline = f"Speculation does not pay here. The best measured is {self._speedups(best)}"
        else:
            headline = (
                f"It is not certain that speculation pays here. The best measured is {self._speedups(best)}"
            )
        rivals = self._rivals(best, measured)
        details = [*self._details(best, top, measured, plain), *details]
        return Answer(self._provisionally(headline), best.verdict, rivals, self._command_for(best), details)

    def of_servers(self) -> Answer:
        """Return the answer for servers: which one is faster than the first, or up to which batch size it is."""
        over = self.summary.over
        base = self._baselines("server")
        measured = [row for row in self.rows if row.measured]
        if not measured:
            speeds = [
                _speed(row) + ("" if row.config.batch is None else f" at batch {row.config.batch}")
                for row in base
            ]
            headline = (
                f"{over} runs at {', '.join(speeds)}." if base else f"No generation of {over} has finished."
            )
            return Answer(headline, None)
        curves, details = self._curves(), [*_throughputs(base)]
        if curves:
            first, *others = [
                f"{_described(each.rows[0])}: {where_it_stops(each, self.summary.disturbance, over)}"
                for each in curves
            ]
            best = curves[0].rows[0] if curves[0].pays is None else curves[0].at(curves[0].pays)
            return Answer(first, best.verdict, details=[*others, *details, *self._same_outputs(best, None)])
        best = max(measured, key=lambda row: (row.verdict == "faster", row.speedup.value))
        if best.verdict == "faster":
            headline = self._speedups(best, by_category=True)
        elif all(row.verdict == "slower" for row in measured):
            headline = f"Nothing is faster than {over} here. The best measured is {self._speedups(best)}"
        else:
            headline = f"It is not certain that anything is faster than {over} here. {self._speedups(best)}"
        if base:
            details.append(f"{_described(best)} decodes at {_speed(best)}, {over} at {_speed(base[0])}.")
        details += self._same_outputs(best, None)
        rivals = self._rivals(best, measured)
        return Answer(self._provisionally(headline), best.verdict, rivals, details=details)

    def of_batches(self) -> Answer:
        """Return the answer for batches: the largest batch size at which the best configuration pays."""
        curves = self._curves()
        details = [*_throughputs(self._baselines("plain")), *self._latencies()]
        if not curves:
            headline = (
                "No speculative generation has finished in a closed loop of as many clients as the batch."
            )
            return Answer(headline, None, details=details)
        best = curves[0]
        verdict: stats.Verdict = "cannot tell"
        if best.pays is not None:
            verdict = "faster"
        elif all(row.verdict == "slower" for row in best.rows):
            verdict = "slower"
        row = best.rows[0] if best.pays is None else best.at(best.pays)
        headline, *others = [
            f"{_described(curve.rows[0])}: {where_it_stops(curve, self.summary.disturbance)}"
            for curve in curves[: 1 + _TIES]
        ]
        if len(curves) > 1 + _TIES:
            others.append(f"{len(curves) - 1 - _TIES} more drafters and policies are in the table.")
        details += self._same_outputs(row, self.summary.dtype)
        command = "" if verdict == "cannot tell" else self._command_for(row)
        return Answer(headline, verdict, command=command, details=[*others, *details])

    def of_contexts(self) -> Answer:
        """Return the answer for lengths of context: the longest at which the best configuration pays."""
        curves = [
            curve
            for curve in context_curves(self.summary)
            if curve.rows[0].config.temperature == self.rows[0].config.temperature
        ]
        if not curves:
            return Answer("No generation with drafts, or of another server, has finished.", None)
        best = curves[0]
        row = best.pays or best.most
        verdict: stats.Verdict = "cannot tell"
        if best.pays is not None:
            verdict = "faster"
        elif all(each.verdict == "slower" for each in best.rows):
            verdict = "slower"
        over = self.summary.over
        headline, *details = [
            f"{_described(curve.rows[0])}: {how_far_it_pays(curve, over)}" for curve in curves[: 1 + _TIES]
        ]
        if len(curves) > 1 + _TIES:
            details.append(f"{len(curves) - 1 - _TIES} more drafters and policies are in the table.")
        costs = self.results.run.costs
        if costs is not None and costs.error is not None and 1 in costs.context_s and costs.target_s.get(1):
            details.append(
                f"Each 1,000 tokens of context add {1e6 * costs.context_s[1]:.1f} ms to a pass of the target with one"
                f" token ({costs.context_s[1] / costs.target_s[1]:.1%} of it); times by rows and context fit within"
                f" {costs.error:.1%}."
            )
        details += self._same_outputs(row, self.summary.dtype)
        server = row.config.kind == "server"
        command = "" if server or verdict == "cannot tell" else self._command_for(row)
        return Answer(self._provisionally(headline), verdict, command=command, details=details)

    def _baselines(self, kind: str) -> list[SummaryRow]:
        return [row for row in self.rows if row.config.kind == kind and row.is_baseline and row.generations]

    def _curves(self) -> list[BatchCurve]:
        temperature = self.rows[0].config.temperature
        curves = batch_curves(self.summary)
        return [curve for curve in curves if curve.rows[0].config.temperature == temperature]

    def _command(self, row: SummaryRow, *, drafts: bool) -> str:
        return generate_command(self.recipes.get(row.config.id), row.config, self.more, drafts=drafts)

    def _command_for(self, row: SummaryRow) -> str:
        """Return the command that decodes like a configuration,
        or plainly if drafting is slower; empty without a verdict.
        """
        if row.verdict is None or row.verdict == "cannot tell":
            return ""
        return self._command(row, drafts=row.verdict != "slower")

    def _provisionally(self, headline: str) -> str:
        return f"{self.summary.disturbance} {headline}".strip()

    def _same_outputs(self, row: SummaryRow, dtype: str | None) -> Iterator[str]:
        if not math.isnan(row.identical_share):
            yield identity_text([row], dtype, self.summary.over)

    def _speedups(self, row: SummaryRow, *, by_category: bool = False) -> str:
        """Return a sentence with the speedup after the first token,
        if wanted by category, and with that of whole outputs.
        """
        text = f"{_described(row)}: {stats.ratio_text(row.speedup)} over {self.summary.over}"
        cells = [
            cell
            for cell in self.categories.rows
            if by_category and cell.config.id == row.config.id and cell.speedup.low is not None
        ]
        cells.sort(key=lambda cell: cell.speedup.value)
        if len(cells) > 1:
            ends = [f"{one_line(cell.category)} {stats.ratio_text(cell.speedup)}" for cell in cells]
            few = len(cells) <= _FEW
            text += f" ({', '.join(ends)})" if few else f" (from {ends[0]} to {ends[-1]})"
        if not math.isnan(row.speedup_total.value):
            text += f", {stats.ratio_text(row.speedup_total)} including the time to the first token"
        return f"{text}."

    def _rivals(self, best: SummaryRow, measured: Sequence[SummaryRow]) -> str:
        if best.verdict != "faster" or len(measured) < 2:
            return ""
        ties = [one_line(row.config.label) for row in measured if row is not best and self._tied(best, row)]
        if not ties:
            return "All other configurations are slower than it."
        more = f" and {len(ties) - _TIES} more" if len(ties) > _TIES else ""
        return f"Perhaps equally fast: {', '.join(ties[:_TIES])}{more}."

    def _tied(self, best: SummaryRow, other: SummaryRow) -> bool:
        pairs = side_by_side(self.results, best.config.id, other.config.id)
        ratio = stats.geometric_mean(
            (pairs["a"] / pairs["b"]).to_numpy(), pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
        )
        return stats.verdict(ratio, disturbed=best.provisional) == "cannot tell"

    def _details(
        self,
        best: SummaryRow,
        top: SummaryRow,
        measured: Sequence[SummaryRow],
        plain: Sequence[SummaryRow],
    ) -> Iterator[str]:
        basis = best.speedup.basis
        if basis == "repeats":
            yield "Only one prompt was measured: the interval is over its repeats and says nothing about others."
        elif basis != "prompts":
            yield "Too few prompts or repeats for an interval: another run could give a very different result."
        if plain:
            yield f"It decodes at {_speed(best)}, plain decoding at {_speed(plain[0])}."
        if not math.isnan(best.acceptance_rate.value):
            tokens, rate = best.tokens_per_step.value, best.acceptance_rate.value
            yield f"A step emits {tokens:.2f} tokens on average; {rate:.0%} of the drafted tokens are accepted."
        done = self.results.done
        read = experts_by_rows(done[done["config"] == best.config.id])
        if experts := experts_sentence(read, self.results.run.costs):
            yield experts
        yield from self._same_outputs(best, self.summary.dtype)
        if top is not best:
            ratio = stats.ratio_text(top.speedup)
            yield f"{_described(top)} measured {ratio}, but is not certain to be faster than plain decoding."
        if basis == "prompts" and len(measured) > 1:
            yield f"The best of {len(measured)} on these prompts is slightly flattered: expect a little less on others."

    def _latencies(self) -> Iterator[str]:
        """Return a sentence on the latencies of requests that arrived at random times,
        or from more clients than the batch size.
        """
        temperature = self.rows[0].config.temperature
        rows = [row for row in request_rows(self.results) if row.config.temperature == temperature]
        for plain in rows:
            if plain.config.kind != "plain" or is_closed(plain.config):
                continue
            mine = [
                row
                for row in rows
                if row.config.baseline == plain.config.id and row is not plain
                if not math.isnan(row.latency_s["p50"])
            ]
            if not mine:
                continue
            best = min(mine, key=lambda row: row.latency_s["p50"])
            seconds = [
                f"{stats.decimals(row.latency_s[p])} s" for p in ("p50", "p95") for row in (best, plain)
            ]
            yield (
                f"{one_line(plain.config.arrivals or '')} at batch {plain.config.batch}: an answer takes {seconds[0]}"
                f" with {_described(best)} and {seconds[1]} with plain decoding (medians; 95th percentiles"
                f" {seconds[2]} and {seconds[3]})."
            )


def where_it_stops(curve: BatchCurve, disturbance: str = "", over: str = PLAIN) -> str:
    """Return a sentence on the batch size at which speculation stops paying, according to the intervals.

    Args:
        curve: The speedups of a drafter with a draft policy, by batch size.
        disturbance: Why verdicts are provisional; empty if they are not.
        over: Name of the baseline.
    """

    def at(batch: int) -> str:
        return f"{stats.ratio_text(curve.at(batch).speedup)} over {over} at the same batch"

    first, last = curve.batches[0], curve.batches[-1]
    pays, stops = curve.pays, curve.stops
    if disturbance:
        if pays is None:
            return f"{disturbance} At batch {last} it measured {at(last)}."
        return f"{disturbance} The largest batch at which it pays is {pays}, {at(pays)}."
    certain = [row for row in curve.rows if row.speedup.basis == "prompts"]
    rest = ", ".join(str(batch_of(row)) for row in curve.rows if row not in certain)
    if not certain:
        return (
            "too few groups of prompts for intervals, so it is not certain where it stops paying; at batch"
            f" {last} it measured {at(last)}."
        )
    if rest:
        known = where_it_stops(BatchCurve(certain), over=over)
        return f"{known} Too few groups of prompts for an interval at batch {rest}."
    if stops is None:
        every = f"pays at all batches from {first} to {last}, at the last {at(last)}"
        only = f"pays at batch {first}, the only one measured, {at(first)}"
        return f"{only if first == last else every}; where it stops was not seen."
    reaches = "lies below 1" if curve.at(stops).verdict == "slower" else "reaches below 1"
    seen = f"at batch {stops} the interval {reaches}, {at(stops)}"
    if pays is None and first == last:
        return f"is not certain to pay at batch {first}, the only one measured: the interval {reaches}, {at(first)}."
    if pays is None:
        return f"is certain to pay at no batch from {first} to {last}: {seen}."
    if pays < stops:
        return f"pays up to batch {pays}, {at(pays)}; {seen}."
    return f"the largest batch at which it is certain to pay is {pays}, {at(pays)}; yet {seen}."


def how_far_it_pays(curve: ContextCurve, over: str = PLAIN) -> str:
    """Return a sentence on the longest context at which speculation pays, according to the intervals, and the best.

    Args:
        curve: The speedups of a drafter with a draft policy, by length of context.
        over: Name of the baseline.
    """

    def at(row: SummaryRow) -> str:
        return f"{context_of(row):,}, {stats.ratio_text(row.speedup)}"

    pays, most, last = curve.pays, curve.most, curve.rows[-1]
    if not any(row.speedup.basis == "prompts" for row in curve.rows):
        return (
            f"too few prompts for intervals; it measured most over {over} at {context_of(most):,} tokens of context,"
            f" {stats.ratio_text(most.speedup)}, and at the longest, {at(last)}."
        )
    if pays is None:
        return f"is certain to pay at no context; it measured most at {at(most)} over {over}."
    best = f"most at {at(most)} over {over}"
    if pays is last:
        reach = f"pays at {context_of(pays):,} tokens of context, the longest measured"
        if curve.stops is not None:
            reach += f", but is not certain to at {context_of(curve.stops):,}"
    else:
        following = curve.rows[curve.rows.index(pays) + 1]
        reach = f"pays up to {context_of(pays):,} tokens of context, {stats.ratio_text(pays.speedup)}"
        best += f"; at {context_of(following):,} it measured {stats.ratio_text(following.speedup)}"
    return f"{reach}, {best}."


def _throughputs(plain: Sequence[SummaryRow]) -> Iterator[str]:
    closed = sorted((row for row in plain if is_closed(row.config)), key=batch_of)
    if len(closed) > 1:
        what = _described(plain[0]) if plain[0].config.kind == "server" else "Plain decoding"
        low, high = closed[0], closed[-1]
        gain = high.tokens_per_second.value / low.tokens_per_second.value
        yield (
            f"{what} gives {_speed(low)} at batch {low.config.batch} and {_speed(high)} at batch"
            f" {high.config.batch}, {stats.decimals(gain)} times as much."
        )


def _described(row: SummaryRow | RequestRow) -> str:
    config = row.config
    if config.kind == "server":
        return one_line(config.drafter)
    word = ""
    with suppress(UsageError):  # a stored run may be of another version
        word = parse_policy(config.draft_policy).word
    fixed = word == "fixed" and config.gamma is not None
    policy = f"γ = {config.gamma}" if fixed else one_line(config.draft_policy)
    return f"{one_line(config.drafter)} with {policy}"


def _speed(row: SummaryRow) -> str:
    speed = row.tokens_per_second
    text = f"{stats.decimals(speed.value)} tokens/s"
    if speed.low is None or speed.high is None:
        return text
    return f"{text} [{stats.decimals(speed.low)}, {stats.decimals(speed.high)}]"


def generate_command(
    recipe: Recipe | None, config: RunConfig, more: Sequence[str] = (), *, drafts: bool = True
) -> str:
    """Return the call of ``specbench generate`` that decodes as a configuration did.

    Args:
        recipe: The configuration's recipe; without one the command is empty.
        config: The configuration.
        more: Additional options, at the end of the command.
        drafts: Whether to draft like the configuration, or to decode plainly.
    """
    if recipe is None:
        return ""
    recipe = replace(recipe if drafts else recipe.plain, decoding=DecodingOptions())
    words = [*recipe.arguments(), *more]
    if config.batch is None:
        return f'specbench generate {shlex.join(map(one_line, words))} "Your prompt"'
    words += ["--prompts", "PROMPTS.jsonl", "--batch", f"{config.batch}"]
    return f"specbench generate {shlex.join(map(one_line, words))}"


def answer_parts(answer: Answer) -> list[Part]:
    """Return the answer as the parts of a document, without its details."""
    parts: list[Part] = [Paragraph(answer.headline, "bold")]
    if answer.rivals:
        parts.append(Paragraph(answer.rivals))
    if answer.command:
        parts.append(Code(answer.command))
    return parts
