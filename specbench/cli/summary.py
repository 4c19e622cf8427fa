"""What `specbench generate` says on stderr beside the text: notes before it, a short summary behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from specbench.base.textsafe import counted, terminal_safe, visible
from specbench.decoding.metrics import acceptance_rate, time_split, tokens_per_second, tokens_per_step
from specbench.decoding.records import PARTS

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.backends.torch.blocks import PoolUsage
    from specbench.decoding.origins import Origin
    from specbench.decoding.records import Generation, Step

_LABEL = 8  # cells of a label with the gap behind it
_WIDEST = 100
_ENDS = {
    "eos": "ended by itself",
    "stop-string": "stop string",
    "length": "--max-new-tokens reached",
    "context-limit": "the context is full",
    None: "interrupted",
}
_GAIN = 1.05
"""A smaller speedup than this is within what a prediction is off by."""

_ASCII = str.maketrans({"γ": "gamma", "×": "x", "–": "-"})


def show_notes(notes: Sequence[str], *, apart: bool, console: Console | None = None) -> None:
    """Print what the user should know before the text comes.

    Args:
        notes: One line each, or more on a terminal.
        apart: Leave an empty line behind them.
        console: That of a progress bar that is being drawn; ``None`` where there is none.
    """
    console = console or _console()
    for note in notes:
        _line(console, "note", note, "yellow" if note.startswith("NOT LOSSLESS") else "")
    if notes and apart:
        console.print()


def show_legend(paint: Callable[[str, Origin], str]) -> None:
    """Name on a terminal what the text's styles stand for, with an empty line behind it."""
    from rich.text import Text

    from specbench.decoding.origins import ORIGINS

    console = _console()
    if console.is_terminal:
        names = [Text.from_ansi(paint(name, origin)) for origin, name in ORIGINS.items()]
        console.print(Text(f"{'colors':{_LABEL}}", "dim").append_text(Text(", ").join(names)))
        console.print()


