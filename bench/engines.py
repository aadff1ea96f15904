"""The engines that benchmarks compare: moeserve in this process, every other engine in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

import moeserve
from moeserve.bench.decode import Generate, generate_with
from moeserve.bench.peers.environments import PeerError
from moeserve.bench.peers.peers import PeerName, start_peer
from moeserve.config.settings import QuantizationName

OwnName = Literal["moeserve", "moeserve-int8", "moeserve-int4"]
EngineName = Literal[
    "moeserve",
    "moeserve-int8",
    "moeserve-int4",
    "llama.cpp-bf16",
    "llama.cpp-q8_0",
    "llama.cpp-q4_0",
    "vllm",
    "transformers",
]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
QUANTIZATIONS: dict[OwnName, QuantizationName | None] = {
    "moeserve": None,
    "moeserve-int8": "int8",
    "moeserve-int4": "int4",
}
WEIGHT_FORMATS: dict[str, str] = {  # of the engines whose weights are not bf16
    "moeserve-int8": "int8",
    "moeserve-int4": "int4",
    "llama.cpp-q8_0": "q8_0",
    "llama.cpp-q4_0": "q4_0",
}
BF16_PEERS = ("vllm", "llama.cpp-bf16", "transformers", "kt-kernel")
BASELINES: dict[str, tuple[str, ...]] = {
    "moeserve": BF16_PEERS,
    "moeserve-int8": ("moeserve", "llama.cpp-q8_0"),
    "moeserve-int4": ("moeserve", "llama.cpp-q4_0"),
}

Name = TypeVar("Name", bound=str)
Started = TypeVar("Started")


@dataclass(frozen=True)
class Engine:
    """A loaded engine."""

    version: str
    settings: Mapping[str, Any]  # recorded in results
    generate: Generate


def start_engine(
    name: EngineName, model: Path, stack: ExitStack, *, max_requests: int, max_request_tokens: int
) -> Engine:
    """Load the model into an engine, with torch's current number of threads. The stack closes the engine.

    Raises:
        PeerError: a peer is not installed, or cannot load the model.
    """
    match name:
        case "moeserve" | "moeserve-int8" | "moeserve-int4":
            llm = moeserve.LLM(
                model,
                dtype="bfloat16",
                quantization=QUANTIZATIONS[name],
                device="cpu",
                num_threads=torch.get_num_threads(),
                max_model_len=max_request_tokens,
                max_num_seqs=max_requests,
                packed_cache=0,  # writing a packed copy would disturb other measurements
            )
            version, settings = f"moeserve {moeserve.__version__}", {"threads": torch.get_num_threads()}
            return Engine(version, settings, generate_with(stack.enter_context(llm)))
        case _:
            peer_name: PeerName = name
            peer = start_peer(
                peer_name,
                model,
                num_threads=torch.get_num_threads(),
                max_requests=max_requests,
                max_request_tokens=max_request_tokens,
            )
            stack.enter_context(peer)
            return Engine(peer.version, peer.settings, peer.seconds)


def start_all(
    names: Sequence[Name] | None, known: Sequence[Name], start: Callable[[Name], Started]
) -> tuple[dict[Name, Started], dict[Name, str]]:
    """Start the engines in `names`; without names, all known ones except peers that cannot start.

    Returns:
        The engines, and for each engine that was left out the reason.

    Raises:
        PeerError: a peer in `names` cannot start.
    """
    started: dict[Name, Started] = {}
    left_out: dict[Name, str] = {}
    for name in names or known:
        try:
            started[name] = start(name)
        except PeerError as error:
            if names:
                raise
            left_out[name] = error.reason
            print(f"without {name}: {error}", file=sys.stderr, flush=True)
    return started, left_out


def baseline_pairs(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the pairs of an engine and its baseline in which both are among `names`."""
    return [(name, other) for name, others in BASELINES.items() if name in names for other in others if other in names]
