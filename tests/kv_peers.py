"""Engines that compute prompts for each other, below the API."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from moeserve import LLM, SamplingParams
from moeserve.protocol import PeerBlocks, Request, RequestUpdate, Sample

BLOCK = 16
NUM_BLOCKS = 5  # full ones of the prompt
PROMPT = random.Random(1).choices(range(100), k=NUM_BLOCKS * BLOCK + 3)
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True).for_engine()
LAYOUTS = {
    "1": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "tp 2 dp 2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
}
request_ids = map(str, itertools.count())


@contextmanager
def engine(model: Path, layout: str = "1", **settings: Any) -> Iterator[LLM]:
    defaults = dict(kv_transfer_address="127.0.0.1", num_threads=1, kv_cache_memory="1MiB", dtype="float32")
    sizes = dict(max_model_len=128, block_size=BLOCK)
    llm = LLM(model, show_progress=False, **{**defaults, **sizes, **LAYOUTS[layout], **settings})
    try:
        yield llm
    finally:
        llm.shutdown()


def request(**fields: Any) -> Request:
    return Request(
        **{"request_id": next(request_ids), "prompt_token_ids": PROMPT, "params": PARAMS, "seed": 3, **fields}
    )


def serve(llm: LLM, num_samples: int = 1, **fields: Any) -> list[RequestUpdate]:
    """Return the last update of each output of the prompt, with all of its tokens."""
    samples = [Sample(next(request_ids), 3) for _ in range(num_samples - 1)]
    llm.core.add(request(**fields), samples)
    return ends(llm)


def ends(llm: LLM) -> list[RequestUpdate]:
    """Return the last update of each request in flight, with all of its tokens, in the order in which they end."""
    tokens: dict[str, list[int]] = {}
    last = {}
    while llm.core.has_work:
        for update in llm.core.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                last[update.request_id] = msgspec.structs.replace(update, token_ids=tokens[update.request_id])
    return list(last.values())


def compute_prompt(llm: LLM) -> PeerBlocks:
    """Let an engine compute the prompt and keep its blocks."""
    params = msgspec.structs.replace(PARAMS, max_tokens=1)
    (update,) = serve(llm, params=params, kv_handle=secrets.token_hex(16))
    assert update.kv_blocks is not None
    return update.kv_blocks


def require_all_free(llm: LLM) -> None:
    """Fail unless all blocks become free."""
    deadline = time.monotonic() + 200
    while any(num_free < llm.core.num_blocks for num_free in llm.core.num_free_blocks):
        assert time.monotonic() < deadline, "blocks were not set free"
        time.sleep(0.01)


def num_failed_blocks(llm: LLM) -> int:
    return sum(stats.num_failed_blocks for stats in llm.core.replica_stats)


class Relay:
    """Passes bytes on between receivers and a sender, which may be late or lost. Its end is that of all connections."""

    def __init__(self, source: PeerBlocks, num_bytes: int, *, num_limited: int = 1, cuts: bool = False) -> None:
        """
        Args:
            source: of one rank.
            num_bytes: of the sender that the first connections get. Then they get a byte now and then, so that they
                are not taken for dead.
            num_limited: connections for which that is so; all others get everything.
            cuts: end these connections instead.
        """
        (address,) = source.addresses
        self._target, self._num_bytes, self._num_limited, self._cuts = address.split(":"), num_bytes, num_limited, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_closed = threading.Event()
        self.num_stalled = threading.Semaphore(0)  # connections that have had their bytes
        self.source = msgspec.structs.replace(source, addresses=["{}:{}".format(*self._listener.getsockname())])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        shut(self._listener)

    def wait_until_stalled(self) -> None:
        for _ in range(self._num_limited):
            assert self.num_stalled.acquire(timeout=60)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                near, _ = self._listener.accept()
                is_limited = number < self._num_limited
                threading.Thread(target=self._pass_on, args=(near, is_limited), daemon=True).start()

    def _pass_on(self, near: socket.socket, is_limited: bool) -> None:
        far = socket.create_connection((self._target[0], int(self._target[1])))
        threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
        num_left = self._num_bytes if is_limited else 2**40
        with contextlib.suppress(OSError):
            while num_left and (data := far.recv(min(4096, num_left))):
                num_left -= len(data)
                near.sendall(data)
            if is_limited:
                self.num_stalled.release()
            while not self._cuts and not self._is_closed.wait(0.5) and (data := far.recv(1)):
                near.sendall(data)
        shut(near)
        shut(far)

    @staticmethod
    def _forward(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                far.sendall(data)
        shut(far)


def shut(connected: socket.socket) -> None:
    """End a connection, also while another thread waits for it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()
