"""The engines that settings are exported to, and an export as a file and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench._version import __version__
from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.base.textsafe import one_line
from specbench.export.engine import Export, ExportEngine, head_of, kinds, refuse
from specbench.export.llama_cpp import LlamaCpp
from specbench.export.mlx_lm import MlxLm
from specbench.export.openvino import OpenVino
from specbench.export.setting import Model, Setting, with_replaced
from specbench.export.sglang import SGLang
from specbench.export.tensorrt_llm import TensorRTLLM
from specbench.export.transformers import Transformers
from specbench.export.vllm import VLLM
from specbench.specs.drafters import DrafterSpec
from specbench.specs.rules import parse_rule

if TYPE_CHECKING:
    from specbench.models.training_metadata import TrainingMetadata
    from specbench.results.results import Results

    pass

ENGINES: Mapping[str, ExportEngine] = {
    engine.name: engine
    for engine in (Transformers(), VLLM(), SGLang(), LlamaCpp(), TensorRTLLM(), MlxLm(), OpenVino())
}
"""In the order in which listings have them."""


def export_setting(engine: ExportEngine, setting: Setting) -> Export:
    """A setting in an engine's words.

    Raises:
        UsageError: It cannot be expressed.
    """
    there = head_of(engine, setting)
    made = engine.export(setting)
    return replace(made, needs=[*made.needs, there.needs]) if there is not None and there.needs else made


def expresses(engine: ExportEngine, drafter: DrafterSpec, training: TrainingMetadata | None = None) -> bool:
    """Whether an engine has a drafter.

    Args:
        engine: The engine.
        drafter: Any.
        story: What is told of the trained head in it; ``None`` without one.
    """
    setting = Setting(Model("target"), drafter, parse_rule("fixed"), 1).with_head(training)
    try:
        export_setting(engine, setting)
    except UsageError:
        return False
    return True


def export_fastest(
    engine: ExportEngine, settings: Sequence[Setting], results: Results
) -> tuple[Setting, Export]:
    """The fastest setting that an engine has, with the fastest of all beside it, and its export.

    In place of the fastest of all, a setting whose rule the engine lacks is exported only where no fixed γ was measured
    with its drafter: otherwise that is what the engine gets, and what figures have to be about.

    Args:
        engine: The engine.
        settings: Of a run, the fastest first.
        results: That run.

    Raises:
        UsageError: It has none of them.
    """
    fixed = {setting.drafter for setting in settings if not setting.gamma_from}
    for setting in settings:
        replaced = setting.gamma_from and setting.rule.word not in engine.rules
        if replaced and setting.drafter in fixed and setting is not settings[0]:
            continue
        try:
            made = export_setting(engine, setting)
        except UsageError:
            continue
        return (setting if setting is settings[0] else with_replaced(results, setting, settings[0])), made
    drafters = dict.fromkeys(str(setting.drafter) for setting in settings)
    what = refuse(engine, settings[0]).message
    if len(drafters) > 1:
        names = ", ".join(drafters)
        what = f"{engine.title} cannot express any of the drafters that were measured, {names}; it has {kinds(engine)}."
    raise UsageError(what, "Measure a setting with one of these, or export to another engine.")


def as_file(engine: ExportEngine, setting: Setting, export: Export, source: str) -> str:
    """What to run, with all that is to be known as comments before and behind it."""
    head = [
        f"Made for {engine.title} {engine.version} by specbench {__version__}, from {source}.",
        *(_measured(setting)),
        *(f"Before: {each}" for each in export.needs),
    ]
    foot = [
        *(f"Not there: {each}" for each in export.missing),
        *(f"Differs there: {each}" for each in export.differs),
        f"Is it on? {export.check}",
    ]
    return f"{_comments(head)}\n{export.text}\n{_comments(foot)}"


def _measured(setting: Setting) -> Iterator[str]:
    measured = setting.measured
    if measured is None:
        return
    if setting.replaces is not None:
        yield (
            f"The fastest setting of the run, {setting.replaces.fastest}, has no counterpart there. This is the fastest"
            f" that has one, {setting.replaces}."
        )
    best = "The best setting of the run" if measured.best else "Measured"
    at = f" at temperature {setting.temperature:g}" if setting.temperature else ""
    yield f"{best}{at}, {measured}, in specbench. Another engine on another machine has other costs: measure there too."
    if measured.verdict != "faster":
        yield (
            "It was slower than plain decoding: better leave speculation off."
            if measured.verdict == "slower"
            else "It cannot be told from plain decoding: measure more before you deploy it."
        )


def _comments(notes: list[str]) -> str:
    wrapped = textwrap.TextWrapper(
        100, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{wrapped.fill(one_line(note))}\n" for note in notes)


def as_json(engine: ExportEngine, setting: Setting, export: Export, source: str) -> Json:
    """The same as data; an interval is ``None`` where there is none."""
    measured = setting.measured
    return {
        "engine": engine.name,
        "version": engine.version,
        "source": source,
        "setting": {
            "target": setting.target.name,
            "drafter": str(setting.drafter),
            "length_policy": str(setting.rule),
            "gamma": setting.gamma,
            "gamma_from": setting.gamma_from or None,
            "dtype": setting.dtype,
            "drafter_dtype": setting.drafter_dtype,
            "temperature": setting.temperature,
        },
        "measured": None
        if measured is None
        else {
            "config": measured.config,
            "best": measured.best,
            "speedup": measured.speedup.value,
            "low": measured.speedup.low,
            "high": measured.speedup.high,
            "verdict": measured.verdict,
            "in_place_of": _in_place_of(setting),
        },
        "options": export.options,
        "text": export.text,
        "needs": list(export.needs),
        "missing": list(export.missing),
        "differs": list(export.differs),
        "check": export.check,
    }


def _in_place_of(setting: Setting) -> Json | None:
    beside = setting.replaces
    if beside is None:
        return None
    share = beside.share
    return {
        "config": beside.fastest.config,
        "share": share.value if share.prompts else None,
        "low": share.low,
        "high": share.high,
    }
