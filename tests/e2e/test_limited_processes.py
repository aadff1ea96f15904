"""Engines in processes whose streams are closed, or whose limits are tight."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

NUM_TOKENS = 4
GENERATE = """
import sys
from moeserve import LLM, SamplingParams
folder, executor, path = sys.argv[1:]
with LLM(folder, dtype="float32", num_threads=1, max_model_len=64, executor=executor) as llm:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens = llm.generate([[5, 6]], params)[0].outputs[0].token_ids
open(path, "w").write(str(tokens))
"""


@pytest.mark.slow_but("mp-<&- >&- 2>&-")
@pytest.mark.parametrize(
    ("executor", "closed"),
    [
        *(("uniproc", closed) for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")),
        *(pytest.param("mp", closed, marks=pytest.mark.ranks) for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")),
    ],
)
def test_closed_standard_streams(executor: str, closed: str, plain: Reference, tmp_path: Path) -> None:
    found = tmp_path / "tokens"
    program = [sys.executable, "-c", GENERATE, str(plain.folder), executor, str(found)]
    run = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *program], capture_output=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert found.read_text() == str(plain.greedy([5, 6], NUM_TOKENS))


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_do_not_write_to_a_file_in_the_place_of_a_closed_stream(plain: Reference, tmp_path: Path) -> None:
    """The program's first file gets the number of standard error, to which ranks log."""
    first = 'import logging, sys\nfirst = open(sys.argv[3] + ".first", "w")\nassert first.fileno() == 2\n'
    log = 'logging.getLogger("moeserve").setLevel(logging.DEBUG)\n'
    program = [sys.executable, "-c", first + log + GENERATE, str(plain.folder), "mp", str(tmp_path / "tokens")]
    run = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *program], stdout=subprocess.PIPE, timeout=200)
    assert run.returncode == 0
    assert (tmp_path / "tokens.first").read_text() == ""


@pytest.mark.slow_but("uniproc")
@pytest.mark.parametrize(
    ("limit", "executor", "expected"),
    [
        (("RLIMIT_AS", 2**31), "uniproc", ""),
        pytest.param(("RLIMIT_NOFILE", 20), "mp", "EngineError", marks=pytest.mark.ranks),
    ],
)
def test_resource_limits(
    limit: tuple[str, int], executor: str, expected: str, plain: Reference, tmp_path: Path
) -> None:
    """The engine takes what it may, or ends with an error that names the limit's cause."""
    name, value = limit

    def limited() -> None:
        resource.setrlimit(getattr(resource, name), (value, value))

    command: list[Any] = [sys.executable, "-c", GENERATE, plain.folder, executor, tmp_path / "tokens"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, preexec_fn=limited)
    has_failed = not (tmp_path / "tokens").exists()
    assert bool(run.returncode) == has_failed, run.stderr
    assert not has_failed or (expected and expected in run.stderr.splitlines()[-1]), run.stderr


@pytest.mark.slow_but("300")
@pytest.mark.parametrize("megabytes", [300, 600])
def test_a_limit_within_which_torch_cannot_be_imported(megabytes: int) -> None:
    """Python imports the package and raises a named error, where torch's libraries would abort."""
    program = "import moeserve\ntry:\n    moeserve.LLM\nexcept moeserve.SettingsError as error:\n    print(error)"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20,) * 2)

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, preexec_fn=limited)
    assert run.returncode == 0, run.stderr
    assert f"ulimit -v (RLIMIT_AS) is {megabytes} MiB" in run.stdout
