"""Every error a user can cause, by name. Knows no other file of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeserveError(Exception):
    """Base of all errors that moeserve raises on purpose."""


class SettingsError(MoeserveError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or does not fit the model or the machine."""


class CheckpointError(MoeserveError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or of a kind that moeserve does not serve."""


class RequestError(MoeserveError, ValueError):
    """A prompt or a sampling parameter cannot be served. The engine has not changed and lives on."""


class CacheTooSmallError(SettingsError):
    """The KV cache cannot hold a single request of the length asked for."""


class EngineError(MoeserveError, RuntimeError):
    """A step failed, or a process of the engine died. The requests in flight have ended.

    The cause is chained to this error, or told in it where it happened in another process.
    """


class DistributedError(MoeserveError, RuntimeError):
    """A rank did not come, died, got stuck, or fell out of step with the others. Its groups are of no further use."""


class LockstepError(MoeserveError, RuntimeError):
    """Replicas that must take the same steps do not. None of them can go on."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence ending for an unknown `word`: the nearest known one, or all of them when none is near."""
    choices = sorted(known)
    near = difflib.get_close_matches(word.replace("-", "_").lower(), choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(choices)}"


def shown(value: object) -> str:
    """A value as an error message shows it: its beginning, whatever its size."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
