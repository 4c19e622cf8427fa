"""mlx-lm: `mlx_lm.server --draft-model`."""

from __future__ import annotations

from specbench.export import engine
from specbench.export.setting import Setting, location
from specbench.specs.drafters import SmallModel


class MlxLm(engine.ExportEngine):
    """mlx-lm's server."""

    name = "mlx-lm"
    title = "mlx-lm"
    version = "0.32.2"
    drafters = (SmallModel,)

    def fill(self, setting: Setting, export: engine.Export) -> None:
        export.options = {
            "--model": location(setting.target),
            "--draft-model": location(setting.draft_model),
            "--num-draft-tokens": setting.gamma,
            "--temp": f"{setting.temperature or 0:g}",
        }
        export.text = engine.command(["mlx_lm.server"], export.options)
        export.needs.append("Apple silicon, and models in a format that mlx-lm loads.")
        if any(model.revision for model in setting.models):
            export.missing.append("Revisions: name a folder that holds the revision.")
        export.differs += [
            "γ does not count the bonus token.",
            "Above temperature 0 target and drafter both sample, and a draft token is accepted if they agree, with"
            " probability Σ p·q; in specbench it is Σ min(p, q). Outputs keep their distribution, fewer drafts are"
            " accepted.",
            "With a draft model the server answers one request at a time.",
        ]
        export.check = (
            "In Python, stream_generate(..., draft_model=...) yields answers with from_draft, true for accepted draft"
            " tokens; the server does not report it."
        )
