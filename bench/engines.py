"""The engines that benchmarks compare: moeserve in this process, every other engine in a separate process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import moeserve
from moeserve.bench.decode import Generate, generate_with
from moeserve.bench.harness import Round, Row, figures
from moeserve.bench.limits import MachineLimits
from moeserve.bench.peers.environments import PeerError
from moeserve.bench.peers.peers import PEERS, start_peer
from moeserve.config.settings import QuantizationName

QUANTIZATIONS: dict[str, QuantizationName | None] = {
    "moeserve": None,
    "moeserve-int8": "int8",
    "moeserve-int4": "int4",
}
ENGINE_NAMES = (*QUANTIZATIONS, *PEERS)
WEIGHT_FORMATS: dict[str, str] = {  # for engines whose weights are not bf16
    "moeserve-int8": "int8",
    "moeserve-int4": "int4",
    "moeserve-mxfp4": "mxfp4",
    "llama.cpp-q8_0": "q8_0",
    "llama.cpp-q4_0": "q4_0",
    "ik_llama.cpp-q8_0": "q8_0",
    "ik_llama.cpp-q4_0": "q4_0",
}

Call = TypeVar("Call", bound=Callable[..., Any])
Started = TypeVar("Started")


@dataclass(frozen=True)
class Engine(Generic[Call]):
    """A loaded engine, or the loaded experts of one layer."""

    version: str
    settings: Mapping[str, Any]  # recorded in results
    run: Call  # returns the elapsed seconds

    def row(self, rounds: Sequence[Round], limit_rate: Callable[[MachineLimits], float]) -> Row:
        return {"version": self.version, "settings": dict(self.settings), **figures(rounds, limit_rate)}


def own_engine(call: Call) -> Engine[Call]:
    return Engine(f"moeserve {moeserve.__version__}", {"threads": torch.get_num_threads()}, call)


def start_engine(
    name: str, model: Path, stack: ExitStack, *, max_requests: int, max_request_tokens: int
) -> Engine[Generate]:
    """Load the model into an engine, with torch's current number of threads. Closing the stack closes the engine.

    Raises:
        PeerError: a peer is not installed, or cannot load the model.
    """
    threads = torch.get_num_threads()
    if name in QUANTIZATIONS:
        llm = moeserve.LLM(
            model,
            dtype="bfloat16",
            quantization=QUANTIZATIONS[name],
            device="cpu",
            num_threads=threads,
            max_model_len=max_request_tokens,
            max_num_seqs=max_requests,
            packed_cache=0,  # writing a packed copy would disturb other measurements
        )
        return own_engine(generate_with(stack.enter_context(llm)))
    peer = stack.enter_context(
        start_peer(name, model, threads, max_requests=max_requests, max_request_tokens=max_request_tokens)
    )
    return Engine(peer.version, peer.settings, peer.seconds)


def start_all(
    names: Sequence[str] | None, known: Sequence[str], start: Callable[[str], Started]
) -> tuple[dict[str, Started], dict[str, str]]:
    """Start the engines in `names`. Without names, start all known engines except peers that cannot start.

    Returns:
        The engines, and the reason for each engine that was left out.

    Raises:
        PeerError: a peer in `names` cannot start.
    """
    started: dict[str, Started] = {}
    left_out: dict[str, str] = {}
    for name in names or known:
        try:
            started[name] = start(name)
        except PeerError as error:
            if names:
                raise
            left_out[name] = error.reason
            print(f"without {name}: {error}", file=sys.stderr, flush=True)
    return started, left_out
