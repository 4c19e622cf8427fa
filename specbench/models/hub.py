"""Models on the hub: its client fetches them into its own cache, small files first and the weights after all checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.files import is_full
from specbench.base.progress import Progress, quiet_hub, reporting_bar
from specbench.base.textsafe import excerpt
from specbench.models.files import ADAPTER, plain_name, shard_names, weight_candidates

HINT = "Check its spelling: a hub id is org/name or org/name@revision, and a folder is a path such as ./name."
_SMALL_FILES = (
    "config.json", "generation_config.json", ADAPTER, "chat_template*", "additional_chat_templates/*", "tokenizer*",
    "*.tiktoken", "*.model", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "model.safetensors.index.json",
)  # fmt: skip
"""Patterns of all files that are read besides weights."""


class HubModel:
    """A hub model's files, as far as they have been fetched.

    Args:
        revision: Branch, tag or commit; ``None`` is the default branch.
        name: The model's name in messages.

    Attributes:
        folder: The folder of its commit in the hub's cache.

    Raises:
        UsageError: There is no such model or revision, or it has no config.json.
        RunError: The hub cannot be reached, or the model is gated.
    """

    def __init__(self, repository: str, revision: str | None, name: str, progress: Progress | None) -> None:
        self.repository, self.revision, self.name, self.progress = repository, revision, name, progress
        self.folder = self._fetch(_SMALL_FILES)
        self.revision = self.folder.name  # the cache names its folders by commit
        if not self._has(["config.json"]) and not self._has([ADAPTER]):  # which is refused when it is read
            raise self._lacking("is no model: it has no config.json", HINT)

    def fetch_weights(self, check_size: Callable[[int], object] = id) -> None:
        """Fetch the weights.

        If an index gives the total size of all shards, ``check_size`` is called with it before any shard is fetched.
        """
        for candidate in weight_candidates(self.folder):
            path, files = self.folder / plain_name(candidate, self.name), [candidate]
            if path.suffix == ".json":
                if not path.is_file():
                    continue
                files = shard_names(path, self.name)
                metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata")
                if isinstance(metadata, dict) and isinstance(total := metadata.get("total_size"), int):
                    check_size(total)
            if not self._has(files) and not _why_unreachable():  # else its client would try for half a minute
                self._fetch(files)
            if self._has(files):
                return
        raise self._lacking(
            "has no safetensors weights, or not all of them",
            "Pickled weights are not loaded; a GGUF file can be fetched by hand and named.",
        )

    def _has(self, files: Sequence[str]) -> bool:
        return all((self.folder / file).is_file() for file in files)

    def _fetch(self, patterns: Sequence[str]) -> Path:
        """Fetch the files of these names that the repository has; return its folder in the cache."""
        from huggingface_hub import errors, snapshot_download

        bar = reporting_bar(self.progress, f"fetching {self.name}")
        try:
            with quiet_hub():
                return Path(
                    snapshot_download(
                        self.repository, revision=self.revision, allow_patterns=[*patterns], tqdm_class=bar
                    )
                )
        except errors.LocalEntryNotFoundError as error:
            raise self._lacking("does not send its files") from error
        except Exception as error:  # what a network, a proxy or a disk can raise
            known: dict[type[Exception], SpecbenchError] = {
                errors.GatedRepoError: RunError(
                    f"The hub's {self.name} is gated.",
                    "Accept its terms there, and log in with `hf auth login`.",
                ),
                errors.RepositoryNotFoundError: UsageError(
                    f"There is no model {self.name!r} on the hub, or it is private.", HINT
                ),
                errors.RevisionNotFoundError: UsageError(
                    f"The hub's {self.repository} has no revision {self.revision!r}."
                ),
            }
            full = RunError(
                f"No space is left in the hub's cache for {self.name}.",
                "Free some, or set HF_HOME to a folder on another disk.",
            )
            other = RunError(f"The model {self.name} cannot be fetched: {excerpt(error).rstrip('.')}.")
            raise known.get(type(error)) or (full if is_full(error) else other) from error

    def _lacking(self, what: str, hint: str | None = None) -> SpecbenchError:
        """Return the error for what neither the cache has nor the hub sends, or of the hub if it is out of reach."""
        from huggingface_hub import constants

        if not (why := _why_unreachable()):
            return UsageError(f"The hub's {self.name} {what}.", hint)
        remedy = "Unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "Check the connection"
        return RunError(
            f"The model {self.name} is not in the hub's cache, and the hub cannot be reached ({why}).",
            f"{remedy}, or name a model folder.",
        )


def _why_unreachable() -> str:
    """Why the hub cannot be asked; empty if it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # what networks and proxies can raise
        return excerpt(error).rstrip(".") or type(error).__name__
    return ""
