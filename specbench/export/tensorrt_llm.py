"""TensorRT-LLM: `trtllm-serve --config`, a YAML file."""

from __future__ import annotations

import json
import shlex

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Setting
from specbench.specs.drafters import DrafterSpec, Lookup, SmallModel

_FILE = "speculation.yaml"


class TensorRTLLM:
    """See ``Engine``."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    version = "1.2.1"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, SmallModel)
    rules: tuple[str, ...] = ()

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter = setting.drafter
        missing, differs = list(engine.without_counterpart(self, setting)), []
        speculative: Json = {"max_draft_len": setting.gamma}
        if isinstance(drafter, Lookup):
            speculative |= {
                "decoding_type": "NGram",
                "max_matching_ngram_size": drafter.longest,
                "is_keep_all": True,
                "is_use_oldest": False,
                "is_public_pool": False,
            }
            missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
        elif isinstance(drafter, SmallModel):
            assert setting.assistant is not None
            head = engine.head_of(self, setting)
            # The documentation writes DraftTarget, which the parser of this version does not take.
            kind = "Draft_Target" if head is None else head.method
            speculative |= {"decoding_type": kind, "speculative_model": setting.assistant.name}
            differs.append(engine.GREEDY_DRAFTS)
        else:
            raise engine.refuse(self, setting)
        missing += [
            f"The revision {model.revision} of {model.name}: name a folder that holds it."
            for model in (setting.target, setting.assistant)
            if model is not None and model.revision is not None
        ]
        options: Json = {
            **engine.floating(setting.dtype, "dtype"),
            "disable_overlap_scheduler": True,
            "speculative_config": speculative,
        }
        differs.append(
            "γ is max_draft_len, without the bonus token, for every request and at every batch size; max_concurrency"
            " switches drafts off above a batch size, which is where they stop paying."
        )
        return engine.Export(
            f"cat > {_FILE} <<'YAML'\n{_yaml(options)}YAML\n"
            f"trtllm-serve {shlex.quote(setting.target.name)} --config {_FILE}\n",
            options,
            list(engine.model_needs(setting)),
            missing,
            [*differs, *engine.of_requests(setting)],
            "The server's log at its start names the speculative configuration; then compare the time of an answer with"
            " and without --config: at batch size 1 drafts that are kept show there.",
        )


def _yaml(values: Json, indent: str = "") -> str:
    """Mappings of text, numbers and truths; JSON's notation of these is YAML's."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
