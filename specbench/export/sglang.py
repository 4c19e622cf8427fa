"""SGLang: `python -m sglang.launch_server --speculative-algorithm`."""

from __future__ import annotations

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Setting
from specbench.specs.drafters import DrafterSpec, Lookup, SmallModel, Suffix


class SGLang:
    """See ``Engine``."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, Suffix, SmallModel)
    rules: tuple[str, ...] = ()

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter, width = setting.drafter, setting.gamma + 1
        missing, differs = list(engine.without_counterpart(self, setting)), []
        options: Json = {
            **engine.revision(setting.target, "--revision"),
            **engine.floating(setting.dtype, "--dtype"),
        }
        if isinstance(drafter, SmallModel):
            assert setting.assistant is not None
            head = engine.head_of(self, setting)
            chain = {"--speculative-num-steps": setting.gamma, "--speculative-eagle-topk": 1}
            options |= {
                "--speculative-algorithm": "STANDALONE" if head is None else head.method,
                "--speculative-draft-model-path": setting.assistant.name,
                **engine.revision(setting.assistant, "--speculative-draft-model-revision"),
                **({} if setting.head == "dflash" else chain),  # which drafts all in one pass
                "--speculative-num-draft-tokens": width,
                "--speculative-draft-model-quantization": "unquant",
            }
            differs += [
                "Without --speculative-draft-model-quantization the drafter inherits the target's quantization; with"
                " unquant it is as its checkpoint is.",
                engine.GREEDY_DRAFTS,
            ]
        elif isinstance(drafter, Lookup | Suffix):
            options |= {
                "--speculative-algorithm": "NGRAM",
                "--speculative-num-draft-tokens": width,
                "--speculative-ngram-min-bfs-breadth": 1,
                "--speculative-ngram-max-bfs-breadth": 1,  # a chain
                "--speculative-ngram-match-type": "BFS" if isinstance(drafter, Lookup) else "PROB",
            }
            missing.append(
                f"n={drafter.n or 'any'} and min={drafter.min}, the lengths of a match: its trie takes the longest that"
                " it holds (--speculative-ngram-max-trie-depth)."
            )
            differs.append(
                "Its trie is one for all requests, so that answers of others are copied too, and it gets better as it"
                " warms up."
            )
        else:
            raise engine.refuse(self, setting)
        differs += [
            f"--speculative-num-draft-tokens counts what is verified: γ = {setting.gamma} and the token before it.",
            "With speculation it decodes 48 requests at a time unless --max-running-requests says otherwise.",
        ]
        return engine.Export(
            engine.command(
                ["python", "-m", "sglang.launch_server", "--model-path", setting.target.name], options
            ),
            {"--model-path": setting.target.name, **options},
            list(engine.model_needs(setting)),
            missing,
            [*differs, *engine.of_requests(setting)],
            "An answer of /generate has meta_info.spec_verify_ct and spec_accept_length, the tokens of a step with the"
            " bonus token; 1.0 means that no draft was kept. /server_info has the server's average.",
        )
