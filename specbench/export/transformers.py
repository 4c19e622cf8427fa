"""transformers: assisted generation, prompt lookup and early exit of `generate`."""

from __future__ import annotations

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Model, Setting
from specbench.specs.drafters import DrafterSpec, Lookup, SelfForm, SmallModel
from specbench.specs.models import BUILTIN_MODELS

_MODEL = "AutoModelForCausalLM"
_COUNT = """passes = []
target.register_forward_hook(lambda *_: passes.append(1))
"""
_REPORT = """new = output.shape[1] - inputs["input_ids"].shape[1]
print(f"{new} tokens in {len(passes)} passes of the target")
"""


class Transformers:
    """See ``Engine``."""

    name = "transformers"
    title = "transformers"
    version = "5.23.0"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, SelfForm, SmallModel)
    rules: tuple[str, ...] = ("confidence", "heuristic")

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter, differs = setting.drafter, []
        missing = list(engine.without_counterpart(self, setting))
        models, lines = {"TARGET": setting.target}, []
        generate: Json = {}
        options: Json = {"generate": generate}
        check = (
            "The last line counts passes of the target, the prompt's among them: with as many passes as tokens nothing"
            " was accepted."
        )
        if isinstance(drafter, Lookup):
            generate |= {
                "prompt_lookup_num_tokens": setting.gamma,
                "max_matching_ngram_size": drafter.longest,
            }
            missing += [f"min={drafter.min}: shorter matches count too."] if drafter.min > 1 else []
            differs.append(engine.OLDEST_MATCH)
        elif isinstance(drafter, SmallModel):
            assert setting.assistant is not None
            options["generation_config"] = drafting = _drafting(setting)
            models["DRAFTER"] = setting.assistant
            lines = [_configured("assistant", drafting)]
            generate["assistant_model"] = "assistant"
            differs += [
                "These settings are read from the assistant's generation_config; arguments of generate are not.",
                "A drafter with another tokenizer needs tokenizer= and assistant_tokenizer= in generate.",
            ]
            if setting.rule.word == "confidence" and not setting.rule.options.get("adapt"):
                differs.append("The threshold moves with what is accepted where scikit-learn is installed.")
        elif isinstance(drafter, SelfForm) and drafter == SelfForm(layers=drafter.layers):
            options["generation_config"] = drafting = _drafting(setting)
            lines = [_configured("target", drafting)]
            generate["assistant_early_exit"] = drafter.layers
            differs.append(
                "Its early exit has no cache of the target to draft on, and computes the first layers anew."
            )
            check = "Compare the time of an answer with and without assistant_early_exit."
        else:
            raise engine.refuse(self, setting)
        differs += [
            "γ does not count the bonus token. Drafts are made for one prompt at a time: a batch raises.",
            "The target runs without specbench's packed layers, so that its passes cost what they do there.",
        ]
        counts = not isinstance(drafter, SelfForm)
        arguments = ["**inputs", "max_new_tokens=256", *_sampling(setting)]
        arguments += [f"{name}={value}" for name, value in generate.items()]
        text = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
            *(_named(name, model) for name, model in models.items()),
            "",
            "try:",
            f"    tokenizer = {_loaded('AutoTokenizer', 'TARGET', setting.target)}",
            f"    target = {_loaded(_MODEL, 'TARGET', setting.target, setting.dtype)}",
            *(
                f"    assistant = {_loaded(_MODEL, name, model, setting.dtype)}"
                for name, model in models.items()
                if name == "DRAFTER"
            ),
            "except OSError as error:",
            f'    raise SystemExit(f"Fill in {" and ".join(models)} at the beginning of this program: a local folder or'
            ' hub id. {error}")',
            "",
            *lines,
            'messages = [{"role": "user", "content": "Why is the sky blue?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
            *([_COUNT.rstrip()] if counts else []),
            "output = target.generate(",
            *(f"    {argument}," for argument in arguments),
            ")",
            'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
            *([_REPORT.rstrip()] if counts else []),
        ]
        return engine.Export(
            "\n".join(text) + "\n", options, list(engine.model_needs(setting)), missing, differs, check
        )


def _drafting(setting: Setting) -> Json:
    """The assistant's settings; its defaults would stop at a threshold of 0.4."""
    rule = setting.rule
    said = {each.name: rule.options.get(each.name, each.default) for each in rule.kind.options}
    most, schedule, threshold = setting.gamma, "constant", 0.0
    if rule.word == "confidence":
        most, threshold = said["gamma_max"], said["threshold"]
    elif rule.word == "heuristic":
        most, schedule = said["gamma"], "heuristic_transient"
    return {
        "num_assistant_tokens": most,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": threshold,
    }


def _configured(model: str, values: Json) -> str:
    return "\n".join(f"{model}.generation_config.{name} = {value!r}" for name, value in values.items())


def _named(variable: str, model: Model) -> str:
    """The variable for a model: its hub id, or a name to fill in."""
    builtin = BUILTIN_MODELS.get(model.name)
    if builtin is not None:
        return f"{variable} = {builtin.hub_id!r}  # what {builtin.alias} was quantized from"
    return f"{variable} = {model.name!r}{'' if model.is_hub_id else '  # a local folder or hub id: fill in'}"


def _loaded(kind: str, variable: str, model: Model, dtype: str | None = None) -> str:
    """What loads a tokenizer or a model."""
    given = engine.revision(model, "revision") | engine.floating(dtype, "dtype")
    arguments = [variable, *(f"{name}={value!r}" for name, value in given.items())]
    return f"{kind}.from_pretrained({', '.join(arguments)})"


def _sampling(setting: Setting) -> list[str]:
    if not setting.temperature:
        return ["do_sample=False"]
    return ["do_sample=True", f"temperature={setting.temperature:g}"]
