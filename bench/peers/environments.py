"""The environments of peers, and the packages of each.

The environment of clients is for tests of the server: litellm and langchain-openai need an older version of openai.

    peers/ in moeserve's cache folder
        llama.cpp/      one virtual environment per name
        vllm/
        ...
        logs/           the latest output of each peer

The files in requirements/ pin every package, so pip resolves nothing. They need Python 3.11, a newer version than
moeserve itself needs.
"""

from __future__ import annotations

import ctypes.util
import re
from pathlib import Path

from moeserve.config.environment import cache_folder
from moeserve.errors import MoeserveError

REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = {  # modules that must be importable after the installation
    "llama.cpp": "llama_cpp",
    "ik_llama.cpp": "ik_llama_cpp",
    "vllm": "vllm._custom_ops",
    "kt-kernel": "kt_kernel",
    "transformers": "transformers",
    "clients": "langchain_openai",
}
STAMP = "installed.txt"  # holds the requirements, and is written last


class PeerError(MoeserveError, RuntimeError):
    """A peer is not installed, cannot be installed, or failed.

    The first line gives the reason without file names, so that results can record it.
    """

    @property
    def reason(self) -> str:
        return str(self).partition("\n")[0]


def requirements(name: str) -> Path:
    return REQUIREMENTS / f"{name}.txt"


def pinned_version(name: str, package: str) -> str:
    """Return the version of a package in an environment."""
    found = re.search(rf"^{package}==(\S+)", requirements(name).read_text(), re.MULTILINE)
    assert found is not None, package
    return found[1]


def peers_folder() -> Path:
    return cache_folder() / "peers"


def python_of(name: str, folder: Path | None = None) -> Path:
    """Return the Python of an installed environment.

    Raises:
        PeerError: it is not installed, or its requirements have changed since.
    """
    if not is_installed(name, folder):
        raise PeerError(f"not installed; run: moeserve bench peers {name}")
    return (folder or peers_folder()) / name / "bin" / "python"


def is_installed(name: str, folder: Path | None = None) -> bool:
    """True if the environment exists with its current requirements."""
    stamp = (folder or peers_folder()) / name / STAMP
    return stamp.exists() and stamp.read_text() == requirements(name).read_text()


def recommended_libraries(python: Path) -> list[str]:
    """Return the libraries that vLLM and PyTorch recommend to preload on a CPU, if they exist.

    Args:
        python: Python of the environment that may contain Intel's OpenMP. tcmalloc comes from the system.
    """
    intel_openmp = python.parent.parent / "lib" / "libiomp5.so"
    return [*filter(None, [tcmalloc()]), *([str(intel_openmp)] if intel_openmp.exists() else [])]


def tcmalloc() -> str | None:
    """Return the file name of the system's tcmalloc; None if it is not installed."""
    return ctypes.util.find_library("tcmalloc_minimal")
