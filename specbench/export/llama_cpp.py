"""llama.cpp: `llama-server --spec-type`."""

from __future__ import annotations

from specbench.base.record import Json
from specbench.export import engine
from specbench.export.setting import Model, Setting
from specbench.specs.drafters import Cascade, DrafterSpec, Lookup, SmallModel


class LlamaCpp:
    """See ``Engine``."""

    name = "llama.cpp"
    title = "llama.cpp"
    version = "b11549"
    drafters: tuple[type[DrafterSpec], ...] = (Lookup, SmallModel, Cascade)
    rules: tuple[str, ...] = ("confidence",)

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        drafter, differs = setting.drafter, []
        lookup = drafter.front if isinstance(drafter, Cascade) else drafter
        model = drafter.model_part
        missing = list(engine.without_counterpart(self, setting))
        types: list[str] = []
        options: Json = {"--model": _file(setting.target)}
        if isinstance(lookup, Lookup):
            types.append("ngram-simple")
            exact = lookup.n or lookup.min
            options |= {
                "--spec-ngram-simple-size-n": exact,
                "--spec-ngram-simple-size-m": setting.gamma,
                "--spec-ngram-simple-min-hits": 1,
            }
            if (exact, exact) != (lookup.longest, lookup.min):
                missing.append(
                    f"Matches of {lookup.min} to {lookup.longest} tokens: only those of {exact} are looked for."
                )
        if isinstance(model, SmallModel):
            assert setting.assistant is not None
            head = engine.head_of(self, setting)
            types.append("draft-simple" if head is None else head.method)
            options |= {"--spec-draft-model": _file(setting.assistant), **_drafting(setting)}
            if setting.temperature:
                options["--spec-draft-sampling"] = "probabilistic"  # as specbench drew and tested
            else:
                differs.append(
                    f"{engine.GREEDY_DRAFTS} --spec-draft-sampling probabilistic is specbench's way."
                )
            if setting.rule.word == "confidence":
                differs.append(
                    "--spec-draft-p-min drops the token below it, specbench's rule stops behind it; nothing moves it."
                )
        supported = isinstance(drafter, Lookup | SmallModel) or (
            isinstance(lookup, Lookup) and isinstance(model, SmallModel)
        )
        if not supported:
            raise engine.refuse(self, setting)
        if isinstance(drafter, Cascade):
            differs.append(
                "A whole draft is the lookup's or the model's, whichever comes first with one; in specbench they take"
                " turns token by token."
            )
            missing += [f"passes={drafter.passes}."] if drafter.passes else []
        temperature = setting.temperature or 0
        options = {
            "--model": options.pop("--model"),
            "--spec-type": ",".join(types),
            **options,
            "--temp": f"{temperature:g}",
        }
        differs.append(
            "γ does not count the bonus token. Without --temp it samples at temperature 0.8, where drafts are kept less"
            " often, and a request may ask for another temperature."
        )
        return engine.Export(
            engine.command(["llama-server"], options),
            options,
            [
                "Models as GGUF files, with one vocabulary; those of the checkpoints that were measured accept alike,"
                " other quantizations of them nearly so."
            ],
            missing,
            differs,
            "An answer's timings have draft_n and draft_n_accepted; they are absent where nothing was drafted. With"
            " --metrics, /metrics counts llamacpp:spec_decode_num_accepted_tokens_total.",
        )


def _drafting(setting: Setting) -> Json:
    most, least = setting.gamma, 0.0
    if setting.rule.word == "confidence":
        said = {
            each.name: setting.rule.options.get(each.name, each.default) for each in setting.rule.kind.options
        }
        most, least = said["gamma_max"], said["threshold"]
    return {"--spec-draft-n-max": most, "--spec-draft-n-min": 0, "--spec-draft-p-min": f"{least:g}"}


def _file(model: Model) -> str:
    return f"{model.stem}.gguf"
