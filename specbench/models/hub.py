"""Models on the hub: fetched into the hub's own cache, configuration first, and checked against their hashes.

The hub's cache names every file after its hash. A fetched file is checked against this hash, and small files again each
time a model is loaded. For large cached weights, the header must match the file size. Damaged files are fetched again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedConfig

from specbench.base.errors import RunError, UsageError
from specbench.base.files import SMALL_FILE, file_errors, is_full
from specbench.base.progress import Progress, quiet_transformers, reporting_bar
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import (
    ADAPTER,
    plain_name,
    read_settings,
    safetensors_elements,
    shard_names,
    weight_candidates,
)

HINT = "Check its spelling: a hub id is org/name or org/name@revision, and a folder is a path such as ./name."
_SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")


class _NotCachedError(RunError):
    """A file is not in the hub's cache, and the hub is out of reach."""


class HubModel:
    """A hub model's files, as far as they have been fetched.

    Args:
        revision: Branch, tag or commit; ``None`` is the default branch.
        name: The model's name in messages.

    Attributes:
        revision: The commit that the files belong to.

        Raises:
            UsageError: There is no such model or revision, or it has no config.json.
            RunError: The hub cannot be reached, or the model is gated.
    """

    def __init__(self, repository: str, revision: str | None, name: str, progress: Progress | None) -> None:
        self.repository, self.revision, self.name, self.progress = repository, revision, name, progress
        config = self._file("config.json")
        if config is None and self.optional_file(ADAPTER):
            raise UsageError(
                f"The hub's {name} is an adapter.",
                f"Fetch it with `hf download {repository} --local-dir DIR`, and name DIR.",
            )
        if config is None:
            raise UsageError(f"The hub's {name} is no model: it has no config.json.", HINT)
        self.folder = config.parent
        self.revision = config.parent.name  # the cache names its folders by commit

    def fetch_weights(
        self, config: PreTrainedConfig, *, allow_pickle: bool, check_size: Callable[[int], None]
    ) -> None:
        """Fetch the weights and the small files next to them; pickled weights only if allowed and there are no others.

        If an index gives the total size of all shards, ``check_size`` is called with it before any shard is fetched.
        """
        if self.optional_file(ADAPTER):
            read_settings(self.folder, self.name)  # refuses it
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
            for file in _SMALL_FILES:
                self.optional_file(file)
            self._mend()
            return
        if not_cached is not None:
            raise not_cached
        raise UsageError(
            f"The hub's {self.name} has no safetensors weights.",
            "Pickled weights are not loaded; a GGUF file can be fetched by hand and named.",
        )

    def has_tokenizer(self) -> bool:
        """Whether the repository has a tokenizer; if the hub cannot be reached, whether the cache has one."""
        return any(self.optional_file(file) for file in ("tokenizer.json", "tokenizer_config.json"))

    def _fetch_shards(self, index: Path, check_size: Callable[[int], None]) -> None:
        shards = shard_names(index, self.name)
        metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata")
        if isinstance(metadata, dict) and isinstance(total := metadata.get("total_size"), int):
            check_size(total)
        for shard in shards:
            if self._file(shard) is None:
                raise RunError(f"The weights of {self.name} are incomplete: the hub has no {shard!r}.")

    def optional_file(self, file: str) -> Path | None:
        """Return a file in the cache, fetched if missing; ``None`` if there is none, or the hub cannot be reached."""
        try:
            return self._file(file)
        except _NotCachedError:
            return None

    def _mend(self) -> None:
        """Fetch damaged files again, including files that only the tokenizer reads."""
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and not self._is_sound(path):
                self._file(path.name)

    def _file(self, file: str) -> Path | None:
        """Return a file in the cache, fetched if missing or damaged; ``None`` if the model has no such file.

        Raises:
            RunError: The file cannot be fetched, or is damaged after fetching.
        """
        cached = self._cached(file)
        path = self._download(file)
        if path is None or self._is_sound(path, everything=cached is None):
            return path
        _discard(path, self.name)
        try:
            path = self._download(file)
        except _NotCachedError as error:
            raise RunError(
                f"The hub's cache held a damaged {file!r} of {self.name}, and the hub cannot be reached.",
                f"{_go_online()} to fetch it again.",
            ) from error
        if path is not None and not self._is_sound(path, everything=True):
            _discard(path, self.name)
            raise RunError(
                f"What was fetched as {file!r} of {self.name} has the wrong hash; it was not kept.",
                "Try again, and check the proxy or mirror if there is one.",
            )
        return path

    def _cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, file, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def _is_sound(self, path: Path, *, everything: bool = False) -> bool:
        """Return whether a cached file matches its hash, which is the name of the file that it links to.

        For large files, only the header is checked, unless ``everything`` is set.
        """
        blob = path.resolve()
        try:
            size = blob.stat().st_size
            if _HASH.fullmatch(blob.name) and (everything or size <= SMALL_FILE):
                return blob.name in _hashes(blob, size, self._report)
            if path.suffix == ".safetensors":
                safetensors_elements(path)
        except (OSError, RunError):
            return False
        return True

    def _report(self, done: int, total: int) -> None:
        if self.progress is not None and total > SMALL_FILE:
            self.progress.update(f"checking {self.name}", done, total)

    @cached_property
    def _unreachable(self) -> str:
        """Why the hub cannot be asked; empty if it can. Its client would try again for half a minute."""
        from huggingface_hub import constants, get_session

        try:
            if not constants.HF_HUB_OFFLINE:
                get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # what networks and proxies can raise
            return excerpt(error).rstrip(".") or type(error).__name__
        return ""

    def _not_cached(self) -> _NotCachedError:
        reason = f" ({self._unreachable})" if self._unreachable else ""
        return _NotCachedError(
            f"The model {self.name} is not in the hub's cache, and the hub cannot be reached{reason}.",
            f"{_go_online()}, or name a model folder.",
        )

    def _download(self, file: str) -> Path | None:
        from huggingface_hub import errors, hf_hub_download

        if self._cached(file) is None and self._unreachable:
            raise self._not_cached()
        bar = reporting_bar(self.progress, f"fetching {self.name}")
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
            raise self._not_cached() from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # what a network, a proxy or a disk can raise
            if isinstance(error, OSError) and is_full(error):
                raise RunError(
                    f"No space is left in the hub's cache for {self.name}.",
                    "Free some, or set HF_HOME to a folder on another disk.",
                ) from error
            cached = self._cached(file)
            if cached is not None and not isinstance(error, OSError):  # the network failed, and is not needed
                return cached
            reason = excerpt(error).rstrip(".")
            raise RunError(f"The model {self.name} cannot be fetched: {reason}.") from error


def _go_online() -> str:
    from huggingface_hub import constants

    return "Unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "Check the connection"


_HASH = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
_BLOCK = 1 << 22


def _hashes(file: Path, size: int, report: Callable[[int, int], None]) -> tuple[str, ...]:
    """Return the names that the hub can give to a file: its sha256 (large files), git's hash, or a mirror's sha1."""
    digests = [hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size), hashlib.sha1()]  # noqa: S324 - git's choice
    if len(file.name) == 64:
        del digests[1:]
    done = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            for digest in digests:
                digest.update(block)
            done += len(block)
            report(done, size)
    return tuple(digest.hexdigest() for digest in digests)


def _discard(path: Path, name: str) -> None:
    blob = path.resolve()
    with file_errors(
        f"The hub's cache holds a damaged {path.name!r} of {name} that cannot be replaced",
        "Set HF_HOME to a folder that can be written.",
    ):
        path.unlink()
        blob.unlink(missing_ok=True)
