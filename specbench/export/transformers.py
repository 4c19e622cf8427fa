"""transformers: assisted generation, prompt lookup, early exit and MTP layers of `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Setting, is_found, location
from specbench.specs.drafters import DrafterSpec, Lookup, Mtp, SelfForm, SmallModel
from specbench.specs.models import BUILTIN_MODELS, ModelSpec
from specbench.specs.policies import Confidence, Heuristic

_MODEL = "AutoModelForCausalLM"
_COUNT = """passes = []
target.register_forward_hook(lambda *_: passes.append(1))"""
_REPORT = """new = output.shape[1] - inputs["input_ids"].shape[1]
print(f"{new} tokens in {len(passes)} passes of the target")"""


class Transformers(engine.ExportEngine):
    """A program around `generate`."""

    name = "transformers"
    title = "transformers"
    version = "5.23.0"
    drafters = (Lookup, SelfForm, SmallModel, Mtp)
    policies = ("confidence", "heuristic")
    other_tokens = "tokenizer= and assistant_tokenizer= in generate"
    heads: ClassVar[Mapping[str, engine.HeadSupport]] = {
        "dflash": engine.HeadSupport(
            "dflash",
            'transformers 5.24 or later, and in config.json "model_type": "muse_glimmer_assistant", with mask_token_id,'
            " target_layer_ids and layer_types at the top; encoder.fc and encoder.output_norm_enc in place of fc and"
            " hidden_norm.",
            speculators=False,
        ),
    }

    def supports(self, drafter: DrafterSpec) -> bool:
        if isinstance(drafter, SelfForm):
            return drafter == SelfForm(layers=drafter.layers)
        return super().supports(drafter)

    def fill(self, setting: Setting, export: engine.Export) -> None:
        drafter = setting.drafter
        generate: Json = {}
        export.options = {"generate": generate}
        export.check = (
            "The last line counts forward passes of the target, prefill included: as many passes as tokens mean that"
            " nothing was accepted."
        )
        configured = ""
        if isinstance(drafter, Lookup):
            generate |= {
                "prompt_lookup_num_tokens": setting.gamma,
                "max_matching_ngram_size": drafter.longest,
            }
            export.missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
            export.differs.append(engine.OLDEST_MATCH)
        elif setting.head is not None:
            generate |= {"assistant_model": "assistant", "speculation_type": self.method(setting, "")}
            export.differs.append("γ is one less than the head's block_size.")
        elif isinstance(drafter, Mtp):
            generate["use_mtp"] = True
            export.needs.append(
                "A target whose configuration has num_mtp_layers, as those of DeepSeek-V3, GLM-4.5, Step 3.7 and Mellum"
                " do; Qwen3.5's and Qwen3-Next's have not."
            )
            export.missing.append(
                f"γ = {setting.gamma}: each MTP layer drafts one token, so a step drafts as many as the checkpoint has"
                " layers."
            )
        else:
            export.options["generation_config"] = drafting = _drafting(setting)
            configured = "target" if isinstance(drafter, SelfForm) else "assistant"
            configured = "".join(
                f"{configured}.generation_config.{name} = {value!r}\n" for name, value in drafting.items()
            )
        if isinstance(drafter, SelfForm):
            generate["assistant_early_exit"] = drafter.layers
            export.differs.append(
                "Early exit drafts without the target's KV cache, and computes the first layers again."
            )
            export.check = "Compare the time of an answer with and without assistant_early_exit."
        elif type(drafter) is SmallModel and setting.head is None:
            generate["assistant_model"] = "assistant"
            export.differs += [
                "These settings are read from the assistant's generation_config, not from arguments of generate.",
                "A drafter with another tokenizer needs tokenizer= and assistant_tokenizer= in generate.",
            ]
            if isinstance(setting.policy, Confidence):
                export.differs.append("The threshold adapts to acceptance where scikit-learn is installed.")
        export.differs += [
            "γ does not count the bonus token. Drafts are made for one prompt at a time: a batch raises an error.",
            "The target runs without specbench's packed weights, so its forward passes cost more or less.",
        ]
        export.text = _program(setting, generate, configured)


def _program(setting: Setting, generate: Json, configured: str) -> str:
    """Return a program that calls ``generate``, after the lines that configure its models."""
    models = dict(zip(("TARGET", "DRAFTER"), setting.models, strict=False))
    classes = (_MODEL, _MODEL if setting.head is None else "AutoModel")
    variables = zip(classes, ("target", "assistant"), models.items(), strict=False)
    sampling = (
        f"do_sample=True, temperature={setting.temperature:g}" if setting.temperature else "do_sample=False"
    )
    drafting = "".join(
        f", {name}={value if name == 'assistant_model' else repr(value)}" for name, value in generate.items()
    )
    counts = "assistant_early_exit" not in generate
    lines = [
        f"from transformers import {', '.join(sorted({*classes, _MODEL, 'AutoTokenizer'}))}\n",
        *(_assignment(name, model) for name, model in models.items()),
        f"\ntokenizer = {_loading('AutoTokenizer', 'TARGET', setting.target)}",
        *(f"{own} = {_loading(kind, name, model, setting.dtype)}" for kind, own, (name, model) in variables),
        configured.rstrip(),
        'messages = [{"role": "user", "content": "Why is the sky blue?"}]',
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ")",
        *([_COUNT] if counts else []),
        f"output = target.generate(**inputs, max_new_tokens=256, {sampling}{drafting})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        *([_REPORT] if counts else []),
    ]
    return "\n".join(lines) + "\n"


def _drafting(setting: Setting) -> Json:
    """Return the assistant's settings; its default would stop at a threshold of 0.4."""
    policy, longest, schedule, threshold = setting.policy, setting.gamma, "constant", 0.0
    if isinstance(policy, Confidence):
        longest, threshold = policy.gamma_max, policy.threshold
    elif isinstance(policy, Heuristic):
        longest, schedule = policy.first, "heuristic_transient"
    return {
        "num_assistant_tokens": longest,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": threshold,
    }


def _assignment(variable: str, model: ModelSpec) -> str:
    """Return the line that sets a model's variable to its hub id, or to a name to replace."""
    if model.kind == "builtin":
        return f"{variable} = {BUILTIN_MODELS[model.source].hub_id!r}  # what {model.name} was quantized from"
    note = "" if is_found(model) else "  # replace by a local folder or hub id"
    return f"{variable} = {location(model)!r}{note}"


def _loading(kind: str, variable: str, model: ModelSpec, dtype: str | None = None) -> str:
    """Return the expression that loads a tokenizer or a model."""
    given = engine.revision(model, "revision") | engine.floating(dtype, "dtype")
    arguments = [variable, *(f"{name}={value!r}" for name, value in given.items())]
    return f"{kind}.from_pretrained({', '.join(arguments)})"
