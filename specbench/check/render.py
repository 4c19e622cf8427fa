"""A check's result as parts of a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, get_args

from specbench.base.textsafe import counted, visible
from specbench.check.bias import LEVEL, POWER
from specbench.check.greedy import Against, Piece, verdict_of
from specbench.check.outputs import OutputResult
from specbench.check.run import Checked, DecodingCheck, verdict_on
from specbench.findings.catalog import Finding
from specbench.show.document import Items, Paragraph, Part, Sheet

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.check.servers import ServerCheck

_MAX_SHOWN = 20
_STYLES = {
    "identical": "green",
    "sound": "green",
    "numerical tie": "yellow",
    "nothing tested": "bold yellow",
    "wrong": "bold red",
}
_INTERRUPTED = Paragraph("Interrupted: these are the results so far.")
_count = partial(counted, form=",")


def check_parts(
    results: Sequence[DecodingCheck],
    target: str,
    notes: Sequence[str] = (),
    *,
    dtype: str,
    piece: Piece | None,
) -> list[Part]:
    """Return the answer of a check, and its findings by configuration.

    Args:
        results: One per configuration.
        target: The target and its cache, in words.
        notes: Sentences that limit the answer.
        dtype: Name of the dtype whose rounding is the unit of gaps.
        piece: Returns a token's text; ``None`` shows ids alone.
    """
    parts: list[Part] = [Paragraph(_headline(results), "bold"), *(Paragraph(note, "bold") for note in notes)]
    if not all(result.complete for result in results):
        parts.append(_INTERRUPTED)
    parts.append(Paragraph(f"Target: {target}."))
    if len(results) > 1:
        parts.append(_comparison_table(results))
    else:
        rows = [list(row) for row in _findings(results[0])]
        parts.append(_table(["checked", "on", "found", "verdict"], rows))
    for result in results:
        if result.verdict == "wrong":
            details = [*_details(result, dtype, piece)]
            parts += [Paragraph(result.label, "bold"), *details] if len(results) > 1 else details
    return parts


def _headline(results: Sequence[DecodingCheck]) -> str:
    prompts = max(len(result.greedy) for result in results)
    tokens = max(result.tokens for result in results)
    on = f"({_count(prompts, 'prompt')}, {_count(tokens, 'token')})"
    verdict = verdict_on(results)
    label, several = results[0].label, len(results) > 1
    if verdict == "wrong":
        number = sum(result.verdict == "wrong" for result in results)
        what = f"{number} of {len(results)} configurations" if several else label
        return f"NOT lossless: {what} {'do' if several else 'does'} not keep the target's output {on}."
    if verdict == "nothing tested":
        number = sum(result.verdict == verdict for result in results)
        why = "plain decoding is compared with nothing" if results[0].plain else f"{label} drafted no token"
        what = f" of {number} of {len(results)} configurations" if several else f": {why}"
        return f"Nothing was tested{what} {on}."
    what = f"all {len(results)} configurations keep" if several else f"{label} keeps"
    kept = "distribution" if results[0].sampled else "output"
    tie = ", except for ties that rounding decides" if verdict == "numerical tie" else ""
    return f"Lossless in this check: {what} the target's {kept}{tie} {on}."


def _comparison_table(results: Sequence[DecodingCheck]) -> Sheet:
    """Return a row for each configuration, with the verdicts on its findings."""
    tables = [{name: verdict for name, _, _, verdict in _findings(result)} for result in results]
    columns = [name for name in get_args(Checked) if any(name in cells for cells in tables)]
    rows = []
    for result, cells in zip(results, tables, strict=True):
        verdict = result.verdict if result.complete else "interrupted"
        rows.append([result.label, *(cells.get(column, "–") for column in columns), verdict])
    return _table(["configuration", *columns, "verdict"], rows)


def _findings(result: DecodingCheck) -> Iterator[tuple[Checked, str, str, str]]:
    """Yield the findings on one configuration as rows: what was checked, on what, the finding, the verdict."""
    on = f"{_count(len(result.greedy), 'prompt')}, {_count(result.tokens, 'token')}"
    verdicts = result.verdicts
    for against in ("plain", "transformers"):
        # With samples they are of interest only if they differ.
        if not result.sampled or verdicts.get(against, "identical") != "identical":
            if against in verdicts:
                yield (against, on, _outcomes(result, against), verdicts[against])
            else:
                yield (against, "not compared", str(result.no_transformers), "–")
    sound = {part: "sound" if verdict == "identical" else verdict for part, verdict in verdicts.items()}
    if (deviations := result.deviations) is not None:
        rows, equal = result.bitwise
        finding = f"up to {100 * deviations.largest:.2g}% off" if deviations.largest else "the same bits"
        if result.bit_exact:
            finding = f"{equal:,} of {rows:,} equal bit for bit"
        yield ("logits", _count(deviations.rows, "row"), finding, sound["logits"])
    broken = len(result.violations)
    finding = _count(broken, "violation") if broken else "all invariants hold"
    yield ("steps", _count(result.steps, "step"), finding, sound["steps"])
    if result.exact:
        places = sum(len(case.positions) for case in result.exact)
        error = f"total variation {result.largest_error:.0e}"
        yield ("exact", _count(places, "position"), error, sound["exact"] if places else "–")


def _outcomes(result: DecodingCheck, against: Against) -> str:
    verdicts = [verdict_of(difference) for difference in result.differences(against)]
    parts = [f"{verdicts.count('identical')} identical"]
    if ties := verdicts.count("numerical tie"):
        parts.append(_count(ties, "numerical tie"))
    if wrong := verdicts.count("wrong"):
        parts.append(f"{wrong} wrong")
    return ", ".join(parts)


# -- details ---------------------------------------------------------------------------------------


def _details(result: DecodingCheck, dtype: str, piece: Piece | None) -> Iterator[Part]:
    """Yield differing outputs, violations and wrong distributions."""
    differences = [
        (case.prompt, against, difference)
        for case in result.greedy
        for against, difference in case.differences.items()
        if difference is not None
    ]
    differences.sort(key=lambda row: row[2].numerical_tie)  # wrong ones first
    rows = [
        [prompt, against, *_difference_cells(difference, piece), verdict_of(difference)]
        for prompt, against, difference in differences[:_MAX_SHOWN]
    ]  # fmt: skip
    if rows:
        places = ["prompt", "against", "position", "this: logit", "other: logit"]
        yield _table(
            [*places, f"gap ({dtype} units)", "verdict"], rows, left=(1, 3, 4), more=len(differences)
        )
    violations = [
        f"{violation.invariant}: {prompt}{'' if violation.step is None else f', step {violation.step}'}:"
        f" {violation.message}"
        for prompt, violation in result.violations
    ]
    yield _list("Violated invariants", violations)
    yield _list("Distributions that differ from the target's", list(_biases(result)))


def _biases(result: DecodingCheck) -> Iterator[str]:
    places = [place for case in result.exact for place in case.positions if not place.sound]
    for place in sorted(places, key=lambda place: -place.error):
        of_none = "the first token" if place.kind == "first" else "all steps"
        step = of_none if place.step is None else f"step {place.step}, position {place.position}"
        yield f"exact: {place.prompt}, {step} ({place.kind}): total variation from p {place.error:.3g}"


# -- outputs of other engines ----------------------------------------------------------------------


def outputs_parts(
    outputs: Sequence[OutputResult], *, complete: bool, dtype: str, piece: Piece | None
) -> list[Part]:
    """Return the result of a check of outputs from elsewhere. For the arguments see ``check_parts``."""
    verdicts = [output.verdict for output in outputs]
    ties = _count(verdicts.count("numerical tie"), "numerical tie")
    counts = f"{verdicts.count('identical')} identical, {ties}, {verdicts.count('wrong')} wrong"
    tokens = _count(sum(output.tokens for output in outputs), "token")
    parts: list[Part] = [Paragraph(f"{_count(len(outputs), 'output')} with {tokens}: {counts}.", "bold")]
    if not complete:
        parts.append(_INTERRUPTED)
    rows = []
    differing = [output for output in outputs if output.verdict != "identical"]
    for output in sorted(differing, key=lambda output: (output.verdict != "wrong", output.line))[:_MAX_SHOWN]:
        cells = ["", "", "", ""] if output.first is None else _difference_cells(output.first, piece)
        rows.append([str(output.line), output.id, *cells, f"{output.ties}, {output.wrong}", output.verdict])
    if rows:
        logits, gap = ("this: logit", "target's: logit"), f"gap ({dtype} units)"
        headings = ["line", "id", "position", *logits, gap, "ties, wrong", "verdict"]
        parts.append(_table(headings, rows, left=(1, 3, 4), more=len(differing)))
    endless = [
        f"line {output.line}: it continues after the end token at position {output.after_end + 1}"
        for output in outputs
        if output.after_end is not None
    ]
    parts.append(_list("Outputs that do not end", endless))
    return parts


# -- servers ---------------------------------------------------------------------------------------


def server_parts(check: ServerCheck) -> list[Part]:
    """Return what a check of a server's sampled output has found."""
    answer, *more = (Paragraph(f"{found.text} {found.remedy}".rstrip()) for found in _server_findings(check))
    return [replace(answer, style="bold"), *([] if check.complete else [_INTERRUPTED]), *more]