def show_summary(
    figures: Mapping[str, Any],
    *,
    apart: bool,
    advice: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print the figures of a run, with those of a comparison if there was one.

    Args:
        figures: What ``--json`` prints.
        apart: Leave an empty line before it, for it stands behind the text.
        advice: What to try: after a reply without text (``blank``), and where the drafter did not help (a ``policy``, a
            ``command`` to copy); what few accepted drafts tell of the ``text``.
        notes: How the models were loaded, as far as that can wait until the answer is there.
    """
    console = _console()
    if apart:
        console.print()
    for label, text in _lines(figures):
        _line(console, label, text)
    advice = advice or {}
    if "blank" in advice and figures["finish_reason"] == "eos" and not (figures["text"] or "").strip():
        _line(
            console, "note", f"the model ended its reply before it said anything; {advice['blank']}", "yellow"
        )
    for warning in figures.get("warnings", ()):
        _line(console, "note", f"{warning['message']} {warning['advice']}", "yellow")
    of_the_text = advice.get("text")
    if "speedup" not in figures and (found := _predicted(figures, of_the_text)):
        said, gains = found
        ending = "--compare measures it" if gains else "`specbench tune` looks for better"
        _line(console, "verdict", f"{said}; {ending}", "" if gains else "yellow")
    if "speedup" in figures and (problem := _no_help(figures, of_the_text)):
        command = advice.get("command")
        others = [*([advice["policy"]] if "policy" in advice else []), "this" if command else "a small model"]
        ending = ":" if command else " with the target's tokenizer (--drafter MODEL)"
        _line(console, "note", f"{problem}; try {', or '.join(others)}{ending}", "yellow")
        if command:
            _line(console, "", command, wrap=False)
    for note in notes:
        _line(console, "note", note)
    if not figures["lossless"]:
        _line(console, "note", "NOT LOSSLESS: the residual adjustment was off", "yellow")


def show_answer(answer: Generation, *, kept: int, stopped: bool) -> None:
    """Print a line about one answer of a conversation.

    Args:
        answer: With its records.
        kept: Tokens of its prompt that did not have to be read again.
        stopped: Whether it was by Ctrl-C.
    """
    speed = tokens_per_second(answer.prefill, answer.steps)
    ttft = time_split(answer.prefill, answer.steps).ttft_s
    parts = [counted(len(answer.token_ids), "token")]
    parts += [f"{speed:.1f} tokens/s"] if speed else []
    parts += [f"the first after {ttft:.2f} s", *_steps_in_short(answer.steps)]
    parts += [f"{kept} of {answer.prompt_tokens} prompt tokens held from before"] if kept else []
    if stopped or answer.finish_reason in ("length", "context-limit"):
        parts.append("stopped" if stopped else _ENDS[answer.finish_reason])
    console = _console()
    _line(console, "speed", ", ".join(parts))
    console.print()


def show_answers(answers: Sequence[Generation], *, kept: int) -> None:
    """Print the figures of a conversation.

    Args:
        answers: At least one.
        kept: Tokens of all prompts that did not have to be read again.
    """
    steps = [step for answer in answers for step in answer.steps]
    tokens = sum(len(answer.token_ids) for answer in answers)
    console = _console()
    _line(console, "output", f"{counted(tokens, 'token')} in {counted(len(answers), 'answer')}")
    if steps:
        speed = sum(len(step.tokens) for step in steps) / sum(step.times.total_s for step in steps)
        _line(console, "speed", ", ".join([f"{speed:.1f} tokens/s", *_steps_in_short(steps)]))
    prompts = sum(answer.prompt_tokens for answer in answers)
    _line(console, "prompts", f"{counted(prompts, 'token')}, {kept} of them held from answers before")


def _steps_in_short(steps: Sequence[Step]) -> list[str]:
    """Tokens per step and acceptance, as far as there are any."""
    if not steps:
        return []
    parts = [f"{tokens_per_step(steps):.2f} tokens per step"]
    if (rate := acceptance_rate(steps)) is not None:
        drafted, accepted = sum(step.gamma for step in steps), sum(step.accepted for step in steps)
        parts.append(f"{accepted} of {counted(drafted, 'draft')} accepted ({rate:.0%})")
    return parts


def show_many(
    done: Sequence[Generation],
    *,
    prompts: int,
    failed: int,
    seconds: float,
    use: PoolUsage | None,
    why_not_batched: str | None,
    apart: bool,
) -> None:
    """Print the figures of many prompts.

    Args:
        done: What has come to its end.
        prompts, failed: How many there were, and how many failed.
        seconds: From the first to the last of them.
        use: Of the target's pool; ``None`` without one.
        why_not_batched: Why nobody shared a pass; ``None`` if they did.
        apart: Leave an empty line before it, for it stands behind the texts.
    """
    console = _console()
    if apart:
        console.print()
    steps = [step for generation in done for step in generation.steps]
    tokens = sum(len(generation.token_ids) for generation in done)
    ends = f"{len(done)} of {counted(prompts, 'prompt')} done"
    _line(console, "prompts", f"{ends}, {failed} failed" if failed else ends)
    if tokens:
        speed = f"{tokens / seconds:.1f} tokens/s together" if seconds else "at once"
        _line(console, "output", f"{counted(tokens, 'token')} in {seconds:.2f} s: {speed}")
    if steps:
        text = f"{tokens_per_step(steps):.2f} tokens per step"
        rate = acceptance_rate(steps)
        _line(console, "steps", text if rate is None else f"{text}, {rate:.0%} of the drafts accepted")
    if use is not None:
        most, room = (counted(blocks * use.block, "token") for blocks in (use.peak, use.blocks))
        _line(console, "memory", f"keys and values of at most {most} at a time, with room for {room}")
    if why_not_batched is not None:
        _line(console, "note", f"every prompt had passes of its own: {why_not_batched}")


def _predicted(figures: Mapping[str, Any], of_the_text: str | None) -> tuple[str, bool] | None:
    """What the passes of a single generation tell of its speed over plain decoding, and whether that is a gain.

    Args:
        figures: Without a comparison.
        of_the_text: What few accepted drafts tell of the text; ``None``: nothing.

    Returns:
        ``None`` where they tell nothing.
    """
    explained = figures["explained"]
    if explained is None:
        return None
    if not figures["drafted"]:
        return f"nothing was drafted in {counted(figures['steps'], 'step')}", False
    ratio = f"about {explained['usual']:.2f}× plain decoding"
    if explained["usual"] >= _GAIN:
        passes = "" if explained["plain_steps"] else ", none of them a plain one"
        return f"{ratio}, predicted from this run's own passes{passes}", True
    what = "slower" if explained["usual"] < 1 / _GAIN else "hardly faster"
    return f"predicted to be {what} with this drafter, {ratio}: {_because(figures, of_the_text)}", False


def _no_help(figures: Mapping[str, Any], of_the_text: str | None) -> str | None:
    """That a comparison does not show a drafter to help, and why; ``None`` if it does, or nothing was compared.

    Args:
        figures, of_the_text: See ``_predicted``.
    """
    speedup, interval = figures["speedup"], figures["speedup_interval"]
    if speedup is None or figures["drafter"] == "none":
        return None
    low, high = interval or (speedup, speedup)
    if low > 1:
        return None
    if not figures["drafted"]:
        return "nothing was drafted here, so nothing can be faster"
    what = "slower with this drafter" if high < 1 else "not shown to be faster with this drafter"
    if any(warning["severity"] == "warning" for warning in figures["warnings"]):
        what = "no gain to be seen with this drafter"
    return what if figures["explained"] is None else f"{what}: {_because(figures, of_the_text)}"


def _because(figures: Mapping[str, Any], of_the_text: str | None) -> str:
    """Why a step with this drafter brings too little for its time; for the arguments see ``_predicted``."""
    tokens, step, drafting = (figures["explained"][name] for name in ("tokens", "step", "drafting"))
    balance = f"a step brings {tokens:.2f} tokens and takes as long as {step:.2f} plain ones"
    if tokens >= _GAIN * (step - drafting):  # it would pay if drafts cost nothing
        return f"{balance}, {drafting:.2f} of them for drafting"
    drafting_steps = sum(gamma > 0 for gamma in figures["gammas"])
    rate = f"{figures['acceptance_rate']:.0%} of {counted(figures['drafted'], 'draft')}"
    if drafting_steps < figures["steps"]:
        rate += f" in {drafting_steps} of {counted(figures['steps'], 'step')}"
    reason = f"{balance}, for {rate} {'was' if figures['drafted'] == 1 else 'were'} accepted"
    return f"{reason}: {of_the_text}" if of_the_text else reason


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _line(console: Console, label: str, text: str, style: str = "", *, wrap: bool = True) -> None:
    """A label and its text; on a terminal the text is wrapped to stay in its column, unless it is to be copied."""
    from rich.text import Text

    encoding = console.encoding
    if not encoding.startswith("utf"):
        text = text.translate(_ASCII)
    text = " ".join(terminal_safe(text, encoding).split())
    lines = [Text(text, style)]
    if console.is_terminal and wrap:
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
    lines.append(("output", f"{counted(figures['new_tokens'], 'token')}, {_ENDS[figures['finish_reason']]}"))
    first = f"the first token after {time['ttft_s']:.2f} s"
    if figures.get("speedup") is not None:
        speed = _mean_speeds(figures)["speculative"]
        first = f"geometric mean of {counted(len(_rated(figures)), 'repeat')}; {first}"
    lines.append(("speed", first if speed is None else f"{speed:.1f} tokens/s, {first}"))
    if figures["steps"]:
        steps = f"{figures['tokens_per_step']:.2f} tokens per step in {counted(figures['steps'], 'step')}"
        if figures["drafted"]:
            accepted = f"{figures['accepted']} of {counted(figures['drafted'], 'draft')} accepted"
            steps += f", {accepted} ({figures['acceptance_rate']:.0%})"
            if figures["nodes"] > figures["drafted"]:
                steps += f" along trees of {figures['nodes'] / figures['steps']:.1f} nodes"
            if gained := figures["gained_by_siblings"]:
                steps += f", {gained} more by siblings"
        elif figures["drafter"] != "none":
            steps += ", nothing drafted"
        lines.append(("steps", steps))
    if (share := figures.get("draftable_share")) is not None:
        lines.append(("drafter", f"{share:.0%} of these tokens are among those that its model can draft"))
    if time["decode_s"]:
        shares = ", ".join(f"{part} {time[f'{part}_s'] / time['decode_s']:.0%}" for part in PARTS)
        lines.append(("time", f"decoding {time['decode_s']:.2f} s: {shares}"))
    if "plain" in figures:
        lines += _comparison(figures)
    return lines


def _rated(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of a comparison's pairs, those whose speedup is known."""
    return [each for each in figures["repeats"] if each["speedup"] is not None]


def _mean_speeds(figures: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second of both sides of a comparison; their ratio is its speedup."""
    return {
        side: geometric_mean(each[side]["tokens_per_second"] for each in _rated(figures))
        for side in ("speculative", "plain")
    }


def _comparison(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    speedup, interval, repeats = figures["speedup"], figures["speedup_interval"], figures["repeats"]
    if speedup is None:
        plain = "too short to compare the speed"
    else:
        plain = f"{_mean_speeds(figures)['plain']:.1f} tokens/s without a drafter, {speedup:.2f}×"
        if interval is None:
            plain += f" with it in {counted(len(repeats), 'repeat')} of this prompt: too few to say how sure that is"
        else:
            low, high = interval
            plain += (
                f" [{low:.2f}, {high:.2f}] with it: 95% interval over {len(repeats)} repeats of this prompt"
                " (`specbench sweep` measures several prompts)"
            )
    if figures["identical"]:
        tokens = "identical to plain decoding"
    elif figures["identical"] is None:
        tokens = "sampled, so they differ from plain decoding's by design"
        tokens += "; their distribution is the same" if figures["lossless"] else ""
    else:
        tokens = _difference(figures["difference"])
        if (differing := figures["differing_repeats"]) < len(repeats):
            tokens += f"; in {differing} of {len(repeats)} repeats"
    return [("plain", plain), ("tokens", tokens)]


def _difference(difference: Mapping[str, Any]) -> str:
    ours, plain = ("(end)" if text is None else f"'{visible(text)}'" for text in difference["texts"])
    verdict = "a numerical tie" if difference["numerical_tie"] else "NO numerical tie: please report it"
    units = f"{difference['gap_units']:.1f} rounding units of {difference['rounding']}"
    return (
        f"part from plain decoding's at {difference['position']}, {ours} against {plain}, where the two tokens' logits"
        f" are {difference['gap']:.3g} apart ({units}): {verdict}"
    )
