"""Text of the command line and of standard streams in environments whose encoding is not UTF-8."""

from __future__ import annotations

import codecs
import io
import os
import sys

from moeserve.config.environment import environment_with


def use_utf8_in_ascii_locale() -> None:
    """Start this program again with UTF-8 if the locale allows ASCII alone.

    Python uses UTF-8 in the locales C and POSIX by itself, unless this is disabled (PYTHONUTF8=0). Without UTF-8,
    arguments would differ from the text that was typed, and files and answers could not have other characters.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name != "ascii" or "utf8" in sys._xoptions or not sys.executable:
        return
    arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, environment_with({"PYTHONUTF8": "1"}))  # the variable is for ranks


def accept_all_text() -> None:
    """Let standard streams accept text that their encoding cannot represent.

    Characters that cannot be printed are written as escapes. Bytes that cannot be decoded become surrogates, and
    requests with surrogates are refused.
    """
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
