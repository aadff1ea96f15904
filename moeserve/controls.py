"""Controls: commands that all ranks run between the same two steps, and their results."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

PauseMode = Literal["abort", "wait", "keep", "retract"]
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


Command: TypeAlias = Pause | Resume


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Message to every replica: run a command in the first round in which all replicas announce its number."""

    number: int  # counted from 1 over the controls of an engine
    command: Command


class ControlResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a control, equal on all replicas."""

    number: int
