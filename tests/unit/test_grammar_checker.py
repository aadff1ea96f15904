"""The process that compiles grammars of clients: what costs too much ends there, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_text import byte_level_tokenizer, save

from moeserve.errors import RequestError
from moeserve.structured_outputs import StructuredOutputsParams
from moeserve.worker.grammars import Grammars

CHECKER = "moeserve.worker.grammar_checker"
ALLOWED_GROWTH_BYTES = 64 * 2**20
ALLOWED_PEAK_BYTES = 64 * 2**20


@pytest.fixture
def grammars(tmp_path: Path) -> Iterator[Grammars]:
    save(byte_level_tokenizer(), tmp_path)
    grammars = Grammars(str(tmp_path), 400)
    yield grammars
    grammars.checker.close()


def check(grammars: Grammars, regex: str) -> str:
    """Return why a regular expression is refused; empty if it is not."""
    try:
        grammars.check(StructuredOutputsParams(regex=regex).for_engine())
    except RequestError as error:
        return str(error)
    return ""


def checking_process() -> psutil.Process:
    """Return the newest process of a checker: other tests of this process may have left theirs."""
    with_names = ((each, each.as_dict(["cmdline", "create_time"])) for each in psutil.Process().children())
    found = [(names["create_time"], each) for each, names in with_names if CHECKER in (names["cmdline"] or ())]
    return max(found, key=lambda pair: pair[0])[1]


def num_bytes() -> int:
    """Return the memory of this process and its children."""
    this = psutil.Process()
    return sum(each.memory_full_info().uss for each in [this, *this.children(recursive=True)])


@pytest.mark.slow
def test_refused_grammars_leave_no_memory_behind(grammars: Grammars) -> None:
    assert not check(grammars, "a+")
    before = num_bytes()
    peak: list[int] = []
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.05):
            with contextlib.suppress(psutil.NoSuchProcess):  # a process that was replaced
                peak.append(num_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    for repetitions in (1000, 3000, 3001, 3002, 30_000, 65_000):
        assert "regex" in check(grammars, ".?" * repetitions)
    has_ended.set()
    watching.join()
    assert max(peak) < before + ALLOWED_PEAK_BYTES
    assert num_bytes() < before + ALLOWED_GROWTH_BYTES
    assert not check(grammars, "b+")
    assert grammars.checker.num_processes > 1


def test_each_grammar_is_compiled_once(grammars: Grammars) -> None:
    assert "regex" in check(grammars, "(")
    process = checking_process()
    process.suspend()  # so that it compiles nothing more
    assert "regex" in check(grammars, "(")
    process.kill()
    assert not check(grammars, "a")
    assert grammars.checker.num_processes == 2


def test_a_process_that_ends_is_replaced(grammars: Grammars) -> None:
    for number in range(3):
        assert not check(grammars, "a" * (number + 1))
        process = checking_process()
        process.kill()
        process.wait()
    assert grammars.checker.num_processes == 3
