"""The log of a process: its level, and its form as text or JSON. Children get both from their parent."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON. The attribute `fields` of a record holds further members."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **({"process": self._process} if self._process else {}),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_log(level: int | str, format: LogFormat = "text", *, process: str = "", force: bool = False) -> None:
    """Write moeserve's messages of this level and above to standard error, and warnings and errors of other packages.

    Args:
        level: number or name of a level of `logging`.
        process: name of the process in the messages; empty: none.
        force: replace a log that was started before; otherwise it stays.
    """
    prefix = f" {process.replace('%', '%%')}:" if process else ""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process) if format == "json" else logging.Formatter(f"%(levelname)s{prefix} %(message)s")
    )
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("moeserve"))
    logging.basicConfig(level=level, handlers=[handler], force=force)


def log_level() -> int:
    """Return the minimum level of messages that this process logs."""
    return logging.getLogger("moeserve").getEffectiveLevel()


def log_format() -> LogFormat:
    """Return the form of this process's log: "text" or "json"."""
    return "json" if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers) else "text"
