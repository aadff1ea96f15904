"""Compiles llama.cpp's own server from the sources of the pinned llama-cpp-python, which does not contain it.

    python -m moeserve.bench.peers.llama_server

It needs the environment `llama.cpp`, a C++ compiler and cmake, and about ten minutes on two cores.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from moeserve.bench.peers.environments import PeerError, peers_folder, pinned_version, python_of
from moeserve.bench.peers.install import BUILD_VARIABLES, run

PACKAGE = "llama_cpp_python"


def server_path() -> Path:
    """Return the compiled server.

    Raises:
        PeerError: it is not installed.
    """
    path = python_of("llama.cpp").with_name("llama-server")
    if not path.exists():
        raise PeerError("not installed; run: python -m moeserve.bench.peers.llama_server")
    return path


def install_server() -> Path:
    """Compile the server, for this processor.

    Raises:
        PeerError: a step failed.
    """
    python, log = python_of("llama.cpp"), peers_folder() / "logs" / "install-llama-server.log"
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PeerError("cmake is not installed")
    target = python.with_name("llama-server")
    with tempfile.TemporaryDirectory() as temporary, log.open("w") as output:
        wanted = f"{PACKAGE}=={pinned_version('llama.cpp', PACKAGE)}"
        download = ["pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", temporary, wanted]
        run([str(python), "-m", *download], log, output.fileno())
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(temporary, filter="data")
        source, build = archive.with_suffix("").with_suffix("") / "vendor" / "llama.cpp", f"{temporary}/build"
        options = [*BUILD_VARIABLES["CMAKE_ARGS"].split(), "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
        options += ["-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        run([cmake, "-S", str(source), "-B", build, *options], log, output.fileno())
        run([cmake, "--build", build, "--target", "llama-server"], log, output.fileno())
        shutil.copy(Path(build, "bin", "llama-server"), target)
    return target


if __name__ == "__main__":
    print(install_server())
