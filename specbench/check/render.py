"""A check's result as tables for a terminal. The texts of tokens and the ids of prompts are data and are made safe."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from specbench.base.textsafe import counted, terminal_safe, visible
from specbench.check.greedy import verdict_of
from specbench.check.results import CheckResult, OutputsResult, Piece, worst

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.backends.torch.parity import Difference
    from specbench.check.greedy import Verdict
    from specbench.check.outputs import Mismatch

_MOST_SHOWN = 20
_SHORT = ("plain", "transformers", "logits", "bits", "steps", "exact", "sampled")
"""Columns of ``show_checks``."""

_NARROW = ("checked", "against", "token", "line", "verdict", *_SHORT)
_STYLES = {"identical": "green", "sound": "green", "numerical tie": "yellow", "wrong": "bold red"}
_SENTENCES = {
    "identical": "lossless as far as this check sees",
    "numerical tie": "lossless as far as this check sees; outputs part only where rounding decides",
    "wrong": "WRONG: this configuration does not keep the target's output",
}


def show_check(result: CheckResult, console: Console, *, dtype: str, piece: Piece | None) -> None:
    """Print what a check found.

    Args:
        result: What it found.
        console: Where to.
        dtype: Name of the dtype whose rounding is the unit of gaps.
        piece: A token's own text; ``None`` shows ids alone.
    """
    table = _table("checked", "on", "found", "verdict")
    for row in _rows(result):
        _add(table, console, row)
    console.print(table)
    _show_details(result, console, dtype, piece)
    _show_missed([result], console)
    if not result.complete:
        _line(console, "Interrupted: this is what was checked until then.", "yellow")
    if result.verdict == "wrong" or result.greedy:
        _line(console, f"Verdict: {_SENTENCES[result.verdict]}.", _STYLES[result.verdict])


def show_checks(
    results: Sequence[tuple[str, CheckResult]], console: Console, *, dtype: str, piece: Piece | None
) -> None:
    """Print what checks of several configurations found: a row for each, then what is not as it should be.

    Args:
        results: Names and what was found.
        console, dtype, piece: See ``show_check``.
    """
    columns = [name for name in _SHORT if any(name in _short_row(result) for _, result in results)]
    table = _table("configuration", *columns, "verdict")
    for label, result in results:
        cells = _short_row(result)
        shown = [cells.get(column, "–") for column in columns]
        _add(table, console, (label, *shown, result.verdict if result.complete else "interrupted"))
    console.print(table)
    for label, result in results:
        if result.verdict != "identical":
            console.print()
            _line(console, label, "bold")
            _show_details(result, console, dtype, piece)
    _show_missed([result for _, result in results], console)
    prompts = max(len(result.greedy) for _, result in results)
    tokens = max(sum(each.tokens for each in result.greedy) for _, result in results)
    verdict = worst([result.verdict for _, result in results])
    if not all(result.complete for _, result in results):
        _line(console, "Interrupted: this is what was checked until then.", "yellow")
    number = [result.verdict for _, result in results].count("wrong")
    sentence = (
        f"WRONG: {number} of {len(results)} configurations do not keep the target's output"
        if number
        else f"all {len(results)} {_SENTENCES[verdict]}"
    )
    console.print()
    on = f"{_count(prompts, 'prompt')}, {_count(tokens, 'token')}"
    _line(console, f"Verdict on {on}: {sentence}.", _STYLES[verdict])


def _short_row(result: CheckResult) -> dict[str, str]:
    """A configuration's findings in a few words each."""
    cells = {"plain": _differing(result, "plain")}
    if result.no_transformers is None:
        cells["transformers"] = _differing(result, "transformers")
    if result.deviations is not None:
        cells["logits"] = _sound(result.deviations.sound)
    if result.bit_exact:
        rows, equal = result.bitwise
        cells["bits"] = "equal" if rows == equal else f"{rows - equal:,} rows differ"
    broken = len(result.violations)
    cells["steps"] = f"{broken:,} wrong" if broken else f"{result.steps:,} sound"
    if result.exact:
        cells["exact"] = f"{result.largest_error:.0e}"
    if result.sampled is not None:
        cells["sampled"] = _sound(result.sampled.sound)
    return cells


def _show_details(result: CheckResult, console: Console, dtype: str, piece: Piece | None) -> None:
    _show_differences(result, console, dtype, piece)
    _list(console, "Invariants that do not hold", list(_violations(result)))
    _list(console, "Distributions that are not the target's", list(_biases(result)))


