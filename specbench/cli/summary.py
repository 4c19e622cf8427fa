"""Output of decoding commands on stderr: notes before the text, and a summary after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from specbench.base.textsafe import counted, terminal_safe, tokens_text, visible
from specbench.decoding.metrics import acceptance_rate, tokens_per_step
from specbench.decoding.records import PARTS

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.backends.torch.blocks import PoolUsage
    from specbench.decoding.records import Generation, Origin, Step

_LABEL = 8  # cells of a label with the gap after it
_WIDEST = 100
_SHOWN = 4  # lines below the first one, without --verbose
_ENDS = {
    "eos": "ended by itself",
    "stop-string": "stop string",
    "length": "--max-new-tokens reached",
    "context-limit": "the context is full",
    None: "interrupted",
}
_GAIN = 1.05
"""Smaller predicted speedups are not mentioned: predictions are off by as much."""
_LEVEL = 0.9
"""From this predicted speedup on, a run of ``auto`` that hardly drafted is called about as fast as plain decoding."""
_TOO_SLOW = "the drafter is too slow: drafts lose time even if all their tokens are accepted"
_BLANK = "word the prompt otherwise, or take the other of --chat and --raw"
_UNCONFIRMED = "yet the repeats do not confirm it"


def show_notes(notes: Sequence[str], *, spaced: bool, console: Console | None = None) -> None:
    """Print notes before the text, and an empty line after them if ``spaced``."""
    console = console or _console()
    for note in notes:
        _line(console, "note", note)
    if notes and spaced:
        console.print()


def show_legend(paint: Callable[[str, Origin], str]) -> None:
    """Name on a terminal what the styles of the text stand for, with an empty line after it."""
    from rich.text import Text

    from specbench.decoding.records import ORIGINS

    console = _console()
    if console.is_terminal:
        names = [Text.from_ansi(paint(name, origin)) for origin, name in ORIGINS.items()]
        console.print(Text(f"{'colors':{_LABEL}}", "dim").append_text(Text(", ").join(names)))
        console.print()


def show_summary(
    figures: Mapping[str, Any],
    *,
    spaced: bool,
    notes: Sequence[str] = (),
    verbose: bool = False,
) -> None:
    """Print the summary of a generation: a sentence, and the most important lines that explain it.

    ``figures`` are what ``--json`` prints, ``notes`` tell how the models were loaded. An empty line stands before the
    summary if ``spaced``; all lines are printed if ``verbose``.
    """
    console = _console()
    if spaced:
        console.print()
    compared = "speedup" in figures
    headline, problem = (_comparison if compared else _prediction)(figures)
    _line(console, "", headline, "bold" if not problem else "bold yellow", indent=0)
    lines: list[tuple[str, str]] = []
    if figures["finish_reason"] == "eos" and not (figures["text"] or "").strip():
        lines.append(("note", f"the reply ended before any text; {_BLANK}"))
    lines += [
        ("note", f"{finding['text']} {finding['remedy']}".rstrip()) for finding in figures.get("warnings", ())
    ]
    if compared and figures["identical"] is False:
        lines.append(_tokens(figures))
    if problem:
        better = "sweep` measures several prompts" if _UNCONFIRMED in problem else "tune` looks for better"
        lines.append(("why", f"{problem}; `specbench {better}"))
    if compared and figures["identical"] is not False:
        lines.append(_tokens(figures))
    lines += _details(figures)
    lines += [("note", note) for note in notes]
    for label, text in lines if verbose else lines[:_SHOWN]:
        _line(console, label, text, "yellow" if label == "note" and text not in notes else "")


def _prediction(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Return a sentence on the result of a single generation, and why the drafter does not help; empty if it does."""
    speed, explained = figures["tokens_per_second"], figures["explained"]
    text = counted(figures["new_tokens"], "token") if speed is None else f"{speed:.1f} tokens/s"
    if figures.get("too_slow"):
        return f"{text}; drafting stopped.", _TOO_SLOW
    if explained is None:
        return f"{text}.", ""
    usual = explained["usual"]
    ratio = f"{usual:.2f}×"
    if usual >= _GAIN and figures["drafted"]:
        return f"{text}, about {ratio} plain decoding (predicted; --compare measures it).", ""
    undrafted = _undrafted(figures)
    if not figures["drafted"]:
        return f"{text}, as plain decoding.", undrafted
    if undrafted and usual >= _LEVEL:
        return f"{text}, about as fast as plain decoding (predicted {ratio}).", undrafted
    what = "slower than" if usual < 1 / _GAIN else "hardly faster than"
    text += f", predicted to be {what} plain decoding with this drafter (about {ratio})."
    return text, _because(figures)


