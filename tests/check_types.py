"""Check that `mypy --strict` accepts a program that uses the whole API, and refuses each mistake of another.

Run by `make check`. The first run takes minutes, because mypy then reads the types of torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM, MISTAKES = Path("examples/whole_api.py"), Path("tests/typed_mistakes.py")


def errors_of_mypy() -> set[tuple[str, int, str]]:
    """Return file, line and code of each error."""
    mypy = [Path(sys.executable).with_name("mypy"), "--strict", "--config-file=", "--cache-dir=.mypy_cache/strict"]
    run = subprocess.run([*mypy, PROGRAM, MISTAKES], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        sys.exit(run.stdout + run.stderr)
    found = re.findall(r"^([^:\n]+):(\d+): error: .*\[([a-z-]+)\]$", run.stdout, re.MULTILINE)
    return {(file, int(line), code) for file, line, code in found}


def planted() -> set[tuple[str, int, str]]:
    """Return file, line and code of the errors that the comments of the mistakes name."""
    lines = enumerate((ROOT / MISTAKES).read_text(encoding="utf-8").split("\n"), start=1)
    return {(str(MISTAKES), number, line.rpartition("# refused: ")[2]) for number, line in lines if "# refused" in line}


if __name__ == "__main__":
    found, expected = errors_of_mypy(), planted()
    faults = [f"{file}:{line}: mypy refuses this: {code}" for file, line, code in sorted(found - expected)]
    faults += [f"{file}:{line}: mypy accepts this: {code}" for file, line, code in sorted(expected - found)]
    print("\n".join(faults))
    sys.exit(bool(faults))
