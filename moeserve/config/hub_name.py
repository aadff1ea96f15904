"""Names of models in repositories of a hub: "Qwen/Qwen3-30B-A3B", or "OWNER/NAME:Q4_K_M" for a GGUF file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<gguf>\w[^:]*))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A checkpoint in a repository of a hub."""

    repository: str  # OWNER/NAME
    gguf: str | None = None  # name of a GGUF file, or of a quantisation like Q4_K_M; None: safetensors
    revision: str | None = None  # branch, tag or commit; None: the main branch
    download_dir: str | None = None  # folder of the cache; None: the hub library's
    endpoint: str | None = None  # URL of the hub; None: the URL in HF_ENDPOINT

    @property
    def name(self) -> str:
        """The name as users write it."""
        return self.repository if self.gguf is None else f"{self.repository}:{self.gguf}"


def parse_hub_name(name: str, *, revision: str | None = None, download_dir: str | None = None) -> HubModel | None:
    """Return the model of a hub that a name refers to; None if the name is the path of a folder or a file.

    A file or folder that exists at that path takes precedence. Names that begin with `.`, `/` or `~`, or end with
    `.gguf` without a repository before a colon, are paths in any case.
    """
    match = _NAME.fullmatch(name)
    if match is None or (match["gguf"] is None and name.endswith(".gguf")) or os.path.lexists(name):
        return None
    return HubModel(repository=match["repository"], gguf=match["gguf"], revision=revision, download_dir=download_dir)
