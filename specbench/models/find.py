"""Find the files of a model, before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench.base.progress import Progress, quiet_hub
from specbench.models.files import Header, read_headers
from specbench.models.hub import HubModel
from specbench.specs.models import ModelSpec, parse_model


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, without weights that are not fetched yet.

    Attributes:
        folder: Its folder; of a built-in model or GGUF file that of the prepared copy.
        hub: The repository to fetch its weights from, if it has one.
    """

    spec: ModelSpec
    folder: Path
    hub: HubModel | None = None

    def headers(self) -> dict[str, Header]:
        """Return the headers of its weights; those of a hub model that is not in the cache are fetched alone."""
        found = read_headers(self.folder)
        if found or self.hub is None:
            return found
        from huggingface_hub import get_safetensors_metadata

        with quiet_hub():
            files = get_safetensors_metadata(self.hub.repository, revision=self.hub.revision).files_metadata
        return {
            name: Header(Path(file), each.dtype, each.shape)
            for file, metadata in files.items()
            for name, each in metadata.tensors.items()
        }


def find_model(spec: str | ModelSpec, *, progress: Progress | None = None) -> ModelFiles:
    """Find a model; a built-in one or a GGUF file is prepared if necessary.

    Raises:
        UsageError: There is no such model, or it is no model.
        RunError: It cannot be fetched or prepared.
    """
    spec = parse_model(spec) if isinstance(spec, str) else spec
    if spec.kind == "hub":
        hub = HubModel(spec.source, spec.revision, spec.name, progress)
        return ModelFiles(spec, hub.folder, hub)
    if spec.kind == "folder":
        return ModelFiles(spec, Path(spec.source))
    from specbench.models.builtin import prepare_builtin, prepare_gguf

    if spec.kind == "builtin":
        return ModelFiles(spec, prepare_builtin(spec.source, progress=progress))
    return ModelFiles(spec, prepare_gguf(Path(spec.source), progress=progress))


def require_models(*models: ModelSpec, progress: Progress | None = None) -> None:
    """Raise ``UsageError`` or ``RunError`` for models on the hub or in folders that cannot be found."""
    for model in models:
        if model.kind in ("hub", "folder"):
            find_model(model, progress=progress)
