"""Fetch the JSON-Schema-Test-Suite, which the source distribution of jsonschema carries, once: `make schema-suite`."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / ".venv" / "json-schema-suite"
VERSION = "4.26.0"  # of jsonschema
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
TESTS = f"jsonschema-{VERSION}/json/tests/draft2020-12/"  # without the optional ones, in folders below
TIMEOUT = 300  # seconds


@dataclass(frozen=True)
class Group:
    """A schema of the suite and its instances."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]  # "data", and whether it is "valid"


def groups() -> Iterator[Group]:
    """Yield all schemas, of a suite that was fetched."""
    for path in sorted(FOLDER.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield Group(path.stem, group["description"], group["schema"], group["tests"])


def fetch() -> None:
    """Put the files of the suite into their folder, all or none. No code of the package is run but its build's.

    Raises:
        RuntimeError: pip fails, or the archive has another hash.
    """
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        requirement = Path(scratch) / "requirement.txt"
        requirement.write_text(f"jsonschema=={VERSION} --hash=sha256:{SHA256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary=:all:",
            "-r",
            requirement.name,
        ]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode != 0:
            raise RuntimeError(f"pip could not fetch the source of jsonschema {VERSION}: {done.stderr.strip()}")
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(Path(scratch) / f"jsonschema-{VERSION}.tar.gz") as members:
            for member in members:
                folder, _, name = member.name.rpartition("/")
                content = members.extractfile(member)
                if folder + "/" == TESTS and content is not None:
                    (unpacked / name).write_bytes(content.read())
        unpacked.rename(FOLDER)


def main() -> int:
    try:
        if not FOLDER.is_dir():
            fetch()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
