"""vLLM: `vllm serve --speculative-config`."""

from __future__ import annotations

import json

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Setting
from specbench.specs.drafters import DrafterSpec, Lookup, SmallModel, Suffix


class VLLM:
    """See ``Engine``."""

    name = "vllm"
    title = "vLLM"
    version = "0.33.0"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, Suffix, SmallModel)
    rules: tuple[str, ...] = ()

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter, gamma = setting.drafter, setting.gamma
        needs, differs = list(engine.model_needs(setting)), []
        missing = list(engine.without_counterpart(self, setting, ("block",)))
        speculative: Json
        if isinstance(drafter, Lookup):
            speculative = {
                "method": "ngram",
                "prompt_lookup_max": drafter.longest,
                "prompt_lookup_min": drafter.min,
            }
            differs.append(engine.OLDEST_MATCH)
        elif isinstance(drafter, Suffix):
            # The depth of its trees is that of match and draft together; past answers make up the global tree.
            speculative = {"method": "suffix", "suffix_decoding_max_tree_depth": drafter.n + gamma}
            if not drafter.keep:
                speculative["suffix_decoding_max_cached_requests"] = 0
            needs.append("pip install arctic-inference, which this method is from.")
            missing += [f"min={drafter.min}, the shortest match."] if drafter.min > 1 else []
            differs.append(
                "γ is the most there: a draft gets no longer than its match (suffix_decoding_max_spec_factor), and ends"
                " where its tokens get rare (suffix_decoding_min_token_prob)."
            )
        elif isinstance(drafter, SmallModel):
            assert setting.assistant is not None
            head = engine.head_of(self, setting)
            method = "draft_model" if head is None else head.method
            speculative = {"method": method, "model": setting.assistant.name}
            if setting.head == "peagle":
                speculative["parallel_drafting"] = True
            speculative |= engine.revision(setting.assistant, "revision")
            if setting.temperature:
                speculative["draft_sample_method"] = "probabilistic"  # as specbench drew and tested
                if setting.rule.options.get("verification") == "block":
                    speculative["rejection_sample_method"] = "block"
            else:
                differs.append(
                    f'{engine.GREEDY_DRAFTS} "draft_sample_method": "probabilistic" is specbench\'s way.'
                )
        else:
            raise engine.refuse(self, setting)
        speculative["num_speculative_tokens"] = gamma
        differs.append(
            "γ is num_speculative_tokens, without the bonus token, at every batch size. Drafts stop paying in large"
            " batches, for which num_speculative_tokens_per_batch_size takes a γ by batch size."
        )
        options = {
            **engine.revision(setting.target, "--revision"),
            **engine.floating(setting.dtype, "--dtype"),
            "--speculative-config": speculative,
        }
        shown = options | {"--speculative-config": json.dumps(speculative)}
        return engine.Export(
            engine.command(["vllm", "serve", setting.target.name], shown),
            options,
            needs,
            missing,
            [*differs, *engine.of_requests(setting)],
            "curl -s localhost:8000/metrics | grep vllm:spec_decode: num_drafts, num_draft_tokens and"
            " num_accepted_tokens grow with every answer; a step emits 1 + accepted / drafts tokens.",
        )