def _undrafted(figures: Mapping[str, Any]) -> str:
    """Return that nothing was drafted, where that is so in most steps of ``auto`` or in all; empty otherwise."""
    steps, idle = figures["steps"], sum(gamma == 0 for gamma in figures["gammas"])
    why = ": no draft was likely to pay" if figures["options"]["draft_policy"].startswith("auto") else ""
    if not figures["drafted"]:
        return f"nothing was drafted in {counted(steps, 'step')}{why}"
    return (
        f"nothing was drafted in {idle} of {counted(steps, 'step')}{why}" if why and 2 * idle > steps else ""
    )


def _comparison(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Return a sentence on the result of a comparison, and why the drafter does not help; empty if it does.

    All figures are of the same pairs: the ratio of the two speeds is the speedup.
    """
    speedup, interval = figures["speedup"], figures["speedup_interval"]
    if speedup is None:
        return "The output is too short to compare the speed.", ""
    pairs = [each for each in figures["repeats"] if each["speedup"] is not None]
    fast, plain = (
        geometric_mean(each[side]["tokens_per_second"] for each in pairs) for side in ("speculative", "plain")
    )
    sure = "[{:.2f}, {:.2f}]".format(*interval) if interval else f"in {counted(len(pairs), 'repeat')}"
    found = f"{fast:.1f} tokens/s instead of {plain:.1f}, {speedup:.2f}× {sure}"
    if (theirs := figures.get("transformers_tokens_per_second")) is not None:
        found += f"; `generate` of transformers has {theirs:.1f}"
    found += "."
    if figures["drafter"] == "none":
        return f"Plain decoding twice: {found}", ""
    what = {"cannot tell": "not shown to be faster"}.get(figures["verdict"], figures["verdict"]).capitalize()
    headline = f"{what} with the drafter on this prompt" if interval else "Too few repeats to be sure"
    if figures["verdict"] == "faster" or (interval is None and speedup > 1):
        problem = ""
    elif not figures["drafted"]:
        problem = "nothing was drafted here, so nothing can be faster"
    else:
        problem = "" if figures["explained"] is None else _because(figures)
    return f"{headline}: {found}", problem


def _because(figures: Mapping[str, Any]) -> str:
    """Return why a step with this drafter gives too little for its time."""
    if figures.get("too_slow"):
        return _TOO_SLOW
    tokens, step, drafting = (figures["explained"][name] for name in ("tokens", "step", "drafting"))
    balance = f"a step gives {tokens:.2f} tokens and takes {step:.2f} times as long as a plain one"
    if tokens >= _GAIN * step:
        return f"{balance}, {_UNCONFIRMED}"
    if tokens >= _GAIN * (step - drafting):  # it would pay if drafts cost nothing
        return f"{balance}, {drafting:.2f} of that for drafting"
    drafting_steps = sum(gamma > 0 for gamma in figures["gammas"])
    rate = f"{figures['acceptance_rate']:.0%} of {counted(figures['drafted'], 'draft token')}"
    if drafting_steps < figures["steps"]:
        rate += f" in {drafting_steps} of {counted(figures['steps'], 'step')}"
    reason = f"{balance}: {rate} {'was' if figures['drafted'] == 1 else 'were'} accepted"
    if (experts := figures["explained"].get("experts")) is not None and experts >= _GAIN:
        reason += f", and its target pass reads {experts:.2f} times the experts"
    return reason


def _details(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a generation, the most important first."""
    time, lines = figures["time"], []
    if figures["steps"]:
        text = f"{figures['tokens_per_step']:.2f} tokens per step"
        if figures["drafted"]:
            drafts = counted(figures["drafted"], "draft token")
            text += f", {figures['accepted']} of {drafts} accepted ({figures['acceptance_rate']:.0%})"
            if figures["nodes"] > figures["drafted"]:
                text += f" along trees of {figures['nodes'] / figures['steps']:.1f} nodes"
        elif figures["drafter"] != "none":
            text += ", nothing drafted"
        lines.append(("steps", text))
    if time["mask_s"]:
        free = figures["accepted"] - figures["forced"]
        text = f"{counted(figures['forced'], 'token')} forced, {free} of other drafts, {figures['corrected']} corrected"
        lines.append(("format", f"{text}; masks take {time['mask_s'] / time['decode_s']:.1%} of the time"))
    output = tokens_text(figures["new_tokens"], figures["steps"], figures["tokens_per_step"])
    lines.append(("output", f"{output}, {_ENDS[figures['finish_reason']]}"))
    model = f"{figures['target']} ({figures['dtype']}), drafter {figures['drafter']}"
    if figures["drafter"] != "none":
        model += f", γ {_gamma(figures)}"
    lines.append(("model", model))
    lines.append(("time", f"first token after {time['ttft_s']:.2f} s, decoding {time['decode_s']:.2f} s"))
    if time["decode_s"]:
        shares = ", ".join(f"{part} {time[f'{part}_s'] / time['decode_s']:.0%}" for part in PARTS)
        lines.append(("parts", shares))
    experts = (figures.get("explained") or {}).get("experts")
    if experts is not None:
        lines.append(("experts", f"a step reads {experts:.2f} times the experts of a plain one"))
    if (share := figures.get("draftable_share")) is not None:
        lines.append(("drafter", f"{share:.0%} of the output's tokens are in its vocabulary"))
    if figures.get("repeats"):
        prompts = "(`specbench sweep` measures several prompts)"
        lines.append(("repeats", f"{counted(len(figures['repeats']), 'pair')} of this prompt {prompts}"))
    return lines


def _gamma(figures: Mapping[str, Any]) -> str:
    """Return the draft length; of a draft policy that decides it, the mean."""
    options = figures["options"]
    if options["gamma"] is not None:
        return (
            f"{options['gamma']}{', fixed so that a seed repeats its output' * (options['temperature'] > 0)}"
        )
    mean = f", {figures['drafted'] / figures['steps']:.1f} on average" if figures["steps"] else ""
    verified = f", verified by {options['verification']}" if options["verification"] else ""
    return f"by {options['draft_policy']}{mean}{verified}"


def _tokens(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Return whether the outputs of a comparison are the same."""
    if figures["identical"]:
        return "tokens", "identical to plain decoding"
    if figures["identical"] is None:
        text = "sampled, so they differ from plain decoding's by design; their distribution is the same"
        return "tokens", text
    text = _difference(figures["difference"])
    differing, pairs = figures["differing_repeats"], len(figures["repeats"])
    return "tokens", text if differing == pairs else f"{text}; in {differing} of {pairs} repeats"


def _difference(difference: Mapping[str, Any]) -> str:
    ours, plain = ("(end)" if text is None else f"'{visible(text)}'" for text in difference["texts"])
    verdict = "a numerical tie" if difference["numerical_tie"] else "NO numerical tie: please report it"
    units = f"{difference['gap_units']:.1f} rounding units of {difference['rounding']}"
    return (
        f"differ from plain decoding's at {difference['position']}, {ours} against {plain}, with logits"
        f" {difference['gap']:.3g} apart ({units}): {verdict}"
    )


def show_many(
    done: Sequence[Generation],
    *,
    prompts: int,
    failed: int,
    seconds: float,
    use: PoolUsage | None,
    why_not_batched: str | None,
    spaced: bool,
) -> None:
    """Print the figures of many prompts; ``use`` is that of the target's KV cache, ``None`` if it is not shared."""
    console = _console()
    if spaced:
        console.print()
    steps = [step for generation in done for step in generation.steps]
    tokens = sum(len(generation.token_ids) for generation in done)
    ends = f"{len(done)} of {counted(prompts, 'prompt')} done" + (f", {failed} failed" if failed else "")
    if tokens and seconds:
        ends += f": {counted(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s together"
    _line(console, "", f"{ends}.", "bold", indent=0)
    if steps:
        output = tokens_text(tokens, len(steps), tokens_per_step(steps))
        _line(console, "steps", ", ".join([output, *_accepted(steps)]))
    if use is not None:
        most, budget = (counted(blocks * use.block, "token") for blocks in (use.peak, use.blocks))
        _line(console, "memory", f"KV cache of at most {most} at a time, {budget} fit")
    if why_not_batched is not None:
        _line(console, "note", f"no forward passes were shared: {why_not_batched}")


def _accepted(steps: Sequence[Step]) -> list[str]:
    """Return how many draft tokens were accepted, if there were any."""
    if not steps or (rate := acceptance_rate(steps)) is None:
        return []
    drafted, accepted = sum(step.gamma for step in steps), sum(step.accepted for step in steps)
    return [f"{accepted} of {counted(drafted, 'draft token')} accepted ({rate:.0%})"]


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _line(console: Console, label: str, text: str, style: str = "", *, indent: int = _LABEL) -> None:
    """Print a label and its text, which is wrapped in its column on a terminal."""
    from rich.text import Text

    text = " ".join(terminal_safe(text).split())
    lines = [Text(text, style)]
    if console.is_terminal:
        lines = list(lines[0].wrap(console, max(min(console.width, _WIDEST) - indent, 20)))
    for number, line in enumerate(lines):
        line.rstrip()
        head = Text(f"{'' if number else label:{indent}}", "dim")
        console.print(head.append_text(line), soft_wrap=True)
