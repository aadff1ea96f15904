"""The files of a model that a user names: a folder, a GGUF file, or a repository of a hub.

Only this module turns a user's name for a model into a path. Everything else reads folders and files.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from moeserve.config.engine_config import EngineConfig
from moeserve.config.hub_name import HubModel, parse_hub_name
from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.hub_client import HubClient
from moeserve.models.checkpoint.hub_headers import write_description
from moeserve.models.checkpoint.shards import (
    GGUF_PART,
    INDEX,
    NUMBERED,
    SINGLE,
    has_shards,
    list_names,
    names_of_parts,
    shards_of_index,
)
from moeserve.models.checkpoint.tokenizer_files import COMPANION_FILES, TEMPLATE_FILE, TEMPLATE_FOLDER, VOCABULARY_FILES
from moeserve.models.registry import folder_of

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "config.json",
    *VOCABULARY_FILES,
    *COMPANION_FILES,
    TEMPLATE_FILE,
    "chat_template.json",
    f"{TEMPLATE_FOLDER}/*.jinja",
)
# All files that are read except weights. Files ending with .py are never fetched, because they contain code.
DESCRIPTION_FILES = (*TOKENIZER_FILES, "generation_config.json", "hf_quant_config.json", INDEX)
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class ModelFiles(Protocol):
    """The files of one model."""

    @property
    def hub_model(self) -> HubModel | None:
        """The repository and its commit; None if the files are not from a hub."""
        ...

    @property
    def are_here(self) -> bool:
        """False if weights have yet to be fetched from a hub."""
        ...

    def describe(self, *, with_headers: bool = False) -> Path:
        """Return a folder or a GGUF file that describes the model. The values of weights may be missing.

        Args:
            with_headers: include the files of weights, each with its size and its header.

        Raises:
            CheckpointError: a file cannot be read from the hub.
        """
        ...

    def fetch(self, *, shows_progress: bool = False) -> Path:
        """Fetch the files that are missing, and return the folder or the GGUF file of the model.

        Args:
            shows_progress: draw progress bars if on a terminal.

        Raises:
            CheckpointError: there are no weights that can be read, or they cannot be fetched from the hub.
        """
        ...


def find_model(
    name: str | os.PathLike[str], *, revision: str | None = None, download_dir: str | None = None
) -> ModelFiles:
    """Return the files of a model. If the model is in a hub, fetch the files that describe it, but no weights yet.

    Args:
        name: a folder of a checkpoint or of one GGUF model, a GGUF file, OWNER/NAME in a hub, or OWNER/NAME:FILE for a
            GGUF file in a hub, where FILE may also be a quantisation like Q4_K_M.
        revision: branch, tag or commit in the hub; None: the main branch.
        download_dir: folder of the hub's cache; None: the folder that HF_HUB_CACHE or HF_HOME sets, or its default.

    Raises:
        SettingsError: huggingface_hub is not installed.
        CheckpointError: the repository, the revision or the GGUF file does not exist or cannot be fetched; a folder
            cannot be opened, or holds several GGUF models.
    """
    name = os.fspath(name)
    model = parse_hub_name(name, revision=revision, download_dir=download_dir)
    if model is not None:
        return HubFiles(model)
    if revision is not None:
        logger.warning("revision=%r has no effect: %s is no repository of a hub", revision, name)
    return LocalFiles(_model_in(Path(name).expanduser()))


def _model_in(path: Path) -> Path:
    """Return the GGUF file if the path is a folder that holds only this model. Otherwise return the path.

    Raises:
        CheckpointError: a folder cannot be opened, or holds several models in GGUF files.
    """
    try:
        os.stat(os.path.join(path, "."))
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}; run chmod a+rx on it") from None
    except (OSError, ValueError):  # not a folder, or a name that no file system allows
        return path
    try:
        names = sorted(os.listdir(path))
    except PermissionError:  # files can still be read by their names
        return path
    if "config.json" in names or any(name.endswith(".safetensors") for name in names):
        return path
    first_of_model: dict[str, str] = {}  # first file of each model, by its name without the number of a part
    for name in names:
        if name.endswith(".gguf") and not name.startswith("mmproj"):  # mmproj files hold other modalities
            match = GGUF_PART.fullmatch(name)
            first_of_model.setdefault(match["stem"] if match else name, name)
    if len(first_of_model) > 1:
        raise CheckpointError(
            f"{path} holds several models: {list_names(list(first_of_model.values()))}; give the path of one file"
        )
    return path / min(first_of_model.values()) if first_of_model else path


def find_tokenizer(
    name: str, *, revision: str | None = None, download_dir: str | None = None
) -> tuple[Path, HubModel | None]:
    """Return the folder of a tokenizer, and its repository if it is in a hub. Fetch a tokenizer named OWNER/NAME.

    Raises:
        SettingsError, CheckpointError: as for `find_model`.
    """
    model = parse_hub_name(name, revision=revision, download_dir=download_dir)
    if model is None:
        return Path(name).expanduser(), None
    if model.gguf is not None:
        raise CheckpointError(f"tokenizer={name!r}: name a repository with a tokenizer.json, as OWNER/NAME")
    hub = HubClient(model, TOKENIZER_FILES)
    return hub.folder, hub.model


def on_this_host(config: EngineConfig, *, only_cached: bool = False) -> EngineConfig:
    """Return the config with the paths that files from a hub have on this host.

    The files are read at the commits that the driver has found. Each host has its own cache, or hosts share a cache.
    Files that this host's cache lacks are fetched.

    Args:
        only_cached: read only files in the cache, because another process of this host has fetched them.

    Raises:
        SettingsError, CheckpointError: as for `find_model`.
    """
    weights, texts = config.weights, config.texts
    model_path, tokenizer_path = weights.model_path, texts.tokenizer_path
    if weights.hub_model is not None:
        files = HubFiles(weights.hub_model, only_cached=only_cached)
        path = files.describe() if weights.load_format == "dummy" else files.fetch()
        model_path = str(folder_of(path))
        if texts.tokenizer_path == weights.model_path:
            tokenizer_path = model_path
    if texts.hub_tokenizer is not None:
        tokenizer_path = str(HubClient(texts.hub_tokenizer, TOKENIZER_FILES, only_cached=only_cached).folder)
    return config.changed(weights={"model_path": model_path}, texts={"tokenizer_path": tokenizer_path})


class LocalFiles:
    """A checkpoint folder or a GGUF file."""

    hub_model = None
    are_here = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def describe(self, *, with_headers: bool = False) -> Path:
        return self._path

    def fetch(self, *, shows_progress: bool = False) -> Path:
        return self._path


class HubFiles:
    """A checkpoint or a GGUF file in a repository of a hub, at one commit."""

    def __init__(self, model: HubModel, *, only_cached: bool = False) -> None:
        """
        Args:
            only_cached: read only files in the cache, because another process of this host has fetched them.

        Raises:
            SettingsError, CheckpointError: as for `find_model`.
        """
        self._gguf = model.gguf
        # A GGUF file contains its config. Without any pattern, huggingface_hub would not find the commit.
        wanted = DESCRIPTION_FILES if self._gguf is None else ("config.json",)
        self._hub = HubClient(model, wanted, only_cached=only_cached)
        self._repository, self.hub_model = self._hub.model.repository, self._hub.model
        cached = self._hub.cached_files
        self._sizes: Mapping[str, int] = {}  # sizes of all files in bytes; empty if the cache has the weights
        self._weights = self._choose(cached)
        self.are_here = bool(self._weights) and {*self._weights} <= {*cached}
        if not self.are_here:
            self._sizes = self._hub.sizes()
            self._weights = self._choose(self._sizes)
            self._check()

    def describe(self, *, with_headers: bool = False) -> Path:
        folder = self._hub.folder
        if not self.are_here and (with_headers or self._gguf is not None):
            folder = write_description(self._hub, self._companions(), self._weights)
        elif not self.are_here and has_shards(folder):  # shards that an interrupted call has fetched
            folder = write_description(self._hub, self._companions(), ())
        return self._path_in(folder)

    def fetch(self, *, shows_progress: bool = False) -> Path:
        if not self.are_here:
            if not self._weights:
                raise self._lacks("weights in safetensors files")
            self._hub.fetch({name: self._sizes[name] for name in self._weights}, shows_progress=shows_progress)
            self.are_here = True
        return self._path_in(self._hub.folder)

    def _path_in(self, folder: Path) -> Path:
        """Return the path of the model, given the folder that holds its files."""
        return folder if self._gguf is None else folder / self._weights[0]

    def _companions(self) -> list[str]:
        """Return the names of the cached files that describe a safetensors model, such as the tokenizer's files."""
        if self._gguf is not None:
            return []
        is_wanted = re.compile("|".join(map(fnmatch.translate, DESCRIPTION_FILES))).match
        return [name for name in self._hub.cached_files if is_wanted(name)]

    def _choose(self, names: Collection[str]) -> list[str]:
        """Return which of the available files `names` are the model's files of weights; empty if none are."""
        if self._gguf is not None:
            return _choose_gguf(names, self._gguf, self._repository)
        index = self._hub.folder / INDEX
        shards = sorted(shards_of_index(index)) if index.is_file() else []
        if shards and not (SINGLE in names and not any(shard in names for shard in shards)):
            return shards
        if SINGLE in names:
            return [SINGLE]
        numbered = [match for name in names if (match := NUMBERED.fullmatch(name)) and "/" not in name]
        return sorted({part for match in numbered for part in names_of_parts(match)})

    def _check(self) -> None:
        """Raise CheckpointError if the repository lacks a file that the model needs."""
        if self._gguf is not None and not self._weights:
            raise self._lacks(f"GGUF file that {self._gguf!r} names")
        if self._gguf is None and "config.json" not in self._sizes:
            raise self._lacks("config.json")
        if lacking := [name for name in self._weights if name not in self._sizes]:
            raise CheckpointError(f"{self._repository} is incomplete: it holds no {list_names(lacking)}")

    def _lacks(self, what: str) -> CheckpointError:
        """Return the error for a repository that lacks `what`. The message lists weight files that it has."""
        ggufs = [name for name in self._sizes if name.endswith(".gguf")]
        pickled = [name for name in self._sizes if name.endswith(PICKLED)]
        why = ""
        if ggufs:
            why = f"; it has GGUF files, one of which can be named as {self._repository}:FILE: {list_names(ggufs)}"
        elif pickled:
            why = (
                f"; it has {list_names(pickled)}, which are not read, because loading such files may run code in them: "
                "name a repository with safetensors"
            )
        return CheckpointError(f"{self._repository} has no {what}{why}")


