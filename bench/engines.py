"""The engines that benchmarks compare, all behind one door: moeserve in this process, its peers in their own."""

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
FORMATS_OF: dict[str, str] = {  # of those that are not bf16
    "moeserve-int8": "int8",
    "moeserve-int4": "int4",
    "llama.cpp-q8_0": "q8_0",
    "llama.cpp-q4_0": "q4_0",
}
BF16_PEERS = ("vllm", "llama.cpp-bf16", "transformers", "kt-kernel")
BASELINES: dict[str, tuple[str, ...]] = {  # what an engine is compared with
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
    settings: Mapping[str, Any]  # with which it was started, for results
    generate: Generate


def start_engine(
    name: EngineName, model: Path, stack: ExitStack, *, max_requests: int, max_request_tokens: int
) -> Engine:
    """Loads the model into an engine, which lives as long as the stack, with torch's current number of threads.

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
                packed_cache=0,  # writing a copy would go on while others are measured
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
    """Starts the engines that are asked for. Where none is named, all known ones, but for peers that cannot start.

    Returns:
        The engines, and why each of the others was left out.

    Raises:
        PeerError: a peer that was named cannot start.
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


def compared(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Pairs of an engine and its baseline, of those that are there."""
    return [(name, other) for name, others in BASELINES.items() if name in names for other in others if other in names]
