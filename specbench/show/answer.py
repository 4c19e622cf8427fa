"""Does speculation pay? A run's answer in sentences, the same in the terminal, in ``summary.md`` and in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specbench.base.textsafe import listed, one_line
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.metrics import Figures
from specbench.results.run import FOREIGN, PLAIN, TuningAnswer
from specbench.results.summary import Curve, Summary, size_of
from specbench.rows import Row
from specbench.show.document import Code, Paragraph, Part
from specbench.show.tables import identity_text

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
    summary: Summary, recipes: Mapping[str, Recipe] | None = None, more: Sequence[str] = ()
) -> list[Answer]:
    """Return one answer per temperature.

    Args:
        summary: The figures of a run.
        recipes: Recipes with the paths of models, by configuration id; ``None`` for the recipes stored in the run.
        more: Additional options of the commands.
    """
    tuning = summary.run.tuning
    stored = {row.id: row.recipe for row in summary.run.configs if row.recipe is not None}
    recipes = {**stored, **(recipes or {})}
    temperatures = list(dict.fromkeys(row.config.condition.temperature for row in summary.rows))
    if tuning is not None and tuning.answer is not None:
        return [_Answers(summary, recipes, more, summary.rows).of_tuning(tuning.answer)]
    found = []
    for temperature in temperatures:
        rows = [row for row in summary.rows if row.config.condition.temperature == temperature]
        answers = _Answers(summary, recipes, more, rows)
        if any(row.config.condition.context is not None for row in rows):
            answer = answers.of_contexts()
        elif any(row.config.condition.is_closed for row in rows):
            answer = answers.of_curves("batch", list(_throughputs(answers.baselines(rows[0].config.kind))))
        else:
            answer = answers.of_single_requests()
        if len(temperatures) > 1:
            when = "Greedy" if temperature == 0 else f"At temperature {temperature:g}"
            answer = replace(answer, headline=f"{when}: {answer.headline}")
        found.append(answer)
    return found


@dataclass(frozen=True)
class _Answers:
    """Finder of the answer for some rows of a run's summary; for the attributes see ``find_answers``."""

    summary: Summary
    recipes: Mapping[str, Recipe]
    more: Sequence[str]
    rows: Sequence[Figures]

    def of_tuning(self, stored: TuningAnswer) -> Answer:
        """Return the stored answer of `specbench tune`, with the command for its choice."""
        chosen = next((row for row in self.rows if row.config.id == stored.choice), None)
        headline, details = one_line(stored.headline), [*map(one_line, stored.details)]
        if chosen is None:
            return Answer(headline, "cannot tell", details=details)
        plain = chosen.config.kind == "plain"
        command = self._command(chosen, drafts=not plain and chosen.verdict != "slower")
        verdict: stats.Verdict = "cannot tell" if stored.provisional else "slower" if plain else "faster"
        same = self._same_outputs(chosen, self.summary.run.target.dtype)
        return Answer(headline, verdict, command=command, details=[*details, *same])

    def of_single_requests(self) -> Answer:
        """Return the answer for prompts decoded one after the other, or for servers: the best over the baseline."""
        over, server = self.summary.run.baseline, self.rows[0].config.kind == "server"
        base = self.baselines("server" if server else "plain")
        kind = "server" if server else "speculative"
        measured = [row for row in self.rows if row.config.kind == kind and row.measured]
        references = [
            f"{one_line(row.config.label)} {stats.ratio_text(row.speedup)}"
            for row in self.rows
            if row.config.kind in FOREIGN and row.measured
        ]
        details = [f"For comparison, over the same plain decoding: {', '.join(references)}."] * bool(
            references
        )
        if not measured:
            speeds = ", ".join(map(_speed, base))
            why = f"Nothing can be compared with {over}" + (f", which runs at {speeds}." if base else ".")
            return Answer(why, None, details=details)
        best = max(measured, key=lambda row: (row.verdict == "faster", row.speedup.value))
        top = max(measured, key=lambda row: row.speedup.value)
        said = (
            f"Nothing is faster than {over} here.",
            f"It is not certain that anything is faster than {over} here.",
        )
        if not server:
            said = "Speculation does not pay here.", "It is not certain that speculation pays here."
        details = [*self._details(best, top, measured, base), *details]
        command = "" if server else self._command_for(best)
        return Answer(
            self._headline(best, *said), best.verdict, self._rivals(best, measured), command, details
        )

    def _headline(self, best: Figures, slower: str, unsure: str) -> str:
        """Return the speedup of the best configuration; ``slower`` and ``unsure`` stand before one that is no gain."""
        if best.verdict == "faster":
            headline = self._speedups(best, by_category=True)
        else:
            rivals = [row for row in self.rows if row.config.kind == best.config.kind and not row.is_baseline]
            why = slower if all(row.verdict == "slower" for row in rivals) else unsure
            headline = f"{why} The best measured is {self._speedups(best)}"
        return f"{headline} {self.summary.disturbance}".strip()

    def of_contexts(self) -> Answer:
        """Return the answer for lengths of context: the longest at which the best configuration pays."""
        costs, details = self.summary.run.costs, []
        if costs is not None and costs.error is not None and 1 in costs.context_s and costs.target_s.get(1):
            details.append(
                f"Each 1,000 tokens of context add {1e6 * costs.context_s[1]:.1f} ms to a pass of the target with one"
                f" token ({costs.context_s[1] / costs.target_s[1]:.1%} of it); times by rows and context fit within"
                f" {costs.error:.1%}."
            )
        return self.of_curves("context", details)

    def _curves(self, over: Literal["batch", "context"]) -> list[Curve]:
        temperature = self.rows[0].config.condition.temperature
        curves = self.summary.curves(over)
        return [each for each in curves if each[0].config.condition.temperature == temperature]

    def of_curves(self, load: Literal["batch", "context"], details: Sequence[str]) -> Answer:
        """Return the answer for speedups by batch size or context: how far the best configuration pays, then others."""
        curves, over = self._curves(load), self.summary.run.baseline
        if not curves:
            return Answer(
                "No generation with drafts, or of another server, has finished in a closed loop of as many clients as"
                " the batch, or with a given length of context.",
                None,
                details=[*details],
            )
        headline, *others = [
            f"{one_line(each[0].config.name)}: {how_far_it_pays(each, over)}" for each in curves[: 1 + _TIES]
        ]
        headline = f"{headline} {self.summary.disturbance}".strip()
        if len(curves) > 1 + _TIES:
            others.append(f"{len(curves) - 1 - _TIES} more drafters and policies are in the table.")
        rows = curves[0]
        paying = [row for row in rows if row.verdict == "faster"]
        verdict: stats.Verdict = "faster" if paying else "cannot tell"
        if all(row.verdict == "slower" for row in rows):
            verdict = "slower"
        row = paying[-1] if paying else max(rows, key=lambda row: row.speedup.value)
        server = row.config.kind == "server"
        command = "" if server or verdict == "cannot tell" else self._command_for(row)
        same = self._same_outputs(row, None if server else self.summary.run.target.dtype)
        return Answer(headline, verdict, command=command, details=[*others, *details, *same])

    def baselines(self, kind: str) -> list[Figures]:
        return [row for row in self.rows if row.config.kind == kind and row.is_baseline and row.generations]

    def _command(self, row: Figures, *, drafts: bool) -> str:
        return generate_command(self.recipes.get(row.config.id), row.config, self.more, drafts=drafts)

    def _command_for(self, row: Figures) -> str:
        """Return the command that decodes like a configuration,
        or plainly if drafting is slower; empty without a verdict.
        """
        if row.verdict is None or row.verdict == "cannot tell":
            return ""
        return self._command(row, drafts=row.verdict != "slower")

    def _same_outputs(self, row: Figures, dtype: str | None) -> Iterator[str]:
        if not math.isnan(row.identical_share.value):
            yield identity_text([row], dtype, self.summary.run.baseline)

    def _speedups(self, row: Figures, *, by_category: bool = False) -> str:
        """Return a sentence with the speedup after the first token,
        if wanted by category, and with that of whole outputs.
        """
        name, over = one_line(row.config.name), self.summary.run.baseline
        text = f"{name}: {stats.ratio_text(row.speedup)} over {over}"
        cells = [
            cell
            for cell in self.summary.categories
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

    def _rivals(self, best: Figures, measured: Sequence[Figures]) -> str:
        others = [
            row
            for row in self.rows
            if row is not best and not row.is_baseline and row.config.kind == best.config.kind
        ]
        if best.verdict != "faster" or not others:
            return ""
        ties = [one_line(row.config.label) for row in measured if row is not best and self._tied(best, row)]
        missing = [
            one_line(row.config.label)
            for row in others
            if not row.measured or row.prompts.value < best.prompts.value
        ]
        said = [f"Perhaps equally fast: {listed(ties, _TIES)}."] if ties else []
        if missing:
            said.append(f"Not measured on all of its prompts: {listed(missing, _TIES)}.")
        return " ".join(said) or "All other configurations are slower than it."

    def _tied(self, best: Figures, other: Figures) -> bool:
        speeds = best.values("tokens_per_second"), other.values("tokens_per_second")
        pairs = speeds[0].merge(speeds[1], on=["prompt", "turn", "repeat"], suffixes=("", "_other"))
        ratios = (pairs["value"] / pairs["value_other"]).to_numpy()
        ratio = stats.geometric_mean(ratios, pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy())
        return stats.verdict(stats.widened(ratio) if best.provisional else ratio) == "cannot tell"

    def _details(
        self, best: Figures, top: Figures, measured: Sequence[Figures], base: Sequence[Figures]
    ) -> Iterator[str]:
        basis = best.speedup.basis
        if basis == "repeats":
            yield "Only one prompt was measured: the interval is over its repeats and says nothing about others."
        elif basis != "prompts":
            yield "Too few prompts or repeats for an interval: another run could give a very different result."
        prompts, most = best.prompts.value, max(row.prompts.value for row in self.rows)
        if prompts < most:
            yield f"It was measured on {prompts:.0f} of {most:.0f} prompts."
        if base:
            yield f"It decodes at {_speed(best)}, {self.summary.run.baseline} at {_speed(base[0])}."
        if not math.isnan(best.acceptance_rate.value):
            tokens, rate = best.tokens_per_step.value, best.acceptance_rate.value
            yield f"A step emits {tokens:.2f} tokens on average; {rate:.0%} of the drafted tokens are accepted."
        yield from _experts(best)
        yield from self._same_outputs(best, None if best.is_server else self.summary.run.target.dtype)
        fixed = [row for row in measured if _series(row) == _series(best)]
        if best.config.gamma is not None and len(fixed) > 1:
            longest, before = sorted(fixed, key=lambda row: -(row.config.gamma or 0))[:2]
            if longest is best and longest.speedup.value > before.speedup.value:
                yield f"γ={best.config.gamma} is the longest draft measured, and the fastest: measure longer ones too."
        if top is not best:
            name, ratio = one_line(top.config.name), stats.ratio_text(top.speedup)
            yield f"{name} measured {ratio}, but is not certain to be faster than {self.summary.run.baseline}."
        if basis == "prompts" and len(measured) > 1:
            yield f"The best of {len(measured)} on these prompts is slightly flattered: expect a little less on others."


def _experts(row: Figures) -> Iterator[str]:
    """Yield a sentence on what passes over the commonest numbers of tokens read; nothing without experts."""
    steps = row.steps[row.steps["experts"].notna() & (row.steps["nodes"] > 0)]
    read = steps[["experts", "experts_one"]].astype(float).groupby(steps["nodes"] + 1)
    often = sorted(read.size().nlargest(_FEW, keep="first").index)
    times = (read["experts"].sum() / read["experts_one"].sum()).reindex(often).dropna()
    parts = [f"over {count} tokens {ratio:.1f} times" for count, ratio in times.items()]
    if parts:
        first = parts[0].replace("tokens", "tokens reads")
        yield f"A target pass {', '.join([f'{first} the experts of one', *parts[1:]])}."


def how_far_it_pays(rows: Curve, over: str = PLAIN) -> str:
    """Return a sentence on the batch size or context up to which speculation pays, according to the intervals.

    Args:
        rows: The speedups of a drafter with a draft policy.
        over: Name of the baseline.
    """

    def place(row: Figures) -> str:
        long = row.config.condition.context is not None
        return f"{size_of(row):,} tokens of context" if long else f"batch {size_of(row)}"

    def at(row: Figures) -> str:
        return f"{place(row)}, {stats.ratio_text(row.speedup)} over {over}"

    most = f"it measured most at {at(max(rows, key=lambda row: row.speedup.value))}"
    sure = [row for row in rows if row.speedup.basis == "prompts"]
    if not sure:
        return f"too few groups of prompts for intervals; {most}, and at the last {at(rows[-1])}."
    rest = ", ".join(place(row) for row in rows if row not in sure)
    rest = f" Too few groups of prompts for an interval at {rest}." if rest else ""
    paying = [row for row in sure if row.verdict == "faster"]
    stop = next((row for row in sure if row.verdict != "faster"), None)
    if stop is None:
        only = f"pays at {at(sure[0])}, the only one measured"
        return f"{only if len(sure) == 1 else f'pays everywhere up to {at(sure[-1])}; {most}'}.{rest}"
    reaches = f"at {place(stop)} the interval {'lies' if stop.verdict == 'slower' else 'reaches'} below 1"
    reaches += f", {stats.ratio_text(stop.speedup)}"
    if not paying:
        return f"is not certain to pay anywhere: {reaches}; {most}.{rest}"
    if size_of(paying[-1]) < size_of(stop):
        return f"pays up to {at(paying[-1])}; {reaches}.{rest}"
    return f"pays at {at(paying[-1])}, yet {reaches}.{rest}"


def _throughputs(plain: Sequence[Figures]) -> Iterator[str]:
    closed = sorted((row for row in plain if row.config.condition.is_closed), key=size_of)
    if len(closed) > 1:
        what = one_line(plain[0].config.name) if plain[0].config.kind == "server" else "Plain decoding"
        low, high = closed[0], closed[-1]
        gain = high.tokens_per_second.value / low.tokens_per_second.value
        yield (
            f"{what} gives {_speed(low)} at batch {low.config.condition.batch} and {_speed(high)} at batch"
            f" {high.config.condition.batch}, {stats.decimals(gain)} times as much."
        )


def _series(row: Figures) -> tuple[str, str, float]:
    return row.config.drafter, row.config.draft_policy, row.config.condition.temperature


def _speed(row: Figures) -> str:
    speed = row.tokens_per_second
    text = f"{stats.decimals(speed.value)} tokens/s"
    if speed.low is None or speed.high is None:
        return text
    return f"{text} [{stats.decimals(speed.low)}, {stats.decimals(speed.high)}]"


def generate_command(
    recipe: Recipe | None, config: Row, more: Sequence[str] = (), *, drafts: bool = True
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
    if config.condition.batch is None:
        return f'specbench generate {shlex.join(map(one_line, words))} "Your prompt"'
    words += ["--prompts", "PROMPTS.jsonl", "--batch", f"{config.condition.batch}"]
    return f"specbench generate {shlex.join(map(one_line, words))}"


def answer_parts(answer: Answer) -> list[Part]:
    """Return the answer as the parts of a document, without its details."""
    parts: list[Part] = [Paragraph(answer.headline, "bold")]
    if answer.rivals:
        parts.append(Paragraph(answer.rivals))
    if answer.command:
        parts.append(Code(answer.command))
    return parts
