"""The view of a step trace (``specbench.results.trace``) on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from specbench.base.textsafe import counted, terminal_safe, tokens_text, visible
from specbench.decoding.records import PARTS
from specbench.results.trace import TraceEnd, TraceHeader, TracePrefill, TraceStep
from specbench.show.document import Facts, Heading, Paragraph, Part, Sheet, Span, Tokens, show, to_text

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.decoding.records import StepTimes
    from specbench.results.trace import Event, TraceVerdict

_FILE_CELLS = 200  # of a line that is not on a terminal
_LEGEND = (
    "Underlined: a correction token; twice: a bonus token; with dots: the target's own token. Other tokens are accepted"
    " drafts. Each leads to its step."
)
_STYLES = {
    "accepted": "green",
    "rejected": "red",
    "untested": "dim",
    "corrected": "bold yellow",
    "bonus": "bold cyan",
    "target": "bold blue",
}
SIGNS = {"accepted": "✓", "rejected": "✗", "untested": "·"}
_MARKS = {"accepted": ("", ""), "corrected": ("⟨", "⟩"), "bonus": ("⟨+", "⟩"), "target": ("⟨=", "⟩")}
_DIGITS = "₀₁₂₃₄₅₆₇₈₉"


EventParts = tuple[str, list[Sheet], Facts]
"""An event for a reader: its title, the table of its drafts if it has any, and facts."""


class TraceView:
    """Turns the events of a trace into parts of a document, for 60 columns or more, and keeps the text for the end.

    In the text, accepted draft tokens are plain. Correction tokens, bonus tokens and the target's own tokens (of the
    prefill and of steps without a draft) are in marks that the header explains, and in styles.

    Args:
        console: Where events are printed, with longer lines in a file; ``None`` for parts alone.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def show(self, event: Event) -> None:
        """Print one event."""
        console = self._console
        assert console is not None
        title, sheets, facts = self.of(event)
        parts: list[Part] = [Heading(title, 3), *sheets, facts]
        if console.is_terminal:
            show(console, *parts)
            console.print()
        else:
            console.file.write(to_text(*parts, width=_FILE_CELLS) + "\n")

    def of(self, event: Event) -> EventParts:
        """Return the parts of one event."""
        match event:
            case TraceHeader():
                return self._header(event)
            case TracePrefill():
                return self._prefill(event)
            case TraceStep():
                return self._step(event)
            case TraceEnd():
                return self._end(event)

    # One method per kind of event.

    def _header(self, event: TraceHeader) -> EventParts:
        method = event.options.get("verification")
        self._greedy = event.greedy
        self._method = method if isinstance(method, str) and method != "rejection" else None
        self._runs: list[Span] = []  # the output, with origins
        options = {name: value for name, value in event.options.items() if value is not None}
        prompt = self._one_line(event.prompt_tail)
        texts = (
            self._one_line(f"{name} {value if isinstance(value, str) else json.dumps(value)}")
            for name, value in options.items()
        )
        facts: list[tuple[str, Sequence[Span]]] = [
            ("target", [(f"{self._one_line(event.target)} ({self._one_line(event.dtype)})", "")]),
            ("drafter", [(self._one_line(event.drafter), "")]),
            ("options", [("  ".join(texts), "")]),
            ("prompt", [(f"{event.prompt_tokens} tokens: {prompt}", "")]),
            ("verdict", [(self._one_line(self._verdict()), "")]),
        ]
        if event.greedy:
            note = "greedy: p and q are of the softmax without temperature and decide nothing"
            facts.append(("note", [(note, "")]))
        legend = [self._marked(kind, kind) for kind in _MARKS]
        facts.append(("legend", [part for each in legend for part in (*each, ("  ", ""))]))
        return "trace", [], Facts(facts)

    def _prefill(self, event: TracePrefill) -> EventParts:
        facts: list[tuple[str, Sequence[Span]]] = []
        if event.text is not None:
            facts.append(self._closing("target", event.text, self._origin_from("p₁", event.probability)))
            self._extend("target", event.text)
        elif event.finish_reason is None:
            facts.append(("target", [("no first-target pass: the first step reads the prompt", "")]))
        if event.finish_reason is not None:
            facts.append(("stop", [(event.finish_reason, "")]))
        title = f"prefill · {event.prompt_tokens} tokens · {milliseconds(event.time_s)} ms"
        return title, [], Facts(facts)

    def _step(self, event: TraceStep) -> EventParts:
        gamma, accepted, closing, texts = event.gamma, event.accepted, event.closing, event.texts
        parents = event.parents or []
        size = f"{len(parents)} nodes" if parents else f"γ {gamma}"
        kept = f"accepted {accepted}/{gamma}" if gamma else "nothing drafted"
        total = milliseconds(event.times.total_s)
        title = f"step {event.index + 1} · position {event.position} · {size} · {kept} · {total} ms"
        facts: list[tuple[str, Sequence[Span]]] = []
        end = len(texts) if closing is None else min(accepted, len(texts) - 1)
        if closing is not None and texts:
            facts.append(self._closing(closing, texts[end], self._origin(event)))
        if event.finish_reason is not None:
            inside = "" if closing else ", inside the accepted drafts: nothing after it counts"
            facts.append(("stop", [(event.finish_reason + inside, "")]))
        facts.append(("time", [("  ".join(_times(event.times)), "")]))
        if event.experts:
            read = event.experts
            layers = counted(len(read.by_layer), "layer")
            text = f"{read.total} read in {layers}, {read.ratio:.2f} times those of one token"
            facts.append(("experts", [(text, "")]))
        if event.policy:
            notes = (f"{self._one_line(name)} {note_text(value)}" for name, value in event.policy.items())
            facts.append(("policy", [("  ".join(notes), "")]))
        for text, origin in tokens_of(event):
            self._extend(origin, text)
        drafts = [self._drafts(event.verdicts, parents, event.forced)] if event.verdicts else []
        return title, drafts, Facts(facts)

    def _end(self, event: TraceEnd) -> EventParts:
        drafts = "none"
        if event.acceptance_rate is not None:
            drafts = f"{event.accepted} of {event.drafted} accepted ({100 * event.acceptance_rate:.1f}%)"
            drafts += f", {event.forced} of them forced, {event.corrected} corrected" if event.forced else ""
        tokens = tokens_text(event.new_tokens, event.steps, event.tokens_per_step)
        facts: list[tuple[str, Sequence[Span]]] = [("output", [(tokens, "")]), ("drafts", [(drafts, "")])]
        if event.tokens_per_second is not None:
            facts.append(("speed", [(f"{event.tokens_per_second:.1f} tokens/s", "")]))
        facts += [("text", [part for run in self._runs for part in self._marked(*run)])]
        return f"end · {event.finish_reason or 'interrupted'}", [], Facts(facts)

    # Parts of them.

    def _verdict(self) -> str:
        """Return when a draft token is accepted."""
        if self._greedy:
            return "a draft is accepted if it is the argmax of p"
        if self._method is not None:
            return f"by {self._method}, see docs/draft-policies.md"
        return "a draft is accepted if r < p/q"

    def _origin(self, step: TraceStep) -> str:
        """Return where the token after a step's accepted draft tokens is from, with its probability."""
        index = "".join(_DIGITS[int(digit)] for digit in str(step.accepted + 1))
        p, q = f"p{index}", f"q{index}"
        source = p
        if step.closing == "corrected" and not self._greedy:
            if step.parents or self._method is not None:
                source = p if self._method == "naive" else f"the residual of {p}"
            else:
                source = f"norm(max(0, {p} - {q}))"
        return self._origin_from(source, step.closing_probability)

    def _origin_from(self, source: str, probability: float | None) -> str:
        number = "" if probability is None else f"probability {number_text(probability)}"
        if self._greedy:
            return f"argmax of {source}{number and f', {number}'}"
        return f"{number and f'with {number} '}from {source}"

    def _drafts(
        self, verdicts: Sequence[TraceVerdict], parents: Sequence[int], forced: Sequence[int]
    ) -> Sheet:
        """Return the table of draft tokens. A tree has branches before its tokens;
        a chain has a column of r, which p/q is compared with.
        """
        names = ["q", "p", "p/q"] if parents else ["q", "p", "p/q", "r"]
        rows = []
        for node, line in branches(verdicts, parents) if parents else ((i, "") for i in range(len(verdicts))):
            each = verdicts[node]
            numbers = [number_text(value) for value in (each.q, each.p, each.ratio, each.r)][: len(names)]
            verdict = "forced" if node in forced and each.verdict == "accepted" else each.verdict
            rows.append(
                [str(node + 1), line + visible(each.text), *numbers, f"{SIGNS[each.verdict]} {verdict}"]
            )
        styles = {f"{sign} {name}": _STYLES[name] for name, sign in SIGNS.items()}
        styles[f"{SIGNS['accepted']} forced"] = _STYLES["accepted"]
        headings = ["i", "token", *names, "verdict"]
        return Sheet(headings, rows, left=frozenset({1, len(headings) - 1}), styles=styles)

    def _closing(self, kind: str, text: str, origin: str) -> tuple[str, Sequence[Span]]:
        return kind, [(visible(text), _STYLES[kind]), (f"  {origin}", "")]

    def _extend(self, kind: str, text: str) -> None:
        """Add a token to the text."""
        if kind in ("accepted", "target") and self._runs and self._runs[-1][1] == kind:
            text = self._runs.pop()[0] + text  # such tokens read better in one run
        self._runs.append((text, kind))

    def _marked(self, text: str, kind: str) -> list[Span]:
        """Return a part of the output in its marks, with white space outside of them;
        a part of only white space is made visible.
        """
        if kind == "accepted":
            return [(text, "")]
        core = text.strip()
        before, _, after = text.partition(core) if core else ("", "", "\n" * text.count("\n"))
        left, right = _MARKS[kind]
        return [(before, ""), (f"{left}{core or visible(text)}{right}", _STYLES[kind]), (after, "")]

    def _one_line(self, text: str) -> str:
        safe = terminal_safe(text)
        return safe.replace("\n", visible("\n")).replace("\t", visible("\t"))


