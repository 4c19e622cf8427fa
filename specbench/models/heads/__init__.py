"""Trained heads: the formats of their files, each in a module of this folder."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from specbench.backends.torch.scorer import Scorer
from specbench.drafters.model import ModelDrafter
from specbench.models.head_files import HEAD_KINDS, HeadFiles
from specbench.models.heads.base import FORMATS, TrainedHead, check_head, load_head
from specbench.models.load import LanguageModel

__all__ = ["FORMATS", "TrainedHead", "check_head", "head_of", "load_head", "model_drafter"]

for _module in iter_modules(__path__):  # registers the formats
    import_module(f"{__name__}.{_module.name}")


def head_of(model: LanguageModel) -> HeadFiles | None:
    """Return the files of a loaded model as those of a head; ``None`` if it drafts as other models do."""
    files = HeadFiles("", model.name, model.folder or Path(), model.model.config.to_dict())
    whole = ((name, kind.claims) for name, kind in HEAD_KINDS.items() if kind.whole)
    kind = next((name for name, claims in whole if claims and claims(files, None)), None)
    return None if kind is None else replace(files, kind=kind)


def model_drafter(model: LanguageModel, scorer: Scorer, name: str) -> ModelDrafter:
    """Make the drafter of a loaded model with the target's tokens."""
    files = head_of(model)
    make = None if files is None else FORMATS[files.kind].model_drafter
    return ModelDrafter(scorer, name) if files is None or make is None else make(files, scorer, name)
