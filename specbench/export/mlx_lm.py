"""mlx-lm: `mlx_lm.server --draft-model`."""

from __future__ import annotations

from specbench.export import engine
from specbench.export.setting import Setting
from specbench.specs.drafters import DrafterSpec, SmallModel


class MlxLm:
    """See ``Engine``."""

    name = "mlx-lm"
    title = "mlx-lm"
    version = "0.32.2"
    drafters: tuple[type[DrafterSpec], ...] = (SmallModel,)
    rules: tuple[str, ...] = ()

    def export(self, setting: Setting) -> engine.Export:
        """See ``Engine``."""
        if not isinstance(setting.drafter, SmallModel) or setting.assistant is None:
            raise engine.refuse(self, setting)
        options = {
            "--model": setting.target.name,
            "--draft-model": setting.assistant.name,
            "--num-draft-tokens": setting.gamma,
            "--temp": f"{setting.temperature or 0:g}",
        }
        missing = list(engine.without_counterpart(self, setting))
        if setting.target.revision or setting.assistant.revision:
            missing.append("Revisions: name a folder that holds the one you want.")
        return engine.Export(
            engine.command(["mlx_lm.server"], options),
            options,
            [*engine.model_needs(setting), "Apple silicon; models as mlx-lm loads them."],
            missing,
            [
                "γ does not count the bonus token.",
                "Above temperature 0 target and drafter both draw, and a draft is kept where they drew the same, the"
                " chance of which is Σ p·q; in specbench it is Σ min(p, q). Outputs keep their distribution, fewer"
                " drafts are kept.",
                "With a draft model the server answers one request at a time.",
            ],
            "In Python, stream_generate(..., draft_model=...) yields answers with from_draft, true for a token that was"
            " drafted and kept; the server itself says nothing of it.",
        )