def tokens_of(event: TracePrefill | TraceStep) -> list[tuple[str, str]]:
    """Return the tokens that the output got, each with its origin."""
    if isinstance(event, TracePrefill):
        return [] if event.text is None else [(event.text, "target")]
    texts, closing = event.texts, event.closing
    end = len(texts) if closing is None else min(event.accepted, len(texts) - 1)
    return [(text, "accepted" if place < end else closing or "") for place, text in enumerate(texts)]


def trace_parts(events: Iterable[Event]) -> list[Part]:
    """Return a trace, or several in one file, as a document: the output, and every step."""
    parts: list[Part] = [Heading("Trace", 1)]
    tokens: list[tuple[str, str, int]] = []
    reader = TraceView()
    for event in events:
        title, sheets, facts = reader.of(event)
        facts = Facts([pair for pair in facts.pairs if pair[0] not in ("legend", "text")])
        if isinstance(event, TraceHeader):
            tokens = []
            about = f"{event.target}, drafter {event.drafter}"
            parts += [Heading(about), facts, Paragraph(_LEGEND), Tokens(tokens)]
            continue
        if isinstance(event, TracePrefill | TraceStep):
            tokens += [(text, origin, len(parts)) for text, origin in tokens_of(event)]
        parts += [Heading(title, 3), *sheets, facts]
    return parts


