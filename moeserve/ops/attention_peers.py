"""Attention on a GPU by other libraries, in the place of our kernels: which of them, for which layers and steps.

They are FlashInfer and torch's own varlen attention. Keys and values are written by our kernels, into the same caches;
only what attends to them is exchanged. Ours always works, and is what runs if nothing else is known to be faster.

"Faster" is what a file says, which a command writes that measures on this GPU, and not what a measurement at each start
would say. Libraries differ in the last bits of their results. If noise could decide between them, a request would get
one result today and another tomorrow, or from another rank; a file is the same for all ranks, replicas and starts. It
is also the choice that costs nothing: a start imports no library, and has none compile kernels, that it will not use.

What is chosen stays for a layer's life, for each of the two kinds of steps. It decides about no collective: ranks that
chose differently would still finish every step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moeserve.config.settings import AttentionName
from moeserve.errors import SettingsError
from moeserve.ops import backend
from moeserve.ops.attention import AttentionBackend
from moeserve.ops.attention_times import OWN, AttentionProblem, StepKind, Times, fastest, load_times, times_path
from moeserve.ops.rotary import Turn
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, H head size

logger = logging.getLogger(__name__)

PEER_NAMES = ("flashinfer", "varlen")


class PeerUnusable(Exception):
    """A library that cannot be used here at all. Says why, in half a sentence."""


class Attend(Protocol):
    """See `AttentionBackend.attend`. There is at least one row."""

    def __call__(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


class Peer(Protocol):
    """Another library's attention, once for a model. What it makes may share memory: only one runs at a time."""

    @property
    def label(self) -> str:
        """Its name and version, as times are filed under."""
        ...

    def refusal(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        """Why it cannot attend in such steps, as half a sentence; None: it can."""
        ...

    def attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        """What attends in steps of a kind that was not refused: in those of one row per chunk, in a CUDA graph too.

        Its numbers in rows without a position are arbitrary, where the backends' are zeros: such rows are padding.
        """
        ...


class PeerAttention:
    """Writes as ours does, and attends by what was chosen for the kind of step."""

    def __init__(self, own: AttentionBackend, decode: Attend, chunks: Attend) -> None:
        self.own = own
        self.decode = decode
        self.chunks = chunks

    def write(
        self, key_TGH: Tensor, value_TGH: Tensor, key_cache: Tensor, value_cache: Tensor, step: StepInputs
    ) -> None:
        self.own.write(key_TGH, value_TGH, key_cache, value_cache, step)

    def turn_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGH: Tensor,
        turn: Turn,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
    ) -> Tensor:
        return self.own.turn_and_write(query_TNH, key_TGH, value_TGH, turn, key_cache, value_cache, step)

    def attend(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_rows = len(query_TNH)
        attend = self.own.attend
        if num_rows:
            is_decode = num_rows == len(step.spans) and step.max_rows_per_chunk == 1
            attend = self.decode if is_decode else self.chunks
        return attend(query_TNH, key_cache, value_cache, step, sinks_N)


class AttentionPeers:
    """The libraries that may serve a model's layers."""

    def __init__(self, wanted: AttentionName, peers: Sequence[Peer], times: Times, block_size: int) -> None:
        """
        Args:
            wanted: "measured", or the name of the only peer.
            times: what was measured on this GPU.
            block_size: of the caches.
        """
        self.block_size = block_size
        self._wanted = wanted
        self._peers = {peer.label: peer for peer in peers}
        self._times = times
        self._chosen: dict[AttentionProblem, tuple[Attend | None, Attend | None]] = {}  # layers of one shape share it

    def beside(self, own: AttentionBackend, problem: AttentionProblem) -> AttentionBackend:
        """What a layer is to use, given our own."""
        if problem not in self._chosen:
            self._chosen[problem] = (self._choose(problem, "decode"), self._choose(problem, "chunks"))
        decode, chunks = self._chosen[problem]
        if decode is None and chunks is None:
            return own
        return PeerAttention(own, decode or own.attend, chunks or own.attend)

    def _choose(self, problem: AttentionProblem, kind: StepKind) -> Attend | None:
        """None: our own."""
        serving = {}
        for label, peer in self._peers.items():
            if refusal := peer.refusal(problem, kind):
                logger.info("our kernels attend (%s, %s): %s cannot, as %s", problem.key, kind, label, refusal)
            else:
                serving[label] = peer
        if self._wanted == "measured":
            label = fastest(self._times.get(problem.key, {}).get(kind, {}), serving)
        else:
            label = next(iter(serving), OWN)
        if label == OWN:
            return None
        logger.info("%s attends (%s, %s)", label, problem.key, kind)
        return serving[label].attend(problem, kind)


def open_attention_peers(wanted: AttentionName, device: torch.device, block_size: int) -> AttentionPeers | None:
    """The libraries to ask for each layer; None: there is none, and our kernels attend.

    Raises:
        SettingsError: one was asked for by name, and cannot be used at all.
    """
    if wanted == OWN or (wanted == "measured" and backend.of(device.type) != "triton"):
        return None
    if wanted == "measured":
        times = load_times(times_path(device))
        measured = [seconds for kinds in times.values() for seconds in kinds.values()]
        ahead = {label.split()[0] for seconds in measured for label in seconds if fastest(seconds, [label]) != OWN}
        peers = []
        for name in sorted(ahead):
            try:
                peers.append(open_peer(name, device))
            except PeerUnusable as error:
                logger.info("our kernels attend, though %s was measured to be faster on this GPU: %s", name, error)
        return AttentionPeers(wanted, peers, times, block_size) if peers else None
    try:
        if backend.of(device.type) != "triton":
            raise PeerUnusable("keys and values are written by Triton kernels, and triton is not installed")
        return AttentionPeers(wanted, [open_peer(wanted, device)], {}, block_size)
    except PeerUnusable as error:
        raise SettingsError(f"attention_backend={wanted!r} cannot be: {error}. Use 'triton' or 'auto'") from None


def open_peer(name: str, device: torch.device) -> Peer:
    """
    Args:
        name: one of `PEER_NAMES`.

    Raises:
        PeerUnusable: it is not installed, is another version than it must be, or is not made for this GPU.
    """
    match name:
        case "flashinfer":
            from moeserve.ops.flashinfer_attention import open_flashinfer

            return open_flashinfer(device)
        case "varlen":
            from moeserve.ops.varlen_attention import open_varlen

            return open_varlen(device)
        case _:
            raise PeerUnusable(f"there is no {name!r}; there are {', '.join(PEER_NAMES)}")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None: of what only stands in for one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
