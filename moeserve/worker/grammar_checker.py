"""`GrammarChecker`: compiles grammars of clients in a process of its own, whose time and memory are limited.

llguidance does not free all memory of a compilation that fails, and allocates before it counts. The process is replaced
when it has compiled many grammars or has grown, and the engine compiles only grammars that have passed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from moeserve.config.environment import environment_with
from moeserve.errors import RequestError
from moeserve.processes.interpreter import same_modules
from moeserve.structured_outputs import OutputGrammar

MAX_COMPILE_BYTES = 256 * 2**20  # address space that one compilation may add
MAX_KEPT_BYTES = 32 * 2**20  # memory that a process may keep before it is replaced
MAX_CPU_SECONDS = 2  # of one compilation; beyond it, the system ends the process
DEADLINE_S = 20.0  # of one compilation, for a process that does not run
START_DEADLINE_S = 60.0
MAX_COMPILATIONS = 256  # of one process
MAX_VERDICTS = 4096  # results that are kept, by the digest of the grammar
NICENESS = 5
# Exit statuses: too much processor time, and an allocation that failed.
SIGNALS_OF_LIMITS = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
TOO_MUCH = "it takes too much time or memory to compile; simplify it"
_LENGTH_BYTES = 4


class TokenizerText(msgspec.Struct, frozen=True):
    """A tokenizer for llguidance."""

    source: str  # for error messages
    json: str
    num_tokens: int
    eos_token_id: int | None
    vocab_size: int  # of the model


class _Verdict(msgspec.Struct, frozen=True):
    """The result of a compilation; also the first message of a process, when it has loaded the tokenizer."""

    refusal: str | None = None
    is_last: bool = False  # the process exits


class GrammarChecker:
    """Checks grammars in another process, which is started for the first one. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], TokenizerText]) -> None:
        """
        Args:
            tokenizer: loads the tokenizer, which may take a second.
        """
        self._load_tokenizer = tokenizer
        self._tokenizer: TokenizerText | None = None
        self._process: _Process | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()  # protects `_process`
        self._verdicts_lock = threading.Lock()
        self.num_processes = 0  # that were started

    def refusal(self, grammar: OutputGrammar) -> str | None:
        """Return why a grammar cannot be served; None if it can.

        Raises:
            RequestError: the tokenizer cannot be used.
        """
        key = hashlib.sha256(msgspec.msgpack.encode((grammar.notation, grammar.text))).digest()
        with self._verdicts_lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        with self._lock:
            refusal = self._compiled_elsewhere(grammar)
        with self._verdicts_lock:
            self._verdicts[key] = refusal
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return refusal

    def close(self) -> None:
        """End the process. A later check starts another one."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _compiled_elsewhere(self, grammar: OutputGrammar) -> str | None:
        for _ in range(2):  # again if something else ended the process
            if self._process is None:
                if self._tokenizer is None:
                    self._tokenizer = self._load_tokenizer()
                self._process = _Process(self._tokenizer)
                self.num_processes += 1
            process = self._process
            verdict = process.ask(grammar)
            if verdict is None or verdict.is_last:
                process.end()
                self._process = None
            if verdict is not None or process.has_exceeded_limits:
                break
        return TOO_MUCH if verdict is None else verdict.refusal


class _Process:
    """The process of a checker. It ends when this process ends, because its input does."""

    def __init__(self, tokenizer: TokenizerText) -> None:
        """
        Raises:
            RequestError: llguidance refuses the tokenizer.
        """
        self._is_late = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moeserve.worker.grammar_checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the system's message when an allocation fails
            env=environment_with(same_modules()),
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only this process
        )
        verdict = self._exchange(msgspec.msgpack.encode(tokenizer), START_DEADLINE_S)
        if verdict is None or verdict.refusal is not None:
            self.end()
            reason = "its process ended" if verdict is None else verdict.refusal
            raise RequestError(f"structured_outputs cannot be served with {tokenizer.source}: {reason}")

    @property
    def has_exceeded_limits(self) -> bool:
        """True if a limit of time or memory has ended the process."""
        return self._is_late or self._process.returncode in SIGNALS_OF_LIMITS

    def ask(self, grammar: OutputGrammar) -> _Verdict | None:
        """Return the result of a compilation; None if the process ended before, or was too late."""
        return self._exchange(msgspec.msgpack.encode(grammar), DEADLINE_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange(self, message: bytes, timeout_s: float) -> _Verdict | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = threading.Timer(timeout_s, self._end_late)
        deadline.daemon = True
        deadline.start()
        try:
            _write(self._process.stdin, message)
            answer = _read(self._process.stdout)
        except OSError:
            return None
        finally:
            deadline.cancel()
        return None if answer is None else msgspec.msgpack.decode(answer, type=_Verdict)

    def _end_late(self) -> None:
        self._is_late = True
        self._process.kill()


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end."""
    length = pipe.read(_LENGTH_BYTES)
    message = pipe.read(int.from_bytes(length, "little"))
    return message if len(length) == _LENGTH_BYTES and message else None


def _run() -> None:
    """Check the grammars that arrive at the standard input, in the process of a checker."""
    from moeserve.worker.grammars import CompiledGrammars

    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = _read(sys.stdin.buffer)
    if first is None:
        return
    try:
        grammars = CompiledGrammars(msgspec.msgpack.decode(first, type=TokenizerText))
    except RequestError as error:
        _write(sys.stdout.buffer, msgspec.msgpack.encode(_Verdict(str(error))))
        return
    _write(sys.stdout.buffer, msgspec.msgpack.encode(_Verdict()))
    address_space, kept = _memory_bytes()
    if address_space:
        resource.setrlimit(resource.RLIMIT_AS, (address_space + MAX_COMPILE_BYTES,) * 2)
    for number in range(1, MAX_COMPILATIONS + 1):
        message = _read(sys.stdin.buffer)
        if message is None:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(used.ru_utime + used.ru_stime) + MAX_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        refusal = grammars.refusal(msgspec.msgpack.decode(message, type=OutputGrammar))
        is_last = number == MAX_COMPILATIONS or _memory_bytes()[1] > kept + MAX_KEPT_BYTES
        _write(sys.stdout.buffer, msgspec.msgpack.encode(_Verdict(refusal, is_last)))


def _memory_bytes() -> tuple[int, int]:
    """Return this process's address space, and the part of it that is in memory; zeros if the system has no /proc."""
    statm = Path("/proc/self/statm")
    pages = statm.read_text().split() if statm.exists() else ["0", "0"]
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


if __name__ == "__main__":
    _run()
