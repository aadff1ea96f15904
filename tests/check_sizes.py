"""Check that no file of the package has more than 500 lines, and no function more than 60. Run by `make check`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION = 500, 60


def faults_of(path: Path) -> Iterator[str]:
    """Yield a description of each file or function that is too long."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
    if (num_lines := text.count("\n")) > MAX_FILE:
        yield f"{name}: {num_lines} lines, and at most {MAX_FILE} are allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {num_lines} lines, and at most {MAX_FUNCTION} are allowed"


if __name__ == "__main__":
    faults = [fault for path in sorted((ROOT / "moeserve").rglob("*.py")) for fault in faults_of(path)]
    print("\n".join(faults))
    sys.exit(bool(faults))
