"""Where the peers' environments are and what is installed in each. Runs nothing.

    peers/ in moeserve's cache folder
        llama.cpp/      one virtual environment per name below
        vllm/
        ...
        logs/           what each peer last printed

The files in requirements/ pin every package, so pip resolves nothing. They need Python 3.11, which is newer than what
moeserve itself needs.

ik_llama.cpp is not among the peers. The wheel of ik-llama-cpp-python 0.1.5, the latest, is built for AVX2 alone and
does not compute the model: decoding one sequence at a time with two layers of mixtral-mini, 1 % of its tokens are those
of transformers, with deepseek-mini 67 %, where llama-cpp-python 0.3.36 has 95 % with the same files; only those of
qwen3-mini are right.
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
    import_name: str  # what must be importable for the environment to be good
    compiled: tuple[str, ...] = ()  # packages that are built from source here, for this very processor
    build_variables: dict[str, str] = field(default_factory=dict)

    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    def has_torch(self) -> bool:
        return "\ntorch==" in self.requirements().read_text()

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
        Environment("transformers", "transformers"),
    )
}


class PeerError(MoeserveError, RuntimeError):
    """A peer is not installed, cannot be, or failed. Says what to do, where there is something to do.

    The first line tells the reason, without names of files; results may keep it.
    """

    @property
    def reason(self) -> str:
        return str(self).partition("\n")[0]


def peers_folder() -> Path:
    return cache_folder() / "peers"


def python_of(name: EnvironmentName, folder: Path | None = None) -> Path:
    """The Python of an installed environment.

    Raises:
        PeerError: it is not installed, or not as it would be now.
    """
    if not is_installed(name, folder):
        raise PeerError(f"not installed; run: python -m moeserve.bench.peers.install {name}")
    return (folder or peers_folder()) / name / "bin" / "python"


def is_installed(name: EnvironmentName, folder: Path | None = None) -> bool:
    """Whether an environment is there, as it would be made now."""
    stamp = (folder or peers_folder()) / name / STAMP
    return stamp.exists() and stamp.read_text() == ENVIRONMENTS[name].digest()


def recommended_libraries(python: Path) -> list[str]:
    """What vLLM and PyTorch recommend to preload on a CPU: tcmalloc and Intel's OpenMP, those of them that are there.

    Args:
        python: of the environment that is to have Intel's OpenMP in it; the system is to have tcmalloc.
    """
    intel_openmp = python.parent.parent / "lib" / "libiomp5.so"
    return [*filter(None, [tcmalloc()]), *([str(intel_openmp)] if intel_openmp.exists() else [])]


def tcmalloc() -> str | None:
    """The allocator's name, where the system has it."""
    return ctypes.util.find_library("tcmalloc_minimal")
