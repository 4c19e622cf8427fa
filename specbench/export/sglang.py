"""SGLang: `python -m sglang.launch_server --speculative-algorithm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.engine import HeadSupport
from specbench.export.setting import Setting, location
from specbench.export.start import StartedEngine
from specbench.specs.drafters import Lookup, Mtp, SmallModel, Suffix
from specbench.specs.models import ModelSpec


class SGLang(StartedEngine):
    """SGLang's server."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    drafters = (Lookup, Suffix, SmallModel, Mtp)
    verifications = ("block",)
    heads: ClassVar[Mapping[str, HeadSupport]] = {
        "eagle3": HeadSupport("EAGLE3", speculators=False),
        "dflash": HeadSupport("DFLASH", speculators=False),
        "dflash2": HeadSupport("DFLASH", speculators=False),
        "dspark": HeadSupport("DSPARK", speculators=False),
    }

    server = ("python", "-m", "sglang.launch_server")
    listening = ("--enable-metrics", "--port")
    ngrams: ClassVar[Mapping[str, str | Json]] = {"ngram": "lookup", "ngram-prob": "suffix"}

    def target_options(self, target: ModelSpec) -> Json:
        return {"--model-path": location(target), **engine.revision(target, "--revision")}

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter, width = setting.drafter, setting.gamma + 1
        export.options = {**self.target_options(setting.target), **engine.floating(setting.dtype, "--dtype")}
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
        elif isinstance(drafter, Mtp):
            export.options |= {
                "--speculative-algorithm": "NEXTN",
                "--speculative-num-steps": setting.gamma,
                "--speculative-eagle-topk": 1,
                "--speculative-num-draft-tokens": width,
            }
        else:
            steps: Json = {"--speculative-num-steps": setting.gamma, "--speculative-eagle-topk": 1}
            if setting.head is not None and setting.head.kind in ("dflash", "dflash2", "dspark"):
                steps = {}  # all in one pass
                if setting.head.kind == "dspark":
                    steps["--speculative-dspark-block-size"] = setting.gamma
            export.options |= {
                "--speculative-algorithm": self.method(setting, "STANDALONE"),
                "--speculative-draft-model-path": location(setting.draft_model),
                **engine.revision(setting.draft_model, "--speculative-draft-model-revision"),
                **steps,
                "--speculative-num-draft-tokens": width,
                "--speculative-draft-model-quantization": "unquant",
            }
            export.differs += [
                "Without --speculative-draft-model-quantization the drafter inherits the target's quantization; with"
                " unquant it runs as its checkpoint is stored.",
            ]
        _sample(setting, export)
        export.text = engine.command(self.server, export.options)
        export.differs += [
            f"--speculative-num-draft-tokens counts verified tokens: γ = {setting.gamma} and the token before them.",
            "With speculation it decodes 48 requests at a time unless --max-running-requests is given.",
            engine.request_note(setting),
        ]
        export.check = (
            "meta_info of an answer of /generate has spec_verify_ct and spec_accept_length, the tokens per step; 1.0"
            " means that no draft was accepted. /server_info has the server's average."
        )


def _sample(setting: Setting, export: engine.Export) -> None:
    """Let drafts be sampled and tested as specbench does, where the engine can (``arg_groups/speculative_hook.py``)."""
    algorithm = export.options["--speculative-algorithm"]
    always = setting.head is not None and setting.head.kind in ("dflash2", "dspark")
    can = always or algorithm in ("EAGLE3", "NEXTN")
    if setting.temperature and can and not always:
        export.options["--speculative-use-rejection-sampling"] = None
    elif not can and algorithm != "NGRAM":
        export.differs.append(engine.GREEDY_DRAFTS)
    if setting.temperature and setting.policy.verification == "block":
        if can:
            export.options["--speculative-use-block-verification"] = None
        else:
            export.missing.append("Verification method block.")
