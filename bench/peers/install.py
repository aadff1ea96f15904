"""Makes the environments of peers. Complete ones are kept, interrupted ones are made again.

    python -m moeserve.bench.peers.install [NAME ...] [--folder FOLDER] [--pip-option=OPTION ...]

Without names, all environments are made. llama.cpp is compiled for this processor, which needs a C++ compiler and about
ten minutes on two cores. The others contain torch, and need a build of it without CUDA, because the CUDA libraries are
not among the pinned packages. torch's installation page gives the extra index to set, as `PIP_EXTRA_INDEX_URL` or
`--pip-option=--extra-index-url=...`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from moeserve.bench.peers.environments import (
    ENVIRONMENTS,
    STAMP,
    PeerError,
    is_installed,
    peers_folder,
    python_of,
    requirements,
    tcmalloc,
)

MIN_PYTHON = (3, 11)
COMPILED = "llama-cpp-python"  # built from source, for this processor
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
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{name}: making {home} (log: {log})", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-binary", COMPILED]
        with log.open("w") as output:
            run([*pip, *pip_options, "-r", str(requirements(name))], log, output.fileno())
            run([python, "-c", f"import {ENVIRONMENTS[name]}"], log, output.fileno())
        shutil.copy(requirements(name), home / STAMP)
    return python_of(name, folder)


def run(command: list[str], log: Path, output: int) -> None:
    variables = os.environ | BUILD_VARIABLES
    code = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise PeerError(f"`{' '.join(command)}` ended with {code}; {log} ends with:\n{tail}\n{ABOUT_TORCH}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.peers.install", description="Make the environments of peer engines."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--folder", type=Path, help=f"target (default: {peers_folder()})")
    parser.add_argument(
        "--pip-option", action="append", default=[], metavar="OPTION", help="passed to pip install, repeatable"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    failures = []
    for name in options.names or ENVIRONMENTS:
        try:
            folder = options.folder and options.folder.absolute()
            print(f"{name}: {install(name, folder, pip_options=options.pip_option)}")
        except PeerError as error:
            failures.append(name)
            print(f"{name}: FAILED. {error}", file=sys.stderr)
    if not tcmalloc():
        print(
            "tcmalloc, which vLLM and PyTorch recommend, is not installed here. On Debian: "
            "apt install libtcmalloc-minimal4"
        )
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