def _choose_gguf(names: Collection[str], wanted: str, repository: str) -> list[str]:
    """Return the names of the files of one GGUF model, which may have several parts; empty if there is none.

    Args:
        wanted: path or name of a file or part, with or without the ending .gguf; or a quantisation in the name.

    Raises:
        CheckpointError: several models fit.
    """
    models: dict[str, list[str]] = {}  # parts of each model, by its name without part number and ending
    exact: dict[str, list[str]] = {}
    is_word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE).search
    for name in sorted(names):
        # Files named mmproj hold the other modalities of a model.
        if not name.endswith(".gguf") or os.path.basename(name).startswith("mmproj"):
            continue
        match = GGUF_PART.fullmatch(name)
        stem = match["stem"] if match else name.removesuffix(".gguf")
        parts = names_of_parts(match) if match else [name]
        spellings = {stem, f"{stem}.gguf", name}
        if wanted in spellings | {os.path.basename(each) for each in spellings}:
            exact[stem] = parts
        if is_word(stem):
            models[stem] = parts
    found = exact or models
    if len(found) > 1:
        files = [parts[0] for parts in found.values()]
        raise CheckpointError(
            f"{repository}: {wanted!r} names several GGUF files; name one of them: {list_names(files)}"
        )
    return next(iter(found.values()), [])
