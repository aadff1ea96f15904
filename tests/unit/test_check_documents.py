"""The check of documents finds names that do not exist, and raises no false alarms."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import check_documents
import pytest

# Some of what `make check` reads.
PARTS = (
    "Makefile",
    "README.md",
    "bench/",
    *(f"moeserve/{name}/" for name in ("api", "cli", "config", "planner", "scheduling", "telemetry")),
)


@pytest.fixture(scope="module")
def tree() -> check_documents.Tree:
    # Python 3.11 cannot parse while it parses: a finaliser that logs a traceback, of an earlier test, would do that.
    gc.collect()
    files = [name for name in check_documents.tracked_files() if name.startswith(PARTS)]
    return check_documents.Tree(files, with_tests=False)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`moeserve generate`, `moeserve bench moe --rows 1`, `make test-avx2`, `MOESERVE_ISA=avx2 make test`", []),
        ("`from moeserve import LLM`, `moeserve bench NAME`, `moeserve_steps_total`, `Scheduler`", []),
        ("`moeserve served` and `MOESERVE_CACHE=x moeserve bench moed`", ["moeserve served", "moeserve bench moed"]),
        ("`.venv/bin/moeserve serv` and `python -m moeserve parser`", ["moeserve serv", "moeserve parser"]),
        ("`make everything`", ["target everything"]),
        ("MOESERVE_NOTHING", ["MOESERVE_NOTHING"]),
        ("moeserve/nowhere.py and --no-such-flag-at-all", ["nowhere.py", "--no-such-flag-at-all"]),
        ("`no_such_name` and `no_such_setting=1`", ["no_such_name", "no_such_setting"]),
        ("`LLM.generate`, `rebalance=1`, --max-num-seqs, --skew", []),
        ("`LLM.commit`, `Scheduler=1` and --hidden-size", ["--hidden-size", "LLM.commit", "Scheduler"]),  # code words
    ],
)
def test_missing_names_are_found(tree: check_documents.Tree, text: str, missing: list[str]) -> None:
    found = list(tree.missing(text))
    assert len(found) == len(missing), found
    assert all(name in fault for name, fault in zip(missing, found, strict=True))


@pytest.mark.parametrize(
    ("docstring", "faults"),
    [
        ("Add.\n\n    Args:\n        a, b: numbers.\n\n    Returns:\n        The sum.\n    ", []),
        ("\n    Args:\n        a: a number,\n            and more: text.\n        *rest: others.\n    ", []),
        ("Add.\n\n    Args:\n        a: x.\n\n        Returns:\n            The sum.\n    ", ["Args,     Returns"]),
        ("Add.\n\n    Raises:\n        E: x.\n\n    Args:\n        a: x.\n    ", ["Raises, Args"]),
        ("Add.\n\n    Args:\n        a: x.\n\n    Args:\n        b: x.\n    ", ["Args, Args"]),
        ("Add.\n\n    Args:\n            a: x.\n    ", ["Args: must have entries"]),
        ("Add.\n\n    Args:\n    a: x.\n    ", ["Args: must have entries"]),
        ("Add.\n\n    Args:\n        a: x.\n        b: y.\n        a: z.\n    ", ["a is described twice"]),
        ("Add.\n\n    Args:\n        a, c: x.\n    ", ["c is no parameter"]),
    ],
)
def test_broken_sections_are_found(docstring: str, faults: list[str]) -> None:
    module = ast.parse(f'def add(a, b, *rest):\n    """{docstring}"""\n')
    found = [fault for _, fault in check_documents.faults_of_sections(module)]
    assert len(found) == len(faults), found
    assert all(fault in text for fault, text in zip(faults, found, strict=True))


def test_code_blocks_and_links_of_documents_are_checked(
    tree: check_documents.Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["```sh", "make nothing && moeserve nothing", "$ moeserve bench moe", "```", "make nothing of it"]
    lines += ["![a](b.svg) [page](https://x.org)", "## A `first` part", "[a](README.md#a-first-part) [b](#part)"]
    monkeypatch.setattr(check_documents, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("\n".join(lines))
    found = [number for number, _ in tree.missing_in_document("README.md")]
    assert found == [2, 2, 6, 8]
