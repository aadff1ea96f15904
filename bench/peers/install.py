"""Makes the environments of peers. Each is made once; what was interrupted is made again.

    python -m moeserve.bench.peers.install [NAME ...] [--folder FOLDER]

Without names, all of them. llama.cpp is compiled for this processor, which takes a C++ compiler and some ten minutes on
two cores. torch comes as pip finds it: set an index of CPU builds, or it brings gigabytes of CUDA along.
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
    STAMP,
    Environment,
    EnvironmentName,
    PeerError,
    peers_folder,
    python_of,
    tcmalloc,
)


def install(name: EnvironmentName, folder: Path | None = None) -> Path:
    """Makes an environment, or finds it made.

    Returns:
        Its Python.

    Raises:
        PeerError: a step failed. The message holds the end of what it printed; the log holds all of it.
    """
    folder = folder or peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        try:
            return python_of(name, folder)
        except PeerError:
            return _make(ENVIRONMENTS[name], folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.peers.install", description="Makes the environments of peer engines."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; none: all of them")
    parser.add_argument("--folder", type=Path, help=f"where they go; default: {peers_folder()}")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(get_args(EnvironmentName))
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")

    failures = []
    for name in options.names or ENVIRONMENTS:
        try:
            print(f"{name}: {install(name, options.folder and options.folder.absolute())}")
        except PeerError as error:
            failures.append(name)
            print(f"{name}: FAILED. {error}", file=sys.stderr)
    if "vllm" in (options.names or ENVIRONMENTS) and not tcmalloc():
        print(
            "vllm: tcmalloc, which vLLM recommends, is not installed here. On Debian: apt install libtcmalloc-minimal4"
        )
    if failures:
        sys.exit(1)


def _make(environment: Environment, folder: Path) -> Path:
    home = folder / environment.name
    log = folder / "logs" / f"install-{environment.name}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"{environment.name}: making {home} (log: {log})", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    for package in environment.compiled:
        pip += ["--no-binary", package]
    variables = os.environ | environment.build_variables
    with log.open("w") as output:
        _run([*pip, "-r", str(environment.requirements())], variables, log, output.fileno())
        _run([str(python), "-c", f"import {environment.import_name}"], variables, log, output.fileno())
    (home / STAMP).write_text(environment.digest())
    return python


def _run(command: list[str], variables: dict[str, str], log: Path, output: int) -> None:
    code = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise PeerError(f"`{' '.join(command)}` ended with {code}; {log} ends with:\n{tail}")


if __name__ == "__main__":
    main()
