"""`GrammarChecker`: compiles grammars of clients in a process of its own, whose time and memory are limited.

llguidance does not free all memory of a compilation that fails, and allocates memory before it checks limits. The
process is replaced when it has compiled many grammars or has grown, and the engine compiles only grammars that have
passed.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from moeserve.config.environment import environment_with
from moeserve.errors import RequestError
from moeserve.processes.interpreter import same_modules
from moeserve.processes.limited import LimitedProcess, ProcessLimits, StartError, answer_messages
from moeserve.structured_outputs import OutputGrammar

LIMITS_OF_COMPILATIONS = ProcessLimits(
    cpu_seconds=2.0,
    deadline_s=20.0,
    max_added_bytes=48 * 2**20,
    max_kept_bytes=32 * 2**20,
    max_answers=256,
    niceness=5,
)
MAX_VERDICTS = 4096  # maximum number of results that are kept, by the digest of the grammar
TOO_MUCH = "it takes too much time or memory to compile; simplify it"


class TokenizerText(msgspec.Struct, frozen=True):
    """A tokenizer for llguidance."""

    source: str  # for error messages
    json: str
    num_tokens: int
    eos_token_id: int | None
    vocab_size: int  # vocabulary size of the model


class GrammarChecker:
    """Checks grammars in another process, which is started for the first grammar. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], TokenizerText]) -> None:
        """
        Args:
            tokenizer: loads the tokenizer, which may take a second.
        """
        self._tokenizer = functools.cache(tokenizer)
        self._process = LimitedProcess(
            "moeserve.worker.grammar_checker",
            LIMITS_OF_COMPILATIONS,
            lambda: environment_with(same_modules()),
            lambda: msgspec.msgpack.encode(self._tokenizer()),
        )
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._verdicts_lock = threading.Lock()

    @property
    def num_processes(self) -> int:
        """The number of processes that were started."""
        return self._process.num_processes

    def refusal(self, grammar: OutputGrammar) -> str | None:
        """Return why a grammar cannot be served; None if it can.

        Raises:
            RequestError: the tokenizer cannot be used.
        """
        message = msgspec.msgpack.encode(grammar)
        key = hashlib.sha256(message).digest()
        with self._verdicts_lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        try:
            answer = self._process.answer(message)
        except StartError as error:
            source = self._tokenizer().source
            raise RequestError(f"structured_outputs cannot be served with {source}: {error}") from None
        refusal = TOO_MUCH if answer is None else answer.decode() or None
        with self._verdicts_lock:
            self._verdicts[key] = refusal
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return refusal

    def close(self) -> None:
        """End the process. A later check starts another process."""
        self._process.close()


def _start(tokenizer: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers a grammar with the reason to refuse it. Runs in the process of a checker."""
    from moeserve.worker.grammars import CompiledGrammars

    try:
        grammars = CompiledGrammars(msgspec.msgpack.decode(tokenizer, type=TokenizerText))
    except RequestError as error:
        raise StartError(str(error)) from None
    return lambda grammar: (grammars.refusal(msgspec.msgpack.decode(grammar, type=OutputGrammar)) or "").encode()


if __name__ == "__main__":
    answer_messages(_start, LIMITS_OF_COMPILATIONS)
