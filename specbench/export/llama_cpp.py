"""llama.cpp: `llama-server --spec-type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.engine import HeadSupport
from specbench.export.setting import Setting, location, stem
from specbench.export.start import GAMMA, StartedEngine
from specbench.specs.drafters import Cascade, DrafterSpec, Lookup, Mtp, SmallModel
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Confidence

_CONVERTED = (
    "The head, of one decoder layer, as a GGUF file: convert_hf_to_gguf.py HEAD --target-model-dir TARGET."
)


class LlamaCpp(StartedEngine):
    """llama.cpp's server. Heads were read in its pull requests 18039, 22105, 25173 and 27342."""

    name = "llama.cpp"
    title = "llama.cpp"
    version = "b11549"
    drafters = (Lookup, SmallModel, Mtp, Cascade)
    policies = ("confidence",)
    heads: ClassVar[Mapping[str, HeadSupport]] = {
        "eagle3": HeadSupport("draft-eagle3", _CONVERTED),
        "dflash": HeadSupport("draft-dflash", _CONVERTED, speculators=False),
        "dflash2": HeadSupport("draft-dflash", _CONVERTED, speculators=False),
        "dspark": HeadSupport("draft-dspark", _CONVERTED, speculators=False),
    }

    server = ("llama-server",)
    listening = ("--metrics", "--port")
    ngrams: ClassVar[Mapping[str, str | Json]] = {
        "ngram-simple": "lookup:n=3,min=3",
        "ngram-mod": {
            "--spec-type": "ngram-mod",
            "--spec-ngram-mod-n-match": 4,
            "--spec-ngram-mod-n-min": 1,
            "--spec-ngram-mod-n-max": GAMMA,
        },
    }

    def target_options(self, target: ModelSpec) -> Json:
        return {"--model": _file(target)}

    def supports(self, drafter: DrafterSpec) -> bool:
        if isinstance(drafter, Cascade):
            return isinstance(drafter.front, Lookup) and type(drafter.back) in (SmallModel, Mtp)
        return super().supports(drafter)

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter = setting.drafter
        lookup = drafter.front if isinstance(drafter, Cascade) else drafter
        types: list[str] = []
        options: Json = {}
        if isinstance(lookup, Lookup):
            types.append("ngram-simple")
            exact = lookup.n or lookup.min
            options |= {
                "--spec-ngram-simple-size-n": exact,
                "--spec-ngram-simple-size-m": setting.gamma,
                "--spec-ngram-simple-min-hits": 1,
            }
            if (exact, exact) != (lookup.longest, lookup.min):
                export.missing.append(
                    f"Matches of {lookup.min} to {lookup.longest} tokens: only matches of {exact} are used."
                )
        needs = "Models as GGUF files, with one vocabulary."
        if isinstance(drafter.model_part, SmallModel):
            if isinstance(drafter.model_part, Mtp):
                types.append("draft-mtp")
                needs = (
                    "The target as one GGUF file with its MTP layer, as convert_hf_to_gguf.py writes it without"
                    " --no-mtp; the file's metadata have nextn_predict_layers."
                )
            else:
                types.append(self.method(setting, "draft-simple"))
                options["--spec-draft-model"] = _file(setting.draft_model)
            options |= _draft_options(setting)
            if setting.temperature:
                options["--spec-draft-sampling"] = "probabilistic"  # as specbench samples and tests
            else:
                export.differs.append(
                    f"{engine.GREEDY_DRAFTS} --spec-draft-sampling probabilistic does as specbench does."
                )
            if isinstance(setting.policy, Confidence):
                export.differs.append(
                    "--spec-draft-p-min drops the token below it, specbench stops after that token."
                )
        if isinstance(drafter, Cascade):
            export.differs.append(
                "A whole draft comes from the lookup or from the model, whichever has one first; in specbench they take"
                " turns by token."
            )
        export.options = {
            **self.target_options(setting.target),
            "--spec-type": ",".join(types),
            **options,
            "--temp": f"{setting.temperature or 0:g}",
        }
        export.text = engine.command(self.server, export.options)
        export.needs = [
            f"{needs} Acceptance is as measured with the same checkpoints, and nearly"
            " so with other quantizations of them."
        ]
        export.differs.append(
            "γ does not count the bonus token. Without --temp it samples at temperature 0.8, which lowers acceptance;"
            " a request can set another temperature."
        )
        export.check = (
            "timings of an answer have draft_n and draft_n_accepted, absent if nothing was drafted. With --metrics,"
            " /metrics counts llamacpp:spec_decode_num_accepted_tokens_total."
        )


def _draft_options(setting: Setting) -> Json:
    policy, longest, threshold = setting.policy, setting.gamma, 0.0
    if isinstance(policy, Confidence):
        longest, threshold = policy.gamma_max, policy.threshold
    return {"--spec-draft-n-max": longest, "--spec-draft-n-min": 0, "--spec-draft-p-min": f"{threshold:g}"}


def _file(model: ModelSpec) -> str:
    return location(model) if model.kind == "gguf" else f"{stem(model)}.gguf"
