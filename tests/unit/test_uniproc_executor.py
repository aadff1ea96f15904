"""The thread of an engine with one rank ends before Python does."""

from __future__ import annotations

import subprocess
import sys

COLLECTED_IN_ITS_OWN_THREAD = """
import threading, time
from queue import SimpleQueue
from moeserve.executor import uniproc

rounds = SimpleQueue()
found = threading.Event()

def rank():
    uniproc._end(threading.current_thread(), rounds, [])
    found.set()
    assert rounds.get() is None
    time.sleep(0.5)
    print("ended", flush=True)

threading.Thread(target=rank, daemon=True).start()
found.wait()
"""


def test_python_waits_for_a_rank_in_whose_thread_the_executor_was_collected() -> None:
    """The garbage collector runs in any thread, and a thread cannot wait for itself."""
    command = [sys.executable, "-c", COLLECTED_IN_ITS_OWN_THREAD]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
