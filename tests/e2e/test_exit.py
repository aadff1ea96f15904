"""Programs that end with an engine open: nothing is leaked, printed or left running, and the exit status is kept.

They run in Python's development mode, in which the C++ module reports what it leaks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from reference_models import Reference

ASYNC = """
import asyncio, os, signal, sys, threading
from moeserve import LLM, AsyncLLM, SamplingParams
folder, executor = sys.argv[1:]
options = dict(dtype="float32", num_threads=1, max_model_len=128, executor=executor, show_progress=False)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

async def one(llm, params=params):
    async for output in llm.generate([5, 6], params):
        pass
    return output.outputs[0].token_ids
"""
# The body of each program, and its exit status.
PROGRAMS = {
    "async, several event loops": (
        "llm = AsyncLLM(folder, **options)\nfor _ in range(2): assert len(asyncio.run(one(llm))) == 4",
        0,
    ),
    "async, never used": ("llm = AsyncLLM(folder, **options)", 0),
    "async, exception": ("llm = AsyncLLM(folder, **options)\nasyncio.run(one(llm))\nraise ValueError", 1),
    "async, a request in flight": (
        """
llm = AsyncLLM(folder, **options)
async def leave():
    task = asyncio.create_task(one(llm, endless))
    await one(llm)
    sys.exit(7)
asyncio.run(leave())
""",
        7,
    ),
    "async, in a function and a cycle": (
        """
def use():
    llm = AsyncLLM(folder, **options)
    llm.itself = llm
    asyncio.run(one(llm))
use()
""",
        0,
    ),
    "sync": ("llm = LLM(folder, **options)\nllm.generate([[5, 6]], params)", 0),
    "sync, exception with the engine in its frames": (
        """
def use():
    llm = LLM(folder, **options)
    llm.generate([[5, 6]], params)
    raise ValueError
use()
""",
        1,
    ),
    "sync, a stream is open": (
        "llm = LLM(folder, **options)\nstream = llm.stream([5, 6], endless)\nnext(stream)\nsys.exit(3)",
        3,
    ),
    "several engines": (
        """
engines = [AsyncLLM(folder, **options), LLM(folder, **options)]
engines[1].generate([[5, 6]], params)
asyncio.run(one(engines[0]))
""",
        0,
    ),
    "sys.exit in a thread": (
        """
llm = AsyncLLM(folder, **options)
def leave():
    asyncio.run(one(llm))
    sys.exit(9)
thread = threading.Thread(target=leave)
thread.start()
thread.join()
""",
        0,
    ),
    "a thread that generates until the end": (
        """
llm = LLM(folder, **options)
has_begun = threading.Event()
def work():
    for _ in range(3):
        llm.generate([[5, 6]], params)
        has_begun.set()
threading.Thread(target=work).start()
has_begun.wait()
""",
        0,
    ),
    "Ctrl-C": (
        """
llm = AsyncLLM(folder, **options)
async def press():
    task = asyncio.create_task(one(llm, endless))
    await one(llm)
    os.kill(os.getpid(), signal.SIGINT)
    await task
asyncio.run(press())
""",
        -2,
    ),
    "a fork that ends first": (
        """
llm = AsyncLLM(folder, **options)
asyncio.run(one(llm))
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert len(asyncio.run(one(llm))) == 4
""",
        0,
    ),
}


def ends_cleanly(program: str, folder: Path, executor: str, *options: str) -> tuple[int, str]:
    """Run a program until all its processes have ended. Return its exit status and standard error."""
    mark = f"MOESERVE_TEST_EXIT={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    command = [sys.executable, *options, "-c", ASYNC + program, str(folder), executor]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, name: value})
    deadline = time.monotonic() + 200
    while left := _processes_with(mark.encode()):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return run.returncode, run.stderr


def _processes_with(variable: bytes) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


@pytest.mark.slow_but("Ctrl-C")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_ends_with_an_engine_open(name: str, plain: Reference) -> None:
    program, status = PROGRAMS[name]
    # In a fork, a copy of the rank's thread keeps the model, although it never runs.
    options = [] if "fork" in program else ["-X", "dev"]
    returned, errors = ends_cleanly(program, plain.folder, "uniproc", *options)
    assert returned == status, errors
    assert "nanobind" not in errors
    assert "Fatal" not in errors


@pytest.mark.slow_but("sync, a stream is open")
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["async, a request in flight", "sync, a stream is open", "a fork that ends first"])
def test_a_program_that_ends_with_ranks_in_processes(name: str, plain: Reference) -> None:
    program, status = PROGRAMS[name]
    returned, errors = ends_cleanly(program, plain.folder, "mp", "-X", "dev")
    assert returned == status, errors
    assert "nanobind" not in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_daemon_thread_that_still_generates(plain: Reference) -> None:
    """Python never ends such a thread, so its modules stay; that is not reported as a leak."""
    program = """
llm = LLM(folder, **options)
has_begun = threading.Event()
def work():
    while True:
        llm.generate([[5, 6]], params)
        has_begun.set()
threading.Thread(target=work, daemon=True).start()
has_begun.wait()
"""
    returned, errors = ends_cleanly(program, plain.folder, "uniproc")
    assert returned == 0, errors
    assert "nanobind" not in errors
