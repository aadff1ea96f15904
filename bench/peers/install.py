"""Make the Python environments of other engines. Complete environments are kept; interrupted ones are made again.

Without names, all environments are made. llama.cpp is compiled for this processor, which needs a C++ compiler and about
ten minutes on two cores; so is `llama-server`, its own server, which also needs cmake and the environment `llama.cpp`.
ik_llama.cpp is a wheel for AVX2, and needs the environment `llama.cpp` to write its files. The others contain torch,
and need a build of it without CUDA, because the CUDA libraries are not among the pinned packages. torch's installation
page gives the extra index to set, as `PIP_EXTRA_INDEX_URL` or `--pip-option=--extra-index-url=...`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from moeserve.bench.harness import plain_parser
from moeserve.bench.peers import processes
from moeserve.bench.peers.environments import (
    ENVIRONMENTS,
    STAMP,
    PeerError,
    is_installed,
    peers_folder,
    pinned_version,
    python_of,
    requirements,
    tcmalloc,
)

MIN_PYTHON = (3, 11)
COMPILED = "llama-cpp-python"  # built from source, for this processor
PACKAGE, SERVER = "llama_cpp_python", "llama-server"
BUILD_VARIABLES = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
ABOUT_TORCH = (
    "If torch cannot find a library, it is a build with CUDA. torch's installation page gives the extra index with "
    "builds without it; set it as PIP_EXTRA_INDEX_URL or --pip-option=--extra-index-url=..."
)


def install(name: str, folder: Path | None = None, *, pip_options: Sequence[str] = ()) -> Path:
    """Make an environment, unless it is complete already.

    Returns:
        The environment's Python.

    Raises:
        PeerError: this Python is too old, or a step failed. The message has the end of the log.
    """
    if sys.version_info < MIN_PYTHON:
        least, this = (".".join(map(str, version[:2])) for version in (MIN_PYTHON, sys.version_info))
        raise PeerError(f"its pinned packages need Python {least}, this is {this}; install moeserve with a newer one")
    folder = folder or peers_folder()
    if not is_installed(name, folder):
        home, log = folder / name, folder / "logs" / f"install-{name}.log"
        print(f"{name}: making {home} (log: {log})", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-binary", COMPILED]
        _run([*pip, *pip_options, "-r", str(requirements(name))], log)
        _run([python, "-c", f"import {ENVIRONMENTS[name]}"], log)
        shutil.copy(requirements(name), home / STAMP)
    return python_of(name, folder)


def _run(command: list[str], log: Path) -> None:
    processes.run(command, log, os.environ | BUILD_VARIABLES, ABOUT_TORCH)


def server_path() -> Path:
    """Return the compiled server.

    Raises:
        PeerError: it is not installed.
    """
    path = python_of("llama.cpp").with_name("llama-server")
    if not path.exists():
        raise PeerError("not installed; run: moeserve bench peers llama-server")
    return path


def install_server() -> Path:
    """Compile llama.cpp's own server for this processor, from the sources of the pinned llama-cpp-python.

    Raises:
        PeerError: a step failed.
    """
    python, log = python_of("llama.cpp"), peers_folder() / "logs" / "install-llama-server.log"
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PeerError("cmake is not installed")
    target = python.with_name("llama-server")
    with tempfile.TemporaryDirectory() as temporary:
        wanted = f"{PACKAGE}=={pinned_version('llama.cpp', PACKAGE)}"
        download = ["pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", temporary, wanted]
        _run([str(python), "-m", *download], log)
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(temporary, filter="data")
        source, build = archive.with_suffix("").with_suffix("") / "vendor" / "llama.cpp", f"{temporary}/build"
        options = [*BUILD_VARIABLES["CMAKE_ARGS"].split(), "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
        options += ["-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        _run([cmake, "-S", str(source), "-B", build, *options], log)
        _run([cmake, "--build", build, "--target", "llama-server"], log)
        shutil.copy(Path(build, "bin", "llama-server"), target)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    known = [*ENVIRONMENTS, SERVER]
    parser = plain_parser("peers", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--folder", type=Path, help=f"target (default: {peers_folder()})")
    parser.add_argument(
        "--pip-option", action="append", default=[], metavar="OPTION", help="passed to pip install, repeatable"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(known):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    status, folder = 0, options.folder and options.folder.absolute()
    for name in options.names or known:
        try:
            made = install_server() if name == SERVER else install(name, folder, pip_options=options.pip_option)
            print(f"{name}: {made}")
        except PeerError as error:
            status = 1
            print(f"{name}: FAILED. {error}", file=sys.stderr)
    if not tcmalloc():
        print(
            "tcmalloc, which vLLM and PyTorch recommend, is not installed here. On Debian: "
            "apt install libtcmalloc-minimal4"
        )
    return status
