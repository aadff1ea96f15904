"""One-line descriptions of Ray's errors."""

from __future__ import annotations

import re

from ray.exceptions import RayActorError, RayError, RayTaskError


def exit_cause(error: RayError) -> str:
    """Return the reason why an actor has ended, in one line."""
    text = str(error)
    if "its node has died" in text or "node was terminated" in text:
        return "its node has died"
    if isinstance(error, RayActorError) and "connection error code" in text:  # Ray reports a killed process this way
        return "its process was killed, or has crashed"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the line that names an error; for an error that a task raised, the line of the error in the task."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]
