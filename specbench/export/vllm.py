"""vLLM: `vllm serve --speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.engine import HeadSupport
from specbench.export.setting import Setting, location
from specbench.export.start import StartedEngine
from specbench.specs.drafters import Lookup, Mtp, SmallModel, Suffix
from specbench.specs.models import ModelSpec


class VLLM(StartedEngine):
    """vLLM's server."""

    name = "vllm"
    title = "vLLM"
    version = "0.33.0"
    drafters = (Lookup, Suffix, SmallModel, Mtp)
    verifications = ("block",)
    heads: ClassVar[Mapping[str, HeadSupport]] = {
        "eagle": HeadSupport("eagle3"),
        "eagle3": HeadSupport("eagle3"),
        "peagle": HeadSupport("eagle3"),
        "eagle-1": HeadSupport("eagle"),
        "dflash": HeadSupport("dflash"),
        "dflash2": HeadSupport("dflash"),
        "dspark": HeadSupport("dspark"),
        "pard": HeadSupport("draft_model"),
    }

    other_tokens = '"use_heterogeneous_vocab": true, which takes greedy drafts only'

    server = ("vllm", "serve")
    listening = ("--port",)
    reporting = ("--per-request-spec-decode-metrics", "detailed")
    ngrams: ClassVar[Mapping[str, str | Json]] = {"ngram": "lookup:n=4,min=2", "suffix": "suffix"}

    def target_options(self, target: ModelSpec) -> Json:
        return {"": location(target), **engine.revision(target, "--revision")}

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter, gamma = setting.drafter, setting.gamma
        speculative: Json
        if isinstance(drafter, Lookup):
            speculative = {
                "method": "ngram",
                "prompt_lookup_max": drafter.longest,
                "prompt_lookup_min": drafter.min,
            }
            export.differs.append(engine.OLDEST_MATCH)
        elif isinstance(drafter, Suffix):
            # The depth of its trees counts match and draft together; past answers make up the global tree.
            speculative = {"method": "suffix", "suffix_decoding_max_tree_depth": drafter.n + gamma}
            if not drafter.keep:
                speculative["suffix_decoding_max_cached_requests"] = 0
            export.needs.append("pip install arctic-inference, which has this method.")
            export.missing += [f"min={drafter.min}, the shortest match."] if drafter.min > 1 else []
            export.differs.append(
                "γ is an upper limit: a draft is no longer than its match (suffix_decoding_max_spec_factor) and ends at"
                " rare tokens (suffix_decoding_min_token_prob)."
            )
        else:
            if isinstance(drafter, Mtp):
                speculative = {"method": "mtp"}
            else:
                model = setting.draft_model
                speculative = {"method": self.method(setting, "draft_model"), "model": location(model)}
                if setting.head is not None and setting.head.kind in ("peagle", "pard"):
                    speculative["parallel_drafting"] = True
                speculative |= engine.revision(model, "revision")
            if setting.temperature:
                speculative["draft_sample_method"] = "probabilistic"  # as specbench samples and tests
                export.needs.append(
                    "vLLM 0.29.0 or newer: with such drafts, older versions do not keep the target's distribution."
                )
                if setting.policy.verification == "block":
                    speculative["rejection_sample_method"] = "block"
            else:
                export.differs.append(
                    f'{engine.GREEDY_DRAFTS} "draft_sample_method": "probabilistic" does as specbench does.'
                )
        speculative["num_speculative_tokens"] = gamma
        export.options = {
            **engine.revision(setting.target, "--revision"),
            **engine.floating(setting.dtype, "--dtype"),
            "--speculative-config": speculative,
        }
        shown = export.options | {"--speculative-config": json.dumps(speculative)}
        export.text = engine.command([*self.server, location(setting.target)], shown)
        export.differs += [
            "γ is num_speculative_tokens, without the bonus token, at every batch size. Drafts stop paying in large"
            " batches; num_speculative_tokens_per_batch_size sets γ by batch size.",
            engine.request_note(setting),
        ]
        export.check = (
            "curl -s localhost:8000/metrics | grep vllm:spec_decode: num_drafts, num_draft_tokens and"
            " num_accepted_tokens grow with every answer; tokens per step are 1 + accepted / drafts."
        )
