"""Trained heads: the formats of their files, each in a module of this folder, and finding a head."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from specbench.backends.torch.scorer import Scorer
from specbench.base.progress import Progress
from specbench.drafters.model import ModelDrafter
from specbench.models.files import read_settings
from specbench.models.find import find_model
from specbench.models.heads.base import FORMATS, HeadFiles, TrainedHead, load_head, unsupported
from specbench.models.load import LanguageModel
from specbench.specs.models import ModelSpec

__all__ = ["FORMATS", "HeadFiles", "TrainedHead", "find_head", "head_of", "load_head", "model_drafter"]

for _module in iter_modules(__path__):  # registers the formats
    import_module(f"{__name__}.{_module.name}")


def find_head(spec: ModelSpec, progress: Progress | None = None) -> HeadFiles | None:
    """Return the head in a folder or on the hub; ``None`` if it is not a head.

    Raises:
        UsageError: Nothing has that name, or the head's kind is not supported.
        RunError: Its configuration cannot be fetched or is damaged.
    """
    if spec.kind not in ("folder", "hub"):
        return None
    found = find_model(spec, progress=progress)
    if found.adapter is not None:
        return None
    settings = read_settings(found.folder, spec.name)
    files = HeadFiles("", spec.name, found.folder, settings, found.hub)
    kind = _kind(files)
    if kind is None:
        return None
    if kind not in FORMATS:
        raise unsupported(spec.name, kind)
    return replace(files, kind=kind)


def head_of(model: LanguageModel) -> HeadFiles | None:
    """Return the files of a loaded model as those of a head; ``None`` if it drafts as other models do."""
    files = HeadFiles("", model.name, model.folder or Path(), model.model.config.to_dict())
    whole = [form for form in FORMATS.values() if form.model_drafter is not None]
    kind = next((form.kind for form in whole if form.claims and form.claims(files, None)), None)
    return None if kind is None else replace(files, kind=kind)


def model_drafter(model: LanguageModel, scorer: Scorer, name: str) -> ModelDrafter:
    """Make the drafter of a loaded model with the target's tokens."""
    files = head_of(model)
    make = None if files is None else files.format.model_drafter
    return ModelDrafter(scorer, name) if files is None or make is None else make(files, scorer, name)


def _kind(files: HeadFiles) -> str | None:
    """Return the kind of head that a configuration describes; ``None`` if it does not describe a head."""
    names = {name: kind for kind, form in FORMATS.items() for name in form.names}
    names |= dict.fromkeys(("mlp_speculator", "mlpspeculator"), "mlp_speculator")  # known, and not supported
    named = files.settings.get("speculators_model_type")
    if isinstance(named, str):
        return names.get(named, named)
    architectures = files.settings.get("architectures")
    words = [files.settings.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    found = {name for name in names if any(name in str(word).lower() for word in words)}
    kind = names[max(found, key=len)] if found else None
    return next((form.kind for form in FORMATS.values() if form.claims and form.claims(files, kind)), kind)
