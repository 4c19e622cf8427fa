"""What `specbench generate` says on stderr beside the text: notes before it, a short summary behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_notes", "show_summary"]

_LABEL = 8  # cells of a label with the gap behind it
_WIDEST = 100
_SLOWER = 0.95  # speedups of a single run below this are no noise
_ENDS = {
    "eos": "ended by itself",
    "stop-string": "stop string",
    "length": "--max-new-tokens reached",
    "context-limit": "the context is full",
    None: "interrupted",
}
_PARTS = ("draft", "verify", "accept", "rollback", "other")
_ASCII = str.maketrans({"γ": "gamma", "×": "x", "–": "-"})


def show_notes(notes: Sequence[str], *, apart: bool) -> None:
    """Print what the user should know before the text comes; ``apart``: with an empty line between them."""
    console = _console()
    for note in notes:
        _line(console, "note", note, "yellow" if note.startswith("NOT LOSSLESS") else "")
    if notes and apart:
        console.print()


def show_summary(figures: Mapping[str, Any], *, apart: bool) -> None:
    """Print the figures of a run, with those of a comparison if there was one.

    Args:
        figures: What ``--json`` prints.
        apart: Leave an empty line before it, for it stands behind the text.
    """
    console = _console()
    if apart:
        console.print()
    for label, text in _lines(figures):
        _line(console, label, text)
    if (figures.get("speedup") or 1) < _SLOWER:
        _line(
            console,
            "note",
            f"decoding is slower with this drafter: try {_other_length(figures)}another drafter",
            "yellow",
        )
    if not figures["lossless"]:
        _line(console, "note", "NOT LOSSLESS: the residual adjustment was off", "yellow")


def _other_length(figures: Mapping[str, Any]) -> str:
    """What may help where drafting costs more than it brings."""
    gamma = figures["options"]["gamma"]
    if isinstance(gamma, int):
        return "a smaller --gamma, or " if gamma > 1 else ""
    return "another --length-policy, or "


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    """A label and its text; on a terminal the text is wrapped to stay in its column."""
    from rich.text import Text

    from specbench.textsafe import terminal_safe

    encoding = console.encoding
    if not encoding.startswith("utf"):
        text = text.translate(_ASCII)
    text = " ".join(terminal_safe(text, encoding).split())
    lines = [Text(text, style)]
    if console.is_terminal:
        lines = list(lines[0].wrap(console, max(min(console.width, _WIDEST) - _LABEL, 20)))
    for number, line in enumerate(lines):
        line.rstrip()
        head = Text(f"{'' if number else label:{_LABEL}}", "dim")
        console.print(head.append_text(line), soft_wrap=True)


def _lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    time, speed = figures["time"], figures["tokens_per_second"]
    model = f"{figures['target']} ({figures['dtype']}), drafter {figures['drafter']}"
    if figures["drafter"] != "none":
        model += f", γ {figures['options']['gamma']}"
    lines = [("model", model)]
    lines.append(("output", f"{_count(figures['new_tokens'], 'token')}, {_ENDS[figures['finish_reason']]}"))
    first = f"the first token after {time['ttft_s']:.2f} s"
    lines.append(("speed", first if speed is None else f"{speed:.1f} tokens/s, {first}"))
    if figures["steps"]:
        steps = f"{figures['tokens_per_step']:.2f} tokens per step in {_count(figures['steps'], 'step')}"
        if figures["drafted"]:
            accepted = f"{figures['accepted']} of {_count(figures['drafted'], 'draft')} accepted"
            steps += f", {accepted} ({figures['acceptance_rate']:.0%})"
            if gained := figures["gained_by_siblings"]:
                steps += f", {gained} more by siblings"
        elif figures["drafter"] != "none":
            steps += ", nothing drafted"
        lines.append(("steps", steps))
    if time["decode_s"]:
        shares = ", ".join(f"{part} {time[f'{part}_s'] / time['decode_s']:.0%}" for part in _PARTS)
        lines.append(("time", f"decoding {time['decode_s']:.2f} s: {shares}"))
    if "plain" in figures:
        lines += _comparison(figures)
    return lines


def _comparison(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    speed, speedup = figures["plain"]["tokens_per_second"], figures["speedup"]
    if speedup is None:
        plain = "too short to compare the speed"
    else:
        plain = (
            f"{speed:.1f} tokens/s without a drafter, {speedup:.2f}× with it"
            " (one run each; `specbench sweep` gives intervals)"
        )
    if figures["identical"]:
        tokens = "identical to plain decoding"
    elif figures["identical"] is None:
        tokens = "sampled, so they differ from plain decoding's by design"
        tokens += "; their distribution is the same" if figures["lossless"] else ""
    else:
        tokens = _difference(figures["difference"], figures["dtype"])
    return [("plain", plain), ("tokens", tokens)]


def _difference(difference: Mapping[str, Any], dtype: str) -> str:
    from specbench.textsafe import visible

    ours, plain = ("(end)" if text is None else f"'{visible(text)}'" for text in difference["texts"])
    verdict = "a numerical tie" if difference["numerical_tie"] else "NO numerical tie: please report it"
    return (
        f"part from plain decoding's at {difference['position']}, {ours} against {plain}, where the two tokens' logits"
        f" are {difference['gap']:.3g} apart ({difference['gap_units']:.1f} rounding units of {dtype}): {verdict}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
