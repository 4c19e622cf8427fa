"""Does speculation pay? A run's answer as findings, the same in the terminal, in ``summary.md`` and in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specbench.base.textsafe import one_line
from specbench.findings.catalog import Finding
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.metrics import Figures
from specbench.results.run import PLAIN, TuningAnswer
from specbench.results.summary import Curve, Summary, size_of
from specbench.rows import Row
from specbench.show.document import Code, Paragraph, Part
from specbench.show.tables import identity_text

_CURVES = 5  # other drafters and policies of which the answer says how far they pay
_YES = {"faster": "Yes", "slower": "No"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether speculation pays, at one temperature.

    Attributes:
        headline: The answer in a sentence: yes, no or not known, by how much, and how sure.
        verdict: Verdict on the best configuration; ``None`` if nothing was compared.
        command: The command that decodes like the best configuration; empty without a verdict.
        details: Sentences that qualify the answer.
    """

    headline: str
    verdict: stats.Verdict | None
    command: str = ""
    details: list[str] = field(default_factory=list)


def find_answers(summary: Summary, recipes: Mapping[str, Recipe] | None = None) -> list[Answer]:
    """Return one answer per temperature.

    Args:
        summary: The figures of a run.
        recipes: Recipes with the paths of models, by configuration id; ``None`` for the recipes stored in the run.
    """
    tuning = summary.run.tuning
    stored = {row.id: row.recipe for row in summary.run.configs if row.recipe is not None}
    recipes = {**stored, **(recipes or {})}
    temperatures = list(dict.fromkeys(row.config.condition.temperature for row in summary.rows))
    if tuning is not None and tuning.answer is not None:
        return [_Answers(summary, recipes, summary.rows).of_tuning(tuning.answer)]
    found = []
    for temperature in temperatures:
        rows = [row for row in summary.rows if row.config.condition.temperature == temperature]
        answer = _Answers(summary, recipes, rows).of_sweep()
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
        return Answer(headline, verdict, command, [*details, *self._same_outputs(chosen)])

    def of_sweep(self) -> Answer:
        """Return the answer for single requests: the best over the baseline; or else how far the best pays."""
        conditions = [row.config.condition for row in self.rows]
        if any(condition.context is not None for condition in conditions):
            return self._of_curves("context")
        if any(condition.is_closed for condition in conditions):
            return self._of_curves("batch")
        kind = "server" if self.rows[0].config.kind == "server" else "speculative"
        rivals = [row for row in self.rows if row.config.kind == kind and not row.is_baseline]
        measured = [row for row in rivals if row.measured]
        if not measured:
            return self._answer([Finding("pays.nothing", over=self.summary.run.baseline)], None)
        best = max(measured, key=lambda row: (row.verdict == "faster", row.speedup.value))
        all_slower = all(row.verdict == "slower" for row in rivals)
        verdict: stats.Verdict = (
            "faster" if best.verdict == "faster" else "slower" if all_slower else "cannot tell"
        )
        said = [*self._how_much(best, len(measured)), *self._others(best, rivals)]
        details = [finding.text for finding in self._details(best, len(measured))]
        return self._answer(said, verdict, best, details)

    def _of_curves(self, load: Literal["batch", "context"]) -> Answer:
        """Return the answer for speedups by batch size or context: how far the best configuration pays, then others."""
        temperature, over = self.rows[0].config.condition.temperature, self.summary.run.baseline
        curves = [
            curve
            for curve in self.summary.curves(load)
            if curve[0].config.condition.temperature == temperature
        ]
        if not curves:
            return self._answer([Finding("curve.nothing")], None)
        best, *others = curves
        paying = [row for row in best if row.verdict == "faster"]
        all_slower = all(row.verdict == "slower" for row in best)
        verdict: stats.Verdict = "faster" if paying else "slower" if all_slower else "cannot tell"
        row = paying[-1] if paying else max(best, key=lambda row: row.speedup.value)
        details = [_text(how_far_it_pays(curve, over)) for curve in others[:_CURVES]]
        if len(others) > _CURVES:
            details.append(Finding("curve.more", curves=len(others) - _CURVES).text)
        return self._answer([*how_far_it_pays(best, over)], verdict, row, details)

    def _answer(
        self,
        said: Sequence[Finding],
        verdict: stats.Verdict | None,
        row: Figures | None = None,
        details: Sequence[str] = (),
    ) -> Answer:
        """Return an answer, with the command that decodes as ``row``, or plainly where that is slower."""
        yes = _YES.get(verdict or "", "Not known")
        headline = f"{yes}, {_text(said)} {self.summary.disturbance}".strip()
        if row is None:
            return Answer(headline, verdict)
        is_sure = verdict != "cannot tell" and not row.is_server
        command = self._command(row, drafts=verdict == "faster") if is_sure else ""
        return Answer(headline, verdict, command, [*details, *self._same_outputs(row)])

    def _command(self, row: Figures, *, drafts: bool) -> str:
        return generate_command(self.recipes.get(row.config.id), row.config, drafts=drafts)

    def _same_outputs(self, row: Figures) -> Iterator[str]:
        if not math.isnan(row.identical_share.value):
            dtype = None if row.is_server else self.summary.run.target.dtype
            yield identity_text([row], dtype, self.summary.run.baseline)

    def _how_much(self, best: Figures, measured: int) -> Iterator[Finding]:
        """Yield the speedup of the best, of its categories, and of whole outputs."""
        name = "pays.speedup" if best.verdict == "faster" or measured == 1 else "pays.best"
        over = self.summary.run.baseline
        yield Finding(name, name=best.config.name, speedup=best.speedup, over=over, count=measured)
        cells = [
            cell
            for cell in self.summary.categories
            if cell.config.id == best.config.id and cell.speedup.low is not None
        ]
        if len(cells) > 1 and best.verdict == "faster":
            low, *_, high = sorted(cells, key=lambda cell: cell.speedup.value)
            yield Finding(
                "pays.categories", low=low.speedup, least=low.category, high=high.speedup, most=high.category
            )
        if not math.isnan(best.speedup_total.value):
            yield Finding("pays.total", speedup=best.speedup_total)

    def _others(self, best: Figures, rivals: Sequence[Figures]) -> Iterator[Finding]:
        """Yield what is known of the others, beside the best."""
        others = [row for row in rivals if row is not best]
        ties = [row for row in others if row.measured and self._tied(best, row)]
        missing = [row for row in others if not row.measured or row.prompts.value < best.prompts.value]
        if ties and best.verdict == "faster":
            yield Finding("others.ties", names=[row.config.label for row in ties])
        if missing:
            yield Finding("others.missing", names=[row.config.label for row in missing])
        if others and not ties and not missing and best.verdict == "faster":
            yield Finding("others.slower")

    def _tied(self, best: Figures, other: Figures) -> bool:
        speeds = best.values("tokens_per_second"), other.values("tokens_per_second")
        pairs = speeds[0].merge(speeds[1], on=["prompt", "turn", "repeat"], suffixes=("", "_other"))
        ratios = (pairs["value"] / pairs["value_other"]).to_numpy()
        ratio = stats.geometric_mean(ratios, pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy())
        return stats.verdict(stats.widened(ratio) if best.provisional else ratio) == "cannot tell"

    def _details(self, best: Figures, measured: int) -> Iterator[Finding]:
        """Yield how far the answer holds."""
        basis, prompts = best.speedup.basis, best.prompts.value
        most = max(row.prompts.value for row in self.rows)
        if basis != "prompts":
            yield Finding("holds.repeats" if basis == "repeats" else "holds.little")
        if prompts < most:
            yield Finding("holds.some", prompts=int(prompts), of=int(most))
        if basis == "prompts" and measured > 1:
            yield Finding("holds.chosen", count=measured)


