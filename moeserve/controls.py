"""Controls: commands that all ranks run between the same two steps, and their results."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

INITIAL_VERSION = "default"  # version of the checkpoint's weights, as in vLLM
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


class EndRequests(msgspec.Struct, frozen=True, tag="end-requests"):
    """End the requests in flight with the tokens they have. A pause stays as it is."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Return memory to the operating system. Follows a `Pause` that forgets all prefixes and keeps no request's cache.

    Level 1 returns the memory of caches and graphs. Level 2 also returns the memory of the weights, which are then
    stale.
    """

    level: Literal[1, 2]


class EndSleep(msgspec.Struct, frozen=True, tag="end-sleep"):
    """Let memory with these tags be used again. The operating system provides its pages again when they are written."""

    tags: list[MemoryTag]


class StartUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="start-update"):
    """Begin an update of the weights.

    No step runs until `FinishUpdate`, or until `CancelUpdate` if no tensor was loaded before.
    """

    # Shapes of all tensors of the update, by name. They show how experts are stacked. Empty: as in the checkpoint.
    shapes: dict[str, list[int]] = {}
    needs_all: bool = False  # all tensors must be sent, because the weights are of several versions
    only_drafts: bool = False  # tensors are ignored unless they are those of modules for multi-token prediction


class LoadTensors(msgspec.Struct, frozen=True, tag="load-tensors"):
    """Copy tensors into the weights of all ranks. An error ends the update and may leave the weights stale."""

    path: str  # a folder with safetensors shards, or a safetensors file in shared memory


class ReceiveTensors(msgspec.Struct, frozen=True, kw_only=True, tag="receive-tensors"):
    """Copy tensors that a trainer on another host sends, as `LoadTensors` does."""

    address: str  # host and port of the trainer
    key: str  # hexadecimal; both sides prove that they know it


class FinishUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="finish-update"):
    """End an update. If a weight is only partly filled, the result is an error and the update stays open."""

    version: str  # empty: the engine chooses one before ranks see the command
    salt: bytes  # see `Pause`
    is_checkpoint: bool = False  # all tensors of the checkpoint were loaded again


class CancelUpdate(msgspec.Struct, frozen=True, tag="cancel-update"):
    """End an update early. If tensors were already loaded, the weights are stale until a whole update."""


class ReadChecksums(msgspec.Struct, frozen=True, tag="read-checksums"):
    """Compute checksums of all weights of all ranks."""


WeightCommand: TypeAlias = StartUpdate | LoadTensors | ReceiveTensors | FinishUpdate | CancelUpdate | ReadChecksums
Command: TypeAlias = Pause | Resume | EndRequests | Sleep | EndSleep | WeightCommand


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Message to every replica: run a command in the first round in which all replicas announce its number."""

    number: int  # counted from 1 over the controls of an engine
    command: Command


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of all ranks about a `WeightCommand`."""

    error: str = ""  # empty: the command has succeeded
    is_open: bool = False  # an update has begun and not ended
    is_whole: bool = True  # all weights are of one version, and no update is open
    checksums: dict[str, str] = {}  # by rank and name of the weights


class ControlResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a control, equal on all replicas."""

    number: int
    outcome: Outcome | None = None  # None: the command concerns no weights


class WeightState(msgspec.Struct, frozen=True):
    """The weights of all ranks, and the memory that they use. Without arguments: those of the checkpoint, in use."""

    version: str = INITIAL_VERSION
    differs: bool = False  # an update has ended since the checkpoint's weights were loaded, under whatever version
    is_updating: bool = False  # an update has begun and not ended
    is_stale: bool = False  # weights are of several versions, or older than requests expect, so no request is served
    asleep: tuple[MemoryTag, ...] = ()  # memory that was returned to the system

    @property
    def refusal(self) -> str:
        """The reason why requests are refused; empty if requests are served."""
        if not self.is_stale:
            return ""
        return (
            "the weights are stale, because an update has failed, the engine has restarted, or sleep has freed their "
            "memory; send a whole update, or load those of the checkpoint with reload_weights"
        )
