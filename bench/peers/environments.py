"""Where the peers' environments are and what is installed in each. Runs nothing.

    peers/ in moeserve's cache folder
        llama.cpp/      one virtual environment per name below
        vllm/
        logs/           what each peer last printed

The files in requirements/ pin every package, so pip resolves nothing.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moeserve.config import cache_folder
from moeserve.errors import MoeserveError

EnvironmentName = Literal["llama.cpp", "vllm", "kt-kernel"]
REQUIREMENTS = Path(__file__).parent / "requirements"
STAMP = "installed"  # written last; holds the digest of what was installed


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one engine in it."""

    name: EnvironmentName
    import_name: str  # what must be importable for the environment to be good
    compiled: tuple[str, ...] = ()  # packages that are built from source here, for this very processor
    build_variables: dict[str, str] = field(default_factory=dict)

    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    def digest(self) -> str:
        """Changes with anything that would make another environment."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        parts = (version, self.requirements().read_text(), repr(self.compiled), repr(self.build_variables))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# The compiler's own word on this processor: AVX512-BF16 where it has it.
NATIVE_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
ENVIRONMENTS: dict[EnvironmentName, Environment] = {
    environment.name: environment
    for environment in (
        Environment("llama.cpp", "llama_cpp", ("llama-cpp-python",), NATIVE_BUILD),
        Environment("vllm", "vllm._custom_ops"),
        Environment("kt-kernel", "kt_kernel"),
    )
}


class PeerError(MoeserveError, RuntimeError):
    """A peer is not installed, cannot be, or failed. Says what to do, where there is something to do."""


def peers_folder() -> Path:
    return cache_folder() / "peers"


def python_of(name: EnvironmentName, folder: Path | None = None) -> Path:
    """The Python of an installed environment.

    Raises:
        PeerError: it is not installed, or not as it would be now.
    """
    home = (folder or peers_folder()) / name
    stamp = home / STAMP
    if not stamp.exists() or stamp.read_text() != ENVIRONMENTS[name].digest():
        raise PeerError(f"{home} is not installed; run: python -m moeserve.bench.peers.install {name}")
    return home / "bin" / "python"


def tcmalloc() -> str | None:
    """The allocator that vLLM recommends on a CPU, where the system has it."""
    return ctypes.util.find_library("tcmalloc_minimal")