def branches(verdicts: Sequence[TraceVerdict], parents: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the nodes of a tree depth first,
    each with the lines drawn before it; heavy lines lead to accepted nodes.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    waiting = [(node, "") for node in reversed(children.get(-1, []))]
    while waiting:
        node, lines = waiting.pop()
        ends = node == children[parents[node]][-1]
        if verdicts[node].verdict == "accepted":
            yield node, lines + ("┕━" if ends else "┝━")
        else:
            yield node, lines + ("└─" if ends else "├─")
        below = lines + ("  " if ends else "│ ")
        waiting += [(child, below) for child in reversed(children.get(node, []))]


def _times(times: StepTimes) -> Iterator[str]:
    prefill = times.draft_prefill_s
    if prefill:
        yield f"draft prefill {milliseconds(prefill)}"
    yield f"draft {milliseconds(times.draft_s - prefill)}"
    if times.mask_s:
        yield f"masks {milliseconds(times.mask_s)} of draft and accept"
    for part in PARTS[1:]:
        yield f"{part} {milliseconds(getattr(times, f'{part}_s'))}{' ms' if part == PARTS[-1] else ''}"


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"


def number_text(value: float | None) -> str:
    """Format a number in at most six characters: up to four decimals, or a power of ten."""
    if value is None:
        return "–"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return next(shown for decimals in (4, 3, 2, 1, 0) if len(shown := f"{value:.{decimals}f}") <= 6)
    return f"{value:.0e}"


def note_text(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value == round(value) else number_text(value)
