"""OpenVINO GenAI: `LLMPipeline` in Python."""

from __future__ import annotations

import shlex

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Model, Setting
from specbench.specs.drafters import DrafterSpec, Lookup, SmallModel


class OpenVino:
    """See ``Engine``."""

    name = "openvino"
    title = "OpenVINO GenAI"
    version = "2026.4.1.0"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, SmallModel)
    rules: tuple[str, ...] = ("confidence",)

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter, differs = setting.drafter, []
        missing = list(engine.without_counterpart(self, setting))
        config: Json = {"num_assistant_tokens": setting.gamma}
        check = "Compare the time of an answer with and without prompt_lookup."
        report = ""
        if isinstance(drafter, Lookup):
            pipeline: Json = {"prompt_lookup": True}
            made = "prompt_lookup=True"
            config["max_ngram_size"] = drafter.longest
            missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
            differs.append(engine.OLDEST_MATCH)
        elif isinstance(drafter, SmallModel):
            assert setting.assistant is not None
            pipeline = {"draft_model": _folder(setting.assistant)}
            made = f'draft_model=openvino_genai.draft_model({_folder(setting.assistant)!r}, "CPU")'
            if setting.rule.word == "confidence":
                threshold = setting.rule.options.get("threshold", 0.4)
                config = {"assistant_confidence_threshold": threshold}
                missing.append("The most tokens of a draft: a threshold excludes num_assistant_tokens.")
            differs.append(
                "Above temperature 0 it keeps a draft by the drafter's probability of it over the target's of the token"
                " that the target drew, which is not the test that keeps the target's distribution: greedy decoding is"
                " the same, sampling need not be."
            )
            report = (
                "metrics = result.extended_perf_metrics\n"
                'print(f"{metrics.get_draft_acceptance_rate():.0%} of the drafts were accepted")\n'
            )
            check = "The last line prints the share of drafts that were accepted."
        else:
            raise engine.refuse(self, setting)
        differs.append(
            "γ does not count the bonus token. On the stateful backend (NPU) it is the beginning only, and moves with"
            " what is accepted."
        )
        settings = "".join(f"config.{name} = {value!r}\n" for name, value in config.items())
        return engine.Export(
            "import openvino_genai\n\n"
            f'pipeline = openvino_genai.LLMPipeline({_folder(setting.target)!r}, "CPU", {made})\n'
            f"config = pipeline.get_generation_config()\nconfig.max_new_tokens = 256\n{_sampling(setting)}{settings}"
            f'result = pipeline.generate(["Why is the sky blue?"], config)\nprint(result.texts[0])\n{report}',
            {"LLMPipeline": pipeline, "GenerationConfig": config},
            [
                f"optimum-cli export openvino --model {shlex.quote(model.name)} {shlex.quote(_folder(model))}"
                for model in (setting.target, setting.assistant)
                if model is not None
            ],
            missing,
            differs,
            check,
        )


def _folder(model: Model) -> str:
    return f"{model.stem}-openvino"


def _sampling(setting: Setting) -> str:
    if not setting.temperature:
        return "config.do_sample = False\n"
    return f"config.do_sample = True\nconfig.temperature = {setting.temperature:g}\n"