def _rows(result: CheckResult) -> Iterator[tuple[str, str, str, str]]:
    on = f"{_count(len(result.greedy), 'prompt')}, {_count(sum(r.tokens for r in result.greedy), 'token')}"
    yield ("greedy, plain", on, *_comparison(result, "plain"))
    if result.no_transformers is None:
        yield ("greedy, transformers", on, *_comparison(result, "transformers"))
    else:
        yield ("greedy, transformers", "not compared", result.no_transformers, "–")
    if (each := result.deviations) is not None:
        found = f"{_percent(each.largest)} off (plain {_percent(each.plain_largest)})"
        yield ("logits", _count(each.rows, "row"), found, _sound(each.sound))
    if result.bit_exact:
        rows, equal = result.bitwise
        yield ("bits of the logits", _count(rows, "row"), f"{equal:,} bitwise equal", _sound(rows == equal))
    broken = len(result.violations)
    found = _count(broken, "violation") if broken else "all invariants hold"
    yield ("every step", _count(result.steps, "step"), found, _sound(not broken))
    if result.exact:
        places = sum(len(case.positions) for case in result.exact)
        error = f"total variation {result.largest_error:.0e}"
        sound = _sound(all(case.sound for case in result.exact))
        yield ("exact distribution", _count(places, "position"), error, sound if places else "–")
    if (test := result.sampled) is not None:
        on = f"{_count(test.tokens, 'token')} in {test.seconds:.0f} s"
        found = f"p-value {test.p_value:.2g}" if test.freedom or test.impossible else "too few to test"
        yield ("sampled", on, found, _sound(test.sound) if test.freedom or test.impossible else "–")


def _comparison(result: CheckResult, against: str) -> tuple[str, str]:
    differences = result.differences("plain" if against == "plain" else "transformers")
    verdicts = [verdict_of(each) for each in differences]
    parts = [f"{verdicts.count('identical')} identical"]
    if ties := verdicts.count("numerical tie"):
        parts.append(_count(ties, "numerical tie"))
    if wrong := verdicts.count("wrong"):
        parts.append(f"{wrong} wrong")
    return ", ".join(parts), result.verdict_against("plain" if against == "plain" else "transformers")


def _differing(result: CheckResult, against: Literal["plain", "transformers"]) -> str:
    """How many outputs differ, if any."""
    verdicts = [verdict_of(each) for each in result.differences(against)]
    ties, wrong = verdicts.count("numerical tie"), verdicts.count("wrong")
    parts = ([f"{wrong} wrong"] if wrong else []) + ([_count(ties, "tie")] if ties else [])
    return ", ".join(parts) or "identical"


def _show_missed(results: Sequence[CheckResult], console: Console) -> None:
    """What the samples can have missed: of several configurations, those of the one that shows least."""
    smallest = [result.sampled.smallest for result in results if result.sampled and result.sampled.sound]
    if not smallest:
        return
    console.print()
    found = [share for share in smallest if share is not None]
    if len(found) < len(smallest):
        _line(console, "So few tokens were sampled that no bias would have been found: allow more --minutes.")
        return
    _line(
        console,
        f"Samples: a bias that shifts {max(found):.1%} of the tokens between the most probable, the likely (2% or more)"
        " and the unlikely ones, or towards what the drafter prefers, would have been found in 95 of 100 checks."
        " They can have missed a smaller one, one within such a group, and one on other prompts.",
    )


def _show_differences(result: CheckResult, console: Console, dtype: str, piece: Piece | None) -> None:
    found: list[tuple[str, str, Difference]] = []
    for each in result.greedy:
        for against, difference in (
            ("plain", each.against_plain),
            ("transformers", each.against_transformers),
        ):
            if difference is not None:
                found.append((each.prompt, against, difference))
    if not found:
        return
    found.sort(key=lambda row: row[2].numerical_tie)  # what is wrong comes first
    table = _table("prompt", "against", "token", "this, other: logits", f"gap ({dtype} units)", "verdict")
    for prompt, against, difference in found[:_MOST_SHOWN]:
        cells = (
            prompt,
            against,
            str(difference.position + 1),
            _pair(difference.tokens, difference.logits, piece, console),
            f"{difference.gap:.3g} ({difference.gap_units:.3g})",
            verdict_of(difference),
        )
        _add(table, console, cells)
    console.print()
    console.print(table)
    _more(console, len(found))


def _violations(result: CheckResult) -> Iterator[str]:
    for prompt, violation in result.violations:
        where = "" if violation.step is None else f", step {violation.step}"
        yield f"{violation.invariant}: {prompt}{where}: {violation.message}"