def _text(findings: Iterable[Finding]) -> str:
    return " ".join(finding.text for finding in findings)


def how_far_it_pays(rows: Curve, over: str = PLAIN) -> Iterator[Finding]:
    """Yield up to which batch size or context speculation pays, according to the intervals.

    Args:
        rows: The speedups of a drafter with a draft policy.
        over: Name of the baseline.
    """

    def at(name: str, row: Figures) -> Finding:
        long = row.config.condition.context is not None
        place = f"{size_of(row):,} tokens of context" if long else f"batch {size_of(row)}"
        return Finding(name, name=row.config.name, place=place, speedup=row.speedup, over=over)

    top = max(rows, key=lambda row: row.speedup.value)
    sure = [row for row in rows if row.speedup.basis == "prompts"]
    paying = [row for row in sure if row.verdict == "faster"]
    stop = next((row for row in sure if row.verdict != "faster"), None)
    if all(row.verdict == "slower" for row in rows):
        yield at("curve.slower", top)
    elif not paying:
        yield at("curve.nowhere" if sure else "curve.unknown", top)
    elif len(rows) == 1:
        yield at("curve.only", top)
    elif len(paying) == len(rows):
        yield at("curve.everywhere", rows[-1])
    elif stop is None:
        yield at("curve.up-to", paying[-1])
    else:
        yield at("curve.up-to" if size_of(paying[-1]) < size_of(stop) else "curve.at", paying[-1])
    if stop is not None and (paying or stop.verdict != "slower"):
        yield at("curve.below" if stop.verdict == "slower" else "curve.holds", stop)
    elif paying and top is not paying[-1]:
        yield at("curve.most", top)
    yield from (at("curve.few", row) for row in rows if sure and row not in sure)


def generate_command(recipe: Recipe | None, config: Row, *, drafts: bool = True) -> str:
    """Return the call of ``specbench generate`` that decodes as a configuration did.

    Args:
        recipe: The configuration's recipe; without one the command is empty.
        config: The configuration.
        drafts: Whether to draft like the configuration, or to decode plainly.
    """
    if recipe is None:
        return ""
    recipe = replace(recipe if drafts else recipe.plain, decoding=DecodingOptions())
    words = recipe.arguments()
    if config.condition.batch is None:
        return f'specbench generate {shlex.join(map(one_line, words))} "Your prompt"'
    words += ["--prompts", "PROMPTS.jsonl", "--batch", f"{config.condition.batch}"]
    return f"specbench generate {shlex.join(map(one_line, words))}"


def answer_parts(answer: Answer) -> list[Part]:
    """Return the answer as the parts of a document, without its details."""
    return [Paragraph(answer.headline, "bold"), *([Code(answer.command)] if answer.command else [])]
