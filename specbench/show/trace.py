"""The step trace (``specbench.results.trace``) as a view for the terminal, from a run or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from specbench.base.textsafe import terminal_safe, visible
from specbench.decoding.records import PARTS
from specbench.results.trace import TraceEnd, TraceHeader, TracePrefill, TraceStep

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.results.trace import Event, TraceTimes, TraceVerdict

_WIDEST = 100  # cells; wider consoles are not filled
_GUTTER = 13  # cells of a label and its margins
_WIDE = 72  # cells from which the table of drafts starts in the column of the values
_TOKEN_CELLS = (6, 30)  # minimum and maximum for a token in the table of drafts
_TAIL_CHARACTERS, _TAIL_LINES = 600, 8  # of the text so far

_STYLES = {
    "accepted": "green",
    "rejected": "red",
    "untested": "dim",
    "corrected": "bold yellow",
    "bonus": "bold cyan",
    "target": "bold blue",
}


@dataclass(frozen=True, slots=True)
class _Signs:
    """Signs of the view for one encoding; ``branches``: line, branch, last branch, and both of these if accepted."""

    gamma: str
    rule: str
    between: str
    nothing: str
    cut: str
    minus: str
    verdicts: Mapping[str, str]
    marks: Mapping[str, tuple[str, str]]
    branches: tuple[str, str, str, str, str]
    digits: str

    def indexed(self, name: str, i: int) -> str:
        """Return p or q with an index."""
        return name + ("".join(self.digits[int(digit)] for digit in str(i)) if self.digits else f"_{i}")


_UNICODE = _Signs(
    gamma="γ",
    rule="─",
    between=" · ",
    nothing="–",
    cut="…",
    minus="−",
    verdicts={"accepted": "✓", "rejected": "✗", "untested": "·"},
    marks={"corrected": ("⟨", "⟩"), "bonus": ("⟨+", "⟩"), "target": ("⟨=", "⟩")},
    branches=("│ ", "├─", "└─", "┝━", "┕━"),
    digits="₀₁₂₃₄₅₆₇₈₉",
)
_ASCII = _Signs(
    gamma="gamma",
    rule="-",
    between=", ",
    nothing="-",
    cut="...",
    minus="-",
    verdicts={"accepted": "+", "rejected": "x", "untested": "."},
    marks={"corrected": ("[", "]"), "bonus": ("[+", "]"), "target": ("[=", "]")},
    branches=("| ", "|-", "`-", "|=", "`="),
    digits="",
)


class TraceView:
    """Shows a trace on a console, event by event, in 60 columns or more.

    In the text so far accepted drafts are plain; correction tokens, bonus tokens and the target's own (of the prefill
    and of steps without a draft) are in marks that the header explains, and in styles if the console has colors.

    Args:
        console: Where to print. Without a UTF encoding everything is shown in characters that it has.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._encoding = console.encoding
        self._signs = _UNICODE if self._encoding.startswith("utf") else _ASCII
        self._begin(greedy=False, lossless=True)

    def show(self, event: Event) -> None:
        """Print one event."""
        match event:
            case TraceHeader():
                self._header(event)
            case TracePrefill():
                self._prefill(event)
            case TraceStep():
                self._step(event)
            case TraceEnd():
                self._end(event)

    def _begin(self, *, greedy: bool, lossless: bool) -> None:
        self._greedy = greedy
        self._lossless = lossless
        self._verification: str | None = None
        self._runs: list[tuple[str, str]] = []  # (origin, text): the end of the output so far
        self._cut = False

    # One method per kind of event.

    def _header(self, event: TraceHeader) -> None:
        self._begin(greedy=event.greedy, lossless=event.lossless)
        self._rule("trace")
        self._label("target", f"{self._one_line(event.target)} ({self._one_line(event.dtype)})")
        self._label("drafter", self._one_line(event.drafter))
        options = {name: value for name, value in event.options.items() if value is not None}
        self._items(
            "options", [f"{self._one_line(name)} {self._option(value)}" for name, value in options.items()]
        )
        self._label("prompt", f"{event.prompt_tokens} tokens: {self._end_of(event.prompt_tail)}")
        verification = options.get("verification")
        if isinstance(verification, str) and verification not in ("rejection", "residual"):
            self._verification = verification
        if self._greedy:
            self._label("verdict", "a draft is accepted if it is the argmax of p")
            self._label("note", "greedy: p and q are of the softmax without temperature and decide nothing")
        elif self._verification is not None:
            self._label("verdict", f"by {self._one_line(self._verification)}, see docs/trees.md")
        else:
            sibling = ", a sibling of it if it is the correction token" if verification == "residual" else ""
            self._label("verdict", f"a draft is accepted if r < p/q{sibling}")
        if not self._lossless:
            self._label("note", Text("not lossless: the residual adjustment is off", "bold red"))
        legend = Text("accepted")
        for kind in ("corrected", "bonus", "target"):
            legend.append("  ").append_text(self._marked(kind, kind))
        self._label("legend", legend)
        self._console.print()

    def _prefill(self, event: TracePrefill) -> None:
        self._rule("prefill", f"{event.prompt_tokens} tokens", f"{_milliseconds(event.time_s)} ms")
        if event.text is not None:
            self._closing("target", event.text, event.probability, self._signs.indexed("p", 1))
            self._extend("target", event.text)
        elif event.finish_reason is None:
            self._label("target", "no first-target pass: the first step reads the prompt")
        if event.finish_reason is not None:
            self._label("stop", event.finish_reason)
        self._console.print()

    def _step(self, event: TraceStep) -> None:
        gamma, accepted, closing, texts = event.gamma, event.accepted, event.closing, event.texts
        parents = event.parents or []
        self._rule(
            f"step {event.index + 1}",
            f"position {event.position}",
            f"{len(parents)} nodes" if parents else f"{self._signs.gamma} {gamma}",
            f"accepted {accepted}/{gamma}" if gamma else "nothing drafted",
            f"{_milliseconds(sum(_seconds(event.times, part) for part in PARTS))} ms",
        )
        if event.verdicts:
            self._drafts(event.verdicts, parents)
        siblings = [f"{each.place + 1}: {self._fitted(each.text, 12)}" for each in event.siblings]
        self._items("siblings", siblings)
        end = len(texts) if closing is None else min(accepted, len(texts) - 1)
        if closing is not None and texts:
            source = self._source(closing, accepted, tree=bool(parents))
            self._closing(closing, texts[end], event.closing_probability, source)
        for text in texts[end + 1 :]:
            self._label("gained", Text(self._fitted(text, _TOKEN_CELLS[1]), _STYLES["bonus"]))
        if event.finish_reason is not None:
            inside = "" if closing else ", inside the accepted drafts: nothing after it counts"
            self._label("stop", event.finish_reason + inside)
        self._time(event.times)
        notes = [f"{self._one_line(name)} {self._note(value)}" for name, value in event.policy.items()]
        self._items("policy", notes)
        for place, text in enumerate(texts):
            self._extend("accepted" if place < end else closing or "" if place == end else "bonus", text)
        self._text_so_far()
        self._console.print()

    def _end(self, event: TraceEnd) -> None:
        self._rule("end", event.finish_reason or "interrupted")
        output = [f"{event.new_tokens} tokens", f"{event.steps} steps"]
        if event.tokens_per_step is not None:
            output.append(f"{event.tokens_per_step:.2f} tokens/step")
        self._items("output", output)
        drafts = "none"
        if event.acceptance_rate is not None:
            drafts = f"{event.accepted} of {event.drafted} accepted ({100 * event.acceptance_rate:.1f}%)"
        self._label("drafts", drafts)
        if event.tokens_per_second is not None:
            self._label("speed", f"{event.tokens_per_second:.1f} tokens/s")

    # Parts of them.

    def _drafts(self, verdicts: Sequence[TraceVerdict], parents: Sequence[int]) -> None:
        """Print the table of drafts: i, token, q, p, p/q and verdict; of a chain also r, of a tree its branches."""
        left = _GUTTER if self._width >= _WIDE else 6
        least, most = _TOKEN_CELLS
        names = ("q", "p", "p/q") if parents else ("q", "p", "p/q", "r")
        cells = max(least * (1 + bool(parents)), min(most, self._width - left - 14 - 8 * len(names)))
        heads = "  ".join(f"{name:>6}" for name in names)
        self._line(Text(f"{'i':>{left - 2}}  {'token':{cells}}  {heads}    verdict", style="dim"))
        order = (
            self._branches(verdicts, parents) if parents else ((node, "") for node in range(len(verdicts)))
        )
        for node, line in order:
            if len(line) > cells - least:  # far down: the beginning of the lines makes room
                line = self._signs.cut + line[len(line) - (cells - least) + len(self._signs.cut) :]
            each = verdicts[node]
            values = (each.q, each.p, each.ratio, each.r)[: len(names)]
            row = Text(style="dim" if each.verdict == "untested" else "")
            row.append(f"{node + 1:>{left - 2}}", "dim")
            row.append(f"  {line}", _STYLES[each.verdict])
            token = self._fitted(each.text, cells - len(line), pad=True)
            row.append(f"{token}  {'  '.join(f'{self._number(value):>6}' for value in values)}  ")
            row.append(f"{self._signs.verdicts[each.verdict]} {each.verdict}", _STYLES[each.verdict])
            self._line(row)

    def _branches(
        self, verdicts: Sequence[TraceVerdict], parents: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Yield the nodes of a tree depth first, each after its lines; heavy ones lead to accepted nodes."""
        through, branch, last, accepted_branch, accepted_last = self._signs.branches
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        waiting = [(node, "") for node in reversed(children.get(-1, []))]
        while waiting:
            node, lines = waiting.pop()
            ends = node == children[parents[node]][-1]
            if verdicts[node].verdict == "accepted":
                yield node, lines + (accepted_last if ends else accepted_branch)
            else:
                yield node, lines + (last if ends else branch)
            below = lines + ("  " if ends else through)
            waiting += [(child, below) for child in reversed(children.get(node, []))]

    def _source(self, closing: str, accepted: int, *, tree: bool) -> str:
        """Return the distribution of the closing token as a formula."""
        p, q = (self._signs.indexed(name, accepted + 1) for name in "pq")
        if closing == "corrected" and not self._greedy:
            if tree or self._verification is not None:
                return p if self._verification == "naive" else f"the residual of {p}"
            if not self._lossless:
                return f"{p}: adjustment off"
            return f"norm(max(0, {p} {self._signs.minus} {q}))"
        return p

    def _closing(self, kind: str, text: str, probability: float | None, source: str) -> None:
        line = Text().append(self._fitted(text, _TOKEN_CELLS[1]), _STYLES[kind])
        number = "" if probability is None else f"probability {self._number(probability)}"
        if self._greedy:
            line.append(f"  argmax of {source}{number and f', {number}'}")
        else:
            line.append(f"  {number and f'with {number} '}from {source}")
        self._label(kind, line)

    def _time(self, times: TraceTimes) -> None:
        prefill = times.draft_prefill_s
        items = [f"draft prefill {_milliseconds(prefill)}"] if prefill else []
        items.append(f"draft {_milliseconds(times.draft_s - prefill)}")
        items += (f"{part} {_milliseconds(_seconds(times, part))}" for part in PARTS[1:])
        items[-1] += " ms"
        self._items("time", items)

    def _extend(self, kind: str, text: str) -> None:
        """Add a token to the text so far, and drop what is too far back to be shown."""
        if kind in ("accepted", "target") and self._runs and self._runs[-1][0] == kind:
            text = self._runs.pop()[1] + text  # such tokens read better in one run
        self._runs.append((kind, text))
        excess = sum(len(run) for _, run in self._runs) - _TAIL_CHARACTERS
        while excess > 0:
            self._cut = True
            kind, first = self._runs.pop(0)
            if len(first) > excess:
                self._runs.insert(0, (kind, first[excess:]))
            excess -= len(first)

    def _text_so_far(self) -> None:
        text = Text()
        for kind, run in self._runs:
            text.append_text(self._marked(kind, run))
        cut = self._signs.cut
        lines = list(text.wrap(self._console, self._width - _GUTTER - len(cut), overflow="fold", tab_size=4))
        while len(lines) > 1 and not lines[-1].plain.strip():
            lines.pop()
        if self._cut or len(lines) > _TAIL_LINES:
            lines = lines[-_TAIL_LINES:]
            lines[0] = Text().append(cut, "dim").append_text(lines[0])
        self._lines("text", lines)

    def _marked(self, kind: str, text: str) -> Text:
        """Return a run of the output in its marks, white space outside; white space alone is made visible."""
        safe = terminal_safe(text, self._encoding)
        if kind == "accepted":
            return Text(safe)
        core = safe.strip()
        before, _, after = safe.partition(core) if core else ("", "", "\n" * safe.count("\n"))
        left, right = self._signs.marks[kind]
        marked = Text(before)
        marked.append(f"{left}{core or self._visible(safe)}{right}", _STYLES[kind])
        return marked.append(after)

    # Numbers and text in few cells.

    def _number(self, value: float | None) -> str:
        """Format in at most six characters: up to four decimals, or a power of ten."""
        if value is None:
            return self._signs.nothing
        if value == 0 or 1e-4 <= abs(value) < 1e6:
            return next(shown for decimals in (4, 3, 2, 1, 0) if len(shown := f"{value:.{decimals}f}") <= 6)
        return f"{value:.0e}"

    def _note(self, value: float | None) -> str:
        return f"{value:.0f}" if value is not None and value == round(value) else self._number(value)

    def _option(self, value: Any) -> str:
        return self._one_line(value if isinstance(value, str) else json.dumps(value))

    def _visible(self, text: str) -> str:
        return visible(text, self._encoding)

    def _fitted(self, text: str, cells: int, *, pad: bool = False) -> str:
        shown = self._visible(text)
        if cell_len(shown) > cells:
            shown = set_cell_size(shown, cells - len(self._signs.cut)) + self._signs.cut
        return set_cell_size(shown, cells) if pad else shown

    def _one_line(self, text: str) -> str:
        safe = terminal_safe(text, self._encoding)
        return safe.replace("\n", self._visible("\n")).replace("\t", self._visible("\t"))

    def _end_of(self, prompt: str) -> str:
        """Return about two lines of the prompt's end."""
        shown = self._one_line(prompt)
        most = 2 * (self._width - _GUTTER) - 24  # less what stands before it and what wrapping leaves free
        return self._signs.cut + shown[-most:] if len(shown) > most else shown

    # Lines.

    @property
    def _width(self) -> int:
        return min(self._console.width, _WIDEST)

    def _line(self, line: Text) -> None:
        line.rstrip()
        self._console.print(line, soft_wrap=True)

    def _rule(self, title: str, *facts: str) -> None:
        """Print a title with the facts that fit next to it, and the others below."""
        rule, between = self._signs.rule, self._signs.between
        line = Text(f"{rule * 2} ", "dim").append(title, "bold not dim")
        rest = list(facts)
        while rest and line.cell_len + len(between) + len(rest[0]) < self._width:
            line.append(between).append(rest.pop(0), "not dim")
        line.append(" ")
        line.append(rule * (self._width - line.cell_len))
        self._line(line)
        self._items("", rest)

    def _label(self, label: str, value: str | Text) -> None:
        text = Text(value) if isinstance(value, str) else value
        self._lines(label, text.wrap(self._console, self._width - _GUTTER, overflow="fold"))

    def _items(self, label: str, items: Sequence[str]) -> None:
        """Print short items on as few lines as hold them, none broken in two."""
        lines: list[str] = []
        for item in items:
            if lines and cell_len(lines[-1]) + 2 + cell_len(item) <= self._width - _GUTTER:
                lines[-1] += f"  {item}"
            else:
                lines.append(item)
        self._lines(label, map(Text, lines))

    def _lines(self, label: str, lines: Iterable[Text]) -> None:
        for n, line in enumerate(lines):
            head = Text(f"  {'' if n else label:{_GUTTER - 2}}", "dim")
            self._line(Text().append_text(head).append_text(line))


def _seconds(times: TraceTimes, part: str) -> float:
    seconds: float = getattr(times, f"{part}_s")
    return seconds


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
