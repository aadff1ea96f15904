"""Makes the environments of peers. A complete one is kept; an interrupted one is made again.

    python -m moeserve.bench.peers.install [NAME ...] [--folder FOLDER] [--pip-option=OPTION ...]

Without names, all of them. llama.cpp is compiled for this processor, which needs a C++ compiler and about ten minutes
on two cores. The others contain torch and need a build of it without CUDA, since the CUDA libraries are not among the
pinned packages. torch's installation page gives the extra index to set, as `PIP_EXTRA_INDEX_URL` or
`--pip-option=--extra-index-url=...`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from moeserve.bench.peers.environments import (
    ENVIRONMENTS,
    MIN_PYTHON,
    STAMP,
    Environment,
    EnvironmentName,
    PeerError,
    is_installed,
    peers_folder,
    python_of,
    tcmalloc,
)

ABOUT_TORCH = (
    "If torch cannot find a library, it is a build with CUDA. torch's installation page gives the extra index with "
    "builds without it; set it as PIP_EXTRA_INDEX_URL or --pip-option=--extra-index-url=..."
)


def install(name: EnvironmentName, folder: Path | None = None, *, pip_options: Sequence[str] = ()) -> Path:
    """Make an environment, or find it already made.

    Returns:
        Its Python.

    Raises:
        PeerError: this Python is too old, or a step failed. The message has the end of the log.
    """
    if sys.version_info < MIN_PYTHON:
        least, this = (".".join(map(str, version[:2])) for version in (MIN_PYTHON, sys.version_info))
        raise PeerError(f"its pinned packages need Python {least}, this is {this}; install moeserve with a newer one")
    folder = folder or peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not is_installed(name, folder):
            _make(ENVIRONMENTS[name], folder, pip_options)
        return python_of(name, folder)


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
    unknown = set(options.names) - set(get_args(EnvironmentName))
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")

    failures = []
    for name in options.names or ENVIRONMENTS:
        try:
            folder = options.folder and options.folder.absolute()
            print(f"{name}: {install(name, folder, pip_options=options.pip_option)}")
        except PeerError as error:
            failures.append(name)
            print(f"{name}: FAILED. {error}", file=sys.stderr)
    if {"vllm", "transformers"} & set(options.names or ENVIRONMENTS) and not tcmalloc():
        print(
            "tcmalloc, which vLLM and PyTorch recommend, is not installed here. On Debian: "
            "apt install libtcmalloc-minimal4"
        )
    if failures:
        sys.exit(1)


def _make(environment: Environment, folder: Path, pip_options: Sequence[str]) -> None:
    home = folder / environment.name
    log = folder / "logs" / f"install-{environment.name}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"{environment.name}: making {home} (log: {log})", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", *pip_options]
    for package in environment.compiled:
        pip += ["--no-binary", package]
    variables = os.environ | environment.build_variables
    with log.open("w") as output:
        _run([*pip, "-r", str(environment.requirements())], variables, log, output.fileno())
        advice = ABOUT_TORCH if environment.has_torch() else ""
        _run([str(python), "-c", f"import {environment.import_name}"], variables, log, output.fileno(), advice)
    (home / STAMP).write_text(environment.digest())


def _run(command: list[str], variables: dict[str, str], log: Path, output: int, advice: str = "") -> None:
    code = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        message = f"`{' '.join(command)}` ended with {code}; {log} ends with:\n{tail}"
        raise PeerError(f"{message}\n{advice}".rstrip())


if __name__ == "__main__":
    main()
