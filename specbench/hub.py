"""Models on the hub: fetched into the hub's own cache, configuration first."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from specbench.checkpoints import plain_name, shard_names, weight_candidates
from specbench.errors import RunError, UsageError
from specbench.progress import Progress, one_line, quiet_transformers

__all__ = ["HubModel"]

HINT = "Check its spelling: a hub id is org/name or org/name@revision, and a folder is a path such as ./name."


class _NotCachedError(RunError):
    """A file is not in the hub's cache, and the hub is out of reach."""


class HubModel:
    """A hub model's files, as far as they have been fetched.

    Args:
        repository: The hub id.
        revision: Branch, tag or commit; ``None`` is the default branch.
        name: What messages call the model.
        progress: Told the bytes fetched.

    Attributes:
        folder: Where the cache keeps the files.
        revision: The commit they belong to, whatever the branch does meanwhile.

    Raises:
        UsageError: There is no such model or revision, or it has no config.json.
        RunError: It cannot be reached, or is gated.
    """

    def __init__(self, repository: str, revision: str | None, name: str, progress: Progress | None) -> None:
        self.repository, self.revision, self.name, self.progress = repository, revision, name, progress
        config = self._file("config.json")
        if config is None:
            raise UsageError(f"The hub's {name} is no model: it has no config.json.", HINT)
        self.folder = config.parent
        self.revision = config.parent.name  # the cache names its folders by commit

    def fetch_weights(
        self, config: PreTrainedConfig, *, allow_pickle: bool, check_size: Callable[[int], None]
    ) -> None:
        """Fetch the weights, and the generation settings beside them.

        Args:
            config: The model's configuration.
            allow_pickle: Fetch pickled weights if there are no others.
            check_size: Called with the bytes of all shards, if an index tells, before any shard is fetched.
        """
        not_cached: _NotCachedError | None = None
        for candidate in weight_candidates(config, allow_pickle):
            try:
                found = self._file(plain_name(candidate, self.name))
            except _NotCachedError as error:
                not_cached = error
                continue
            if found is None:
                continue
            if found.suffix == ".json":
                self._fetch_shards(found, check_size)
            self._optional_file("generation_config.json")
            return
        if not_cached is not None:
            raise not_cached
        raise UsageError(
            f"The hub's {self.name} has no safetensors weights.",
            "Pickled weights are not loaded; a GGUF file can be fetched by hand and named.",
        )

    def _fetch_shards(self, index: Path, check_size: Callable[[int], None]) -> None:
        shards = shard_names(index, self.name)
        metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata")
        if isinstance(metadata, dict) and isinstance(total := metadata.get("total_size"), int):
            check_size(total)
        for shard in shards:
            if self._file(shard) is None:
                raise RunError(f"The weights of {self.name} are incomplete: the hub has no {shard!r}.")

    def _optional_file(self, file: str) -> Path | None:
        try:
            return self._file(file)
        except _NotCachedError:
            return None

    def _file(self, file: str) -> Path | None:
        """A file in the cache, fetched if it is not there; ``None`` if the model has no such file."""
        from huggingface_hub import errors, hf_hub_download

        bar = _reporting_bar(self.progress, f"fetching {self.name}")
        try:
            with quiet_transformers():
                return Path(hf_hub_download(self.repository, file, revision=self.revision, tqdm_class=bar))
        except errors.GatedRepoError as error:
            raise RunError(
                f"The hub's {self.name} is gated.", "Accept its terms there, and log in with `hf auth login`."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise UsageError(
                f"There is no model {self.name!r} on the hub, or it is private.", HINT
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UsageError(f"The hub's {self.repository} has no revision {self.revision!r}.") from error
        except errors.LocalEntryNotFoundError as error:
            raise _NotCachedError(
                f"The model {self.name} is not in the hub's cache, and the hub cannot be reached.",
                "Go online, without HF_HUB_OFFLINE, or name a model folder.",
            ) from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # what a network, a proxy or a disk can raise
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(
                    f"No space is left in the hub's cache for {self.name}.",
                    "Free some, or set HF_HOME to a folder on another disk.",
                ) from error
            reason = one_line(str(error)).rstrip(".")
            raise RunError(f"The model {self.name} cannot be fetched: {reason}.") from error


def _reporting_bar(progress: Progress | None, stage: str) -> type[Any]:
    """A tqdm class for the hub client that draws nothing and reports to ``progress``."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # an option of the hub client's own class
            super().__init__(*arguments, **(options | {"disable": True}))
            self.done, self.size = int(options.get("initial") or 0), options.get("total")

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            if progress is not None:
                progress.update(stage, self.done, self.size)

    return Bar
