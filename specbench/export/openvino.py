"""OpenVINO GenAI: `LLMPipeline` in Python."""

from __future__ import annotations

import shlex

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Setting, location, stem
from specbench.specs.drafters import Lookup, SmallModel
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Confidence


class OpenVino(engine.ExportEngine):
    """OpenVINO GenAI's pipeline."""

    name = "openvino"
    title = "OpenVINO GenAI"
    version = "2026.4.1.0"
    drafters = (Lookup, SmallModel)
    policies = ("confidence",)

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter = setting.drafter
        config: Json = {"num_assistant_tokens": setting.gamma}
        if isinstance(drafter, Lookup):
            pipeline: Json = {"prompt_lookup": True}
            argument = "prompt_lookup=True"
            config["max_ngram_size"] = drafter.longest
            export.missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
            export.differs.append(engine.OLDEST_MATCH)
            report = ""
            export.check = "Compare the time of an answer with and without prompt_lookup."
        else:
            folder = _folder(setting.draft_model)
            pipeline = {"draft_model": folder}
            argument = f'draft_model=openvino_genai.draft_model({folder!r}, "CPU")'
            if isinstance(setting.policy, Confidence):
                config = {"assistant_confidence_threshold": setting.policy.threshold}
                export.missing.append("Longest draft: a threshold excludes num_assistant_tokens.")
            export.differs.append(
                "Above temperature 0 it accepts a draft by the drafter's probability of it over the target's of the"
                " token that the target sampled. That does not keep the target's distribution: greedy decoding is"
                " lossless, sampling need not be."
            )
            report = (
                "metrics = result.extended_perf_metrics\n"
                'print(f"{metrics.get_draft_acceptance_rate():.0%} of the draft tokens were accepted")\n'
            )
            export.check = "The last line prints the share of draft tokens that were accepted."
        export.differs.append(
            "γ does not count the bonus token. On the stateful backend (NPU) it is only the first value, and adapts to"
            " what is accepted."
        )
        sampling = (
            f"config.do_sample = True\nconfig.temperature = {setting.temperature:g}\n"
            if setting.temperature
            else "config.do_sample = False\n"
        )
        settings = "".join(f"config.{name} = {value!r}\n" for name, value in config.items())
        export.text = (
            "import openvino_genai\n\n"
            f'pipeline = openvino_genai.LLMPipeline({_folder(setting.target)!r}, "CPU", {argument})\n'
            f"config = pipeline.get_generation_config()\nconfig.max_new_tokens = 256\n{sampling}{settings}"
            f'result = pipeline.generate(["Why is the sky blue?"], config)\nprint(result.texts[0])\n{report}'
        )
        export.options = {"LLMPipeline": pipeline, "GenerationConfig": config}
        export.needs = [
            f"optimum-cli export openvino --model {shlex.quote(location(model))} {shlex.quote(_folder(model))}"
            for model in setting.models
        ]


def _folder(model: ModelSpec) -> str:
    return f"{stem(model)}-openvino"
