"""Settings with a trained MTP layer, as settings of a checkpoint that contains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbench.base.errors import UsageError
from specbench.base.progress import Progress
from specbench.export.engine import ExportEngine
from specbench.export.setting import Model, Setting
from specbench.models.checkpoints import text_config
from specbench.models.head_files import find_head
from specbench.models.load import load_config
from specbench.models.mtp_checkpoint import write_mtp_checkpoint
from specbench.specs.drafters import Cascade, Mtp
from specbench.specs.models import parse_model


def has_trained_mtp(setting: Setting) -> bool:
    """Return whether the drafter of a setting has an MTP layer that was trained for its target."""
    return setting.head is not None and setting.head.kind == "mtp"


def in_checkpoint(
    engine: ExportEngine, setting: Setting, folder: Path, progress: Progress | None = None
) -> Setting:
    """Write the target and the trained MTP layer of a setting as a checkpoint; return the setting that drafts with it.

    Raises:
        UsageError: The drafter has no such layer, the engine reads none of the target's family, or see
            ``write_mtp_checkpoint``.
    """
    model = setting.drafter.model_spec
    if model is None or not has_trained_mtp(setting):
        raise UsageError(
            f"The drafter {setting.drafter} has no MTP layer that was trained for {setting.target.name}.",
            "Leave --checkpoint out.",
        )
    drafter = replace(setting.drafter, back=Mtp()) if isinstance(setting.drafter, Cascade) else Mtp()
    found = replace(
        setting, target=Model(folder.resolve().name, path=str(folder.resolve())), drafter=drafter, head=None
    )
    engine.export(found)  # or its refusal
    target = setting.target
    spec = parse_model(target.location if target.revision is None else f"{target.name}@{target.revision}")
    config = load_config(spec, progress=progress)
    family = text_config(config).model_type
    if family not in engine.mtp_types:
        raise UsageError(
            f"{engine.title} {engine.version} reads no MTP layers of the model type {family}, only of"
            f" {', '.join(engine.mtp_types)}.",
            "Serve it with `specbench serve`, or export an EAGLE-3 head (`specbench train`).",
        )
    files = find_head(model, progress)
    assert files is not None, "its setting has a head"
    write_mtp_checkpoint(files, spec, config, folder, progress)
    return found
