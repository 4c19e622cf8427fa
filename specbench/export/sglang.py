"""SGLang: `python -m sglang.launch_server --speculative-algorithm`."""

from __future__ import annotations

from typing import ClassVar

from specbench.export import engine
from specbench.export.engine import NO_SPECULATORS, Heads, HeadSupport, in_format_of_authors
from specbench.export.setting import Setting
from specbench.specs.drafters import Lookup, SmallModel, Suffix


class SGLang(engine.ExportEngine):
    """SGLang's server."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    drafters = (Lookup, Suffix, SmallModel)
    heads: ClassVar[Heads] = {
        "eagle": NO_SPECULATORS,
        "eagle3": HeadSupport("EAGLE3", in_format_of_authors("EAGLE-3"), speculators=False),
        "peagle": "its EAGLE3 drafts one token after the other, P-EAGLE all in one pass",
        "eagle-1": "it does not read EAGLE-1 heads whose config.json names LlamaForCausalLM, as the authors' does",
        "dflash": HeadSupport("DFLASH", in_format_of_authors("DFlash"), speculators=False),
    }

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter, width = setting.drafter, setting.gamma + 1
        export.options = {
            "--model-path": setting.target.name,
            **engine.revision(setting.target, "--revision"),
            **engine.floating(setting.dtype, "--dtype"),
        }
        if isinstance(drafter, Lookup | Suffix):
            export.options |= {
                "--speculative-algorithm": "NGRAM",
                "--speculative-num-draft-tokens": width,
                "--speculative-ngram-min-bfs-breadth": 1,
                "--speculative-ngram-max-bfs-breadth": 1,  # a chain
                "--speculative-ngram-match-type": "BFS" if isinstance(drafter, Lookup) else "PROB",
            }
            export.missing.append(
                f"n={drafter.n or 'any'} and min={drafter.min}, the lengths of a match: its trie uses the longest match"
                " that it holds (--speculative-ngram-max-trie-depth)."
            )
            export.differs.append(
                "All requests share one trie, so answers of others are copied too, and drafts improve over time."
            )
        else:
            is_dflash = setting.head is not None and setting.head.kind == "dflash"  # drafts all in one pass
            chain = {"--speculative-num-steps": setting.gamma, "--speculative-eagle-topk": 1}
            export.options |= {
                "--speculative-algorithm": self.method(setting, "STANDALONE"),
                "--speculative-draft-model-path": setting.draft_model.name,
                **engine.revision(setting.draft_model, "--speculative-draft-model-revision"),
                **({} if is_dflash else chain),
                "--speculative-num-draft-tokens": width,
                "--speculative-draft-model-quantization": "unquant",
            }
            export.differs += [
                "Without --speculative-draft-model-quantization the drafter inherits the target's quantization; with"
                " unquant it runs as its checkpoint is stored.",
                engine.GREEDY_DRAFTS,
            ]
        export.text = engine.command(["python", "-m", "sglang.launch_server"], export.options)
        export.differs += [
            f"--speculative-num-draft-tokens counts verified tokens: γ = {setting.gamma} and the token before them.",
            "With speculation it decodes 48 requests at a time unless --max-running-requests is given.",
            *engine.request_notes(setting),
        ]
        export.check = (
            "meta_info of an answer of /generate has spec_verify_ct and spec_accept_length, the tokens per step; 1.0"
            " means that no draft was accepted. /server_info has the server's average."
        )