def _server_findings(check: ServerCheck) -> Iterator[Finding]:
    result = check.result
    counts = [_count(check.done * len(check.prompts), "answer"), _count(check.positions, "position")]
    counts += [] if check.drafted is None else [_count(check.drafted, "draft token")]
    other = {"server": "the other server", "target": "the target"}.get(check.against, "its log probabilities")
    if result is None:
        yield Finding("server.early", counts=counts)
    elif check.verdict == "biased":
        names = {True: "server.frequent", False: "server.rare", None: "server.biased"}
        yield Finding(names[result.peaked], other=other, p=result.p, counts=counts)
    elif check.verdict == "no deviation":
        yield Finding(
            "server.sound", other=other, p=result.p, counts=counts, share=result.detectable, power=POWER
        )
        if check.drafted is None:
            yield Finding("server.unreported")
    else:
        yield Finding("server.undrafted" if check.hardly_drafted else "server.few", counts=counts)
    if check.first is not None and check.first.p <= LEVEL:
        yield Finding("server.first-too" if check.biased else "server.first-alone", p=check.first.p)


# -- parts of all ----------------------------------------------------------------------------------


def _table(
    headings: list[str], rows: list[list[str]], *, left: Sequence[int] | None = None, more: int = 0
) -> Sheet:
    columns = range(len(headings)) if left is None else (*left, len(headings) - 1)
    notes = [f"{more - _MAX_SHOWN} more rows: --json lists them."] if more > _MAX_SHOWN else []
    gaps = [1 if "gap" in heading else 0 for heading in headings]
    where = "in --json, or on a wider terminal"
    return Sheet(
        headings, rows, ranks=gaps, notes=notes, left=frozenset(columns), styles=_STYLES, elsewhere=where
    )


def _list(heading: str, lines: Sequence[str]) -> Items:
    rest = len(lines) - _MAX_SHOWN
    more = [f"and {rest} more (--json lists them)"] if rest > 0 else []
    return Items([*lines[:_MAX_SHOWN], *more], f"{heading}:")


def _difference_cells(difference: Difference, piece: Piece | None) -> list[str]:
    """Return the cells of a position, counted from 1, of the two tokens there, and of their gap."""
    cells = [str(difference.position + 1)]
    for token, logit in zip(difference.tokens, difference.logits, strict=True):
        text = "" if token is None or piece is None else f" '{visible(piece(token))}'"
        cells.append(f"{'(end)' if token is None else token}{text}: {logit:.7g}")
    return [*cells, f"{difference.gap:.3g} ({difference.gap_units:.3g})"]
