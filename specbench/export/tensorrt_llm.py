"""TensorRT-LLM: `trtllm-serve --config`, a YAML file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import ClassVar

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.engine import HeadSupport
from specbench.export.setting import Setting, location
from specbench.specs.drafters import Lookup, Mtp, SmallModel

_FILE = "speculation.yaml"


class TensorRTLLM(engine.ExportEngine):
    """TensorRT-LLM's server. Heads were read in ``_torch/models/modeling_auto.py`` and ``llmapi/llm_args.py``."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    version = "1.2.1"
    drafters = (Lookup, SmallModel, Mtp)
    heads: ClassVar[Mapping[str, HeadSupport]] = {"eagle3": HeadSupport("Eagle3", speculators=False)}

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter = setting.drafter
        speculative: Json = {"max_draft_len": setting.gamma}
        if isinstance(drafter, Lookup):
            speculative |= {
                "decoding_type": "NGram",
                "max_matching_ngram_size": drafter.longest,
                "is_keep_all": True,
                "is_use_oldest": False,
                "is_public_pool": False,
            }
            export.missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
        elif isinstance(drafter, Mtp):
            speculative = {"decoding_type": "MTP", "num_nextn_predict_layers": setting.gamma}
            export.differs.append(engine.GREEDY_DRAFTS)
        else:
            # The documentation writes DraftTarget, which the parser of this version does not take.
            speculative |= {
                "decoding_type": self.method(setting, "Draft_Target"),
                "speculative_model": location(setting.draft_model),
            }
            export.differs.append(engine.GREEDY_DRAFTS)
        export.missing += [
            f"Revision {model.revision} of {location(model)}: name a folder that holds it."
            for model in setting.models
            if model.revision is not None
        ]
        gamma = "num_nextn_predict_layers" if isinstance(drafter, Mtp) else "max_draft_len"
        export.options = {
            **engine.floating(setting.dtype, "dtype"),
            "disable_overlap_scheduler": True,
            "speculative_config": speculative,
        }
        export.text = (
            f"cat > {_FILE} <<'YAML'\n{json.dumps(export.options, indent=2)}\nYAML\n"  # JSON is YAML
            f"trtllm-serve {shlex.quote(location(setting.target))} --config {_FILE}\n"
        )
        export.differs += [
            f"γ is {gamma}, without the bonus token, at every batch size; max_concurrency switches drafts off above the"
            " batch size where they stop paying.",
            engine.request_note(setting),
        ]
        export.check = (
            "The server's log names the speculative configuration at its start. Then compare the time of an answer with"
            " and without --config at batch size 1."
        )
