"""One repository of a hub, accessed by the huggingface_hub library. Each kind of failure has its own error message."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.config.hub_name import HubModel
from moeserve.errors import CheckpointError, missing_extra
from moeserve.machine import installed_version, shown_bytes

logger = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 60.0  # timeout of one request for a part of a file
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOG_IN = "log in with `hf auth login` (earlier: `huggingface-cli login`) or set HF_TOKEN"


class HubClient:
    """A repository at one commit, and the commit's folder in the cache of huggingface_hub."""

    def __init__(self, model: HubModel, wanted: Sequence[str], *, only_cached: bool = False) -> None:
        """Find the commit of the model's revision, and fetch small files at this commit.

        If the hub cannot be reached, or HF_HUB_OFFLINE=1, use the commit that the cache has for the revision.

        Args:
            wanted: names or patterns of the files to fetch. Names that the repository lacks are ignored.
            only_cached: do not connect to the hub.

        Raises:
            SettingsError: huggingface_hub is not installed.
            CheckpointError: there is no such repository or revision, it cannot be accessed, or the hub cannot be
                reached and the cache does not have the repository.
        """
        try:
            import huggingface_hub.constants
            import huggingface_hub.errors
            import huggingface_hub.utils
        except ImportError as error:
            what = f"{model.name!r} is no folder here, and fetching it from a hub needs huggingface_hub"
            raise missing_extra(what, "hub", error) from None
        self._library: Any = huggingface_hub
        self._endpoint = model.endpoint or huggingface_hub.constants.ENDPOINT
        self._only_cached = only_cached
        self.model = replace(model, endpoint=self._endpoint)
        self.folder = self._snapshot(model.revision, wanted, may_lack_files=True)
        self.model = replace(self.model, revision=self.folder.name)

    @property
    def cached_files(self) -> list[str]:
        """Names of the repository's files that the cache has at this commit."""
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    def sizes(self) -> dict[str, int]:
        """Return the size of each file of the repository in bytes, by name.

        Raises:
            CheckpointError: the hub cannot be reached.
        """
        with self._errors_named():
            api = self._library.HfApi(endpoint=self._endpoint)
            found = api.model_info(self.model.repository, revision=self.model.revision, files_metadata=True)
            return {file.rfilename: file.size or 0 for file in found.siblings or ()}

    def fetch(self, sizes: Mapping[str, int], *, shows_progress: bool) -> None:
        """Fetch files into the cache, except for files that the cache has. A later call continues an interrupted fetch.

        Args:
            sizes: size of each file in bytes, by name.
            shows_progress: draw progress bars if on a terminal.

        Raises:
            CheckpointError: a file cannot be fetched, or the disk is full.
        """
        missing = {name: size for name, size in sizes.items() if not (self.folder / name).is_file()}
        if not missing:
            return
        num_bytes, cache = sum(missing.values()), self.folder.parents[1]
        logger.info(
            "fetching %s of %s at commit %s from %s: %d files into %s",
            shown_bytes(num_bytes),
            self.model.repository,
            self.model.revision,
            self._endpoint,
            len(missing),
            cache,
        )
        begun = sum(file.stat().st_size for file in cache.glob("blobs/*.incomplete"))
        disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
        if num_bytes - begun > (free := shutil.disk_usage(disk).free):
            raise self._no_space(f"{shown_bytes(num_bytes - begun)} are needed, and {shown_bytes(free)} are free")
        patterns = [glob.escape(name) for name in missing]
        self._snapshot(self.model.revision, patterns, shows_progress=shows_progress and sys.stderr.isatty())
        if lacking := [name for name in missing if not (self.folder / name).is_file()]:
            raise CheckpointError(f"{self.model.repository} at {self._endpoint} holds no {', '.join(lacking)}")

    def read(self, file: str, start: int, num_bytes: int) -> tuple[bytes, int]:
        """Return a part of a file, without fetching the rest, and the size of the whole file in bytes.

        Raises:
            CheckpointError: the file cannot be read.
        """
        utils = self._library.utils
        url = self._library.hf_hub_url(
            self.model.repository, file, revision=self.model.revision, endpoint=self._endpoint
        )
        headers = utils.build_hf_headers(**self._own_name) | {
            "Range": f"bytes={start}-{start + num_bytes - 1}",
            "Accept-Encoding": "identity",
        }
        with self._errors_named():
            response = utils.get_session().get(url, headers=headers, timeout=SECONDS_TO_ANSWER)
            utils.hf_raise_for_status(response)
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdecimal():
                return response.content, int(total)
        return response.content[start : start + num_bytes], len(response.content)  # the server does not support ranges

    @property
    def _own_name(self) -> dict[str, str]:
        return {"library_name": "moeserve", "library_version": installed_version("moeserve")}

    def _snapshot(
        self,
        revision: str | None,
        patterns: Sequence[str],
        *,
        shows_progress: bool = False,
        may_lack_files: bool = False,
    ) -> Path:
        """Fetch files that match patterns, except for files that the cache has. Return the folder of the commit.

        Args:
            may_lack_files: if the hub cannot be reached, return what the cache has, even if files are missing.
        """
        with self._errors_named(), _quiet(self._library.utils, shows_progress):
            try:
                folder = self._library.snapshot_download(
                    self.model.repository,
                    revision=revision,
                    allow_patterns=list(patterns),
                    cache_dir=self.model.download_dir,
                    endpoint=self._endpoint,
                    local_files_only=self._only_cached,
                    **self._own_name,
                )
            except self._library.errors.LocalEntryNotFoundError as error:
                folder = getattr(error, "snapshot_path", None)
                if folder is None or not may_lack_files:
                    raise
        return Path(folder)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Turn every error of huggingface_hub, and of the libraries that it uses, into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> CheckpointError:
        errors, name, revision = self._library.errors, self.model.repository, self.model.revision or "main"
        is_local = isinstance(error, errors.LocalEntryNotFoundError)
        if is_local and isinstance(error.__cause__, errors.HfHubHTTPError):  # raised before the cache was tried
            return self._named(error.__cause__)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, errors.GatedRepoError):
            return CheckpointError(
                f"{name} is gated at {self._endpoint}: accept its terms on its page there, and {_LOG_IN}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return CheckpointError(
                f"{name!r} is neither a folder here nor a repository that can be seen at {self._endpoint}: check the "
                f"name; if the repository is private, {_LOG_IN}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointError(
                f"{name} has no revision {revision!r} at {self._endpoint}; name a branch, tag or commit"
            )
        if isinstance(error, errors.HFValidationError):
            return CheckpointError(f"{name!r} is neither a folder here nor the name of a repository: {reason:.300}")
        if is_local or isinstance(error, errors.OfflineModeIsEnabled):
            cause = error.__cause__ or error
            why = "HF_HUB_OFFLINE=1" if isinstance(cause, errors.OfflineModeIsEnabled) else f"{cause}".split("\n")[0]
            return CheckpointError(
                f"{name} (revision {revision}) is not a folder here, its files are not all in the cache "
                f"({self._cache}), and {self._endpoint} cannot be reached: {why:.300}"
            )
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            return CheckpointError(f"{self._endpoint} refuses access to {name} ({status}): {_LOG_IN} ({reason:.300})")
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return self._no_space(str(error))
        return CheckpointError(
            f"fetching {name} from {self._endpoint} failed: {reason:.300}; try again: what has arrived is in the cache "
            f"({self._cache})"
        )

    def _no_space(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the disk of the cache ({self._cache}) is too full for {self.model.name}: {why}; make room, or choose "
            "another folder with download_dir or HF_HUB_CACHE"
        )

    @property
    def _cache(self) -> str:
        return str(self.model.download_dir or self._library.constants.HF_HUB_CACHE)


@contextlib.contextmanager
def _quiet(utils: Any, shows_progress: bool) -> Iterator[None]:
    """Suppress the library's warnings about our patterns, and its progress bars unless `shows_progress`."""
    level, were_enabled = utils.logging.get_verbosity(), not utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    if not shows_progress:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if were_enabled and not shows_progress:
            utils.enable_progress_bars()
