"""Controls: commands that all ranks run between the same two steps, and their results."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

INITIAL_VERSION = "default"  # of the weights of the checkpoint, as in vLLM
PauseMode = Literal["abort", "wait", "keep", "retract"]
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Run no steps until `Resume`. Requests that come later wait.

    Modes: "abort" ends the requests in flight with the tokens they have; "wait" lets them finish first; "keep" lets
    them continue afterwards with the keys and values they have; "retract" computes their keys and values again.
    """

    mode: PauseMode
    salt: bytes = b""  # if not empty, prefixes that were cached before are not found any more; see `forget_prefixes`


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Run steps again after `Pause`."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Return memory to the system, after a `Pause` that forgets all prefixes and no request survives with its cache.

    Level 1: that of caches and of graphs; level 2: also that of the weights, which are then stale.
    """

    level: Literal[1, 2]


class EndSleep(msgspec.Struct, frozen=True, tag="end-sleep"):
    """Let memory with these tags be used again. Its pages come back when they are written."""

    tags: list[MemoryTag]


class StartUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="start-update"):
    """Begin an update of the weights. No step runs until `FinishUpdate`, or `CancelUpdate` before any tensor."""

    # Shapes of all tensors of the update, by name, which tell how experts are stacked; empty: as in the checkpoint.
    shapes: dict[str, list[int]] = {}
    needs_all: bool = False  # all tensors must be sent, because the weights are of several versions


class LoadTensors(msgspec.Struct, frozen=True, tag="load-tensors"):
    """Copy tensors to their places in all ranks. After an error the update has ended, perhaps with stale weights."""

    path: str  # a folder with safetensors shards, or a safetensors file in shared memory


class ReceiveTensors(msgspec.Struct, frozen=True, kw_only=True, tag="receive-tensors"):
    """Copy tensors that a trainer on another host sends, as `LoadTensors` does."""

    address: str  # host and port of the trainer
    key: str  # hexadecimal; both sides prove that they know it


class FinishUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="finish-update"):
    """End an update. It stays open, with an error, if weights are partly filled."""

    version: str
    salt: bytes  # see `Pause`


class CancelUpdate(msgspec.Struct, frozen=True, tag="cancel-update"):
    """End an update without its last tensors. If there were any, the weights are stale until a whole update."""


class ReadChecksums(msgspec.Struct, frozen=True, tag="read-checksums"):
    """Compute checksums of all weights of all ranks."""


WeightCommand: TypeAlias = StartUpdate | LoadTensors | ReceiveTensors | FinishUpdate | CancelUpdate | ReadChecksums
Command: TypeAlias = Pause | Resume | Sleep | EndSleep | WeightCommand


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Message to every replica: run a command in the first round in which all replicas announce its number."""

    number: int  # counted from 1 over the controls of an engine
    command: Command


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of all ranks about a `WeightCommand`."""

    error: str = ""  # empty: it has succeeded
    is_open: bool = False  # an update has begun and not ended
    is_whole: bool = True  # all weights are of one version, and no update is open
    checksums: dict[str, str] = {}  # by rank and name of the weights


class ControlResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a control, equal on all replicas."""

    number: int
    outcome: Outcome | None = None  # None: the command concerns no weights


class WeightState(msgspec.Struct, frozen=True):
    """The weights of all ranks, and the memory that they use."""

    version: str = INITIAL_VERSION
    is_updating: bool = False  # an update has begun and not ended
    is_stale: bool = False  # they are of several versions, or older than requests expect, so no request is served
    asleep: tuple[MemoryTag, ...] = ()  # memory that was returned to the system

    @property
    def refusal(self) -> str:
        """The reason why requests are refused; empty: they are served."""
        if not self.is_stale:
            return ""
        return (
            "the weights are stale, because an update has failed, the engine has restarted, or sleep has freed their "
            "memory; send a whole update, or load those of the checkpoint with reload_weights"
        )