def _biases(result: CheckResult) -> Iterator[str]:
    places = [place for case in result.exact for place in case.positions if not place.sound]
    for place in sorted(places, key=lambda place: -place.error):
        step = "the first token" if place.step is None else f"step {place.step}, position {place.position}"
        yield f"exact: {place.prompt}, {step} ({place.kind}): total variation from p {place.error:.3g}"
    if (test := result.sampled) is not None and not test.sound:
        yield (
            f"sampled: {_count(test.impossible, 'token')} of probability 0"
            if test.impossible
            else f"sampled: p-value {test.p_value:.2g} (limit {test.limit:g}), about {test.observed:.1%} of"
            f" {_count(test.tokens, 'token')} are off"
        )


def show_outputs(result: OutputsResult, console: Console, *, dtype: str, piece: Piece | None) -> None:
    """Print what a check of outputs from elsewhere found. For the arguments see ``show_check``."""
    differing = [each for each in result.outputs if each.verdict != "identical"]
    if differing:
        table = _table(
            "line", "id", "token", "this, target's: logits", f"gap ({dtype} units)", "ties, wrong", "verdict"
        )
        for each in sorted(differing, key=lambda each: (each.verdict != "wrong", each.line))[:_MOST_SHOWN]:
            shown = each.first_wrong or each.first
            cells = (str(each.line), each.id, *_mismatch(shown, piece, console))
            _add(table, console, (*cells, f"{each.ties}, {each.wrong}", each.verdict))
        console.print(table)
        _more(console, len(differing))
    behind = [
        f"line {each.line}: it goes on behind the end token at position {each.behind_end + 1}"
        for each in result.outputs
        if each.behind_end is not None
    ]
    _list(console, "Outputs that do not end", behind)
    refused = [f"line {each.line}: {each.reason}" for each in result.refused]
    _list(console, "Lines that cannot be checked", refused)
    _list(console, "Lines whose scoring failed", [f"line {e.line}: {e.reason}" for e in result.failed])
    verdicts = [each.verdict for each in result.outputs]
    counts = (
        f"{verdicts.count('identical')} identical, {_count(verdicts.count('numerical tie'), 'numerical tie')}"
    )
    counts += f", {verdicts.count('wrong')} wrong"
    tokens = _count(sum(each.tokens for each in result.outputs), "token")
    line = f"{_count(len(result.outputs), 'output')} with {tokens}: {counts}."
    _line(console, line, _STYLES[result.verdict] if result.outputs else "")
    if not result.complete:
        _line(console, "Interrupted: this is what was checked until then.", "yellow")


def _mismatch(found: Mismatch | None, piece: Piece | None, console: Console) -> tuple[str, ...]:
    if found is None:
        return ("", "", "")
    pair = _pair((found.token, found.best), found.logits, piece, console)
    return str(found.position + 1), pair, f"{found.gap:.3g} ({found.gap_units:.3g})"


def _pair(
    tokens: Sequence[int | None], logits: Sequence[float], piece: Piece | None, console: Console
) -> str:
    """Two tokens with their logits, a line each."""
    lines = [
        f"{_token(token, piece, console)}: {value:.7g}" for token, value in zip(tokens, logits, strict=True)
    ]
    return "\n".join(lines)


# -- parts of the picture --------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(Text(name), overflow="fold", no_wrap=name in _NARROW)
    return table


def _add(table: Table, console: Console, cells: Sequence[str]) -> None:
    *texts, verdict = cells
    shown = [Text("\n".join(_safe(line, console) for line in text.split("\n"))) for text in texts]
    table.add_row(*shown, Text(_safe(verdict, console), _STYLES.get(verdict, "")))


def _list(console: Console, heading: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    _line(console, f"{heading}:", "bold")
    for line in lines[:_MOST_SHOWN]:
        _line(console, f"  {line}")
    _more(console, len(lines))


def _more(console: Console, number: int) -> None:
    if number > _MOST_SHOWN:
        _line(console, f"  and {number - _MOST_SHOWN} more (--json lists them)", "dim")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(_safe(text, console), style), soft_wrap=not console.is_terminal)


def _safe(text: str, console: Console) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return " " * indent + " ".join(terminal_safe(text, console.encoding).split())


def _token(token: int | None, piece: Piece | None, console: Console) -> str:
    if token is None:
        return "(end)"
    return str(token) if piece is None else f"{token} '{visible(piece(token), console.encoding)}'"


def _sound(sound: bool) -> Verdict | str:
    return "sound" if sound else "wrong"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


_count = functools.partial(counted, form=",")
