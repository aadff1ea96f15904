"""The environments of peers, and what is installed in each.

    peers/ in moeserve's cache folder
        llama.cpp/      one virtual environment per name
        vllm/
        ...
        logs/           the latest output of each peer

The files in requirements/ pin every package, so pip resolves nothing. They need Python 3.11, which is newer than what
moeserve itself needs. ik_llama.cpp is not among the peers: ik-llama-cpp-python 0.1.5 is built for AVX2 only, and its
tokens agree with those of transformers on one of three models (`check.py`).
"""

from __future__ import annotations

import ctypes.util
import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moeserve.config.environment import cache_folder
from moeserve.errors import MoeserveError

EnvironmentName = Literal["llama.cpp", "vllm", "kt-kernel", "transformers"]
REQUIREMENTS = Path(__file__).parent / "requirements"
MIN_PYTHON = (3, 11)
STAMP = "installed"  # written last; holds the digest of what was installed


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one engine in it."""

    name: EnvironmentName
    import_name: str  # must be importable after the installation
    compiled: tuple[str, ...] = ()  # packages that are built from source for this processor
    build_variables: dict[str, str] = field(default_factory=dict)

    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    def has_torch(self) -> bool:
        return "\ntorch==" in self.requirements().read_text()

    def digest(self) -> str:
        """Return a digest that changes with everything that changes the environment."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        parts = (version, self.requirements().read_text(), repr(self.compiled), repr(self.build_variables))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


NATIVE_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
ENVIRONMENTS: dict[EnvironmentName, Environment] = {
    environment.name: environment
    for environment in (
        Environment("llama.cpp", "llama_cpp", ("llama-cpp-python",), NATIVE_BUILD),
        Environment("vllm", "vllm._custom_ops"),
        Environment("kt-kernel", "kt_kernel"),
        Environment("transformers", "transformers"),
    )
}


class PeerError(MoeserveError, RuntimeError):
    """A peer is not installed, cannot be installed, or failed.

    The first line gives the reason without file names, so that results can record it.
    """

    @property
    def reason(self) -> str:
        return str(self).partition("\n")[0]


def peers_folder() -> Path:
    return cache_folder() / "peers"


def python_of(name: EnvironmentName, folder: Path | None = None) -> Path:
    """Return the Python of an installed environment.

    Raises:
        PeerError: it is not installed, or its requirements have changed since.
    """
    if not is_installed(name, folder):
        raise PeerError(f"not installed; run: python -m moeserve.bench.peers.install {name}")
    return (folder or peers_folder()) / name / "bin" / "python"


def is_installed(name: EnvironmentName, folder: Path | None = None) -> bool:
    """True if the environment exists with its current requirements."""
    stamp = (folder or peers_folder()) / name / STAMP
    return stamp.exists() and stamp.read_text() == ENVIRONMENTS[name].digest()


def recommended_libraries(python: Path) -> list[str]:
    """Return the libraries that vLLM and PyTorch recommend to preload on a CPU, as far as they exist.

    Args:
        python: of the environment that may contain Intel's OpenMP. tcmalloc comes from the system.
    """
    intel_openmp = python.parent.parent / "lib" / "libiomp5.so"
    return [*filter(None, [tcmalloc()]), *([str(intel_openmp)] if intel_openmp.exists() else [])]


def tcmalloc() -> str | None:
    """Return the file name of the system's tcmalloc, if it is installed."""
    return ctypes.util.find_library("tcmalloc_minimal")
