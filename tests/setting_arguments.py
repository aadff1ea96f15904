"""Writes `moeserve/api/setting_arguments.py`, the types of the settings as keyword arguments, from their dataclasses.

`make check` runs it with --check: it then only compares the file, and fails if the file is out of date.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from moeserve.config import vllm_options
from moeserve.config.descriptions import default_of
from moeserve.config.settings import Settings
from moeserve.config.validation import allowed_values
from moeserve.config.vllm_names import VllmSettings

FILE = Path(__file__).parents[1] / "moeserve" / "api" / "setting_arguments.py"
HEAD = '''"""The settings as keyword arguments, for type checkers and editors.

Written by `tests/setting_arguments.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

import torch

from moeserve.config.settings import ProfilerConfig, SpeculativeConfig


class SettingArguments(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`."""

'''


def accepted_types(name: str, expected: Any) -> Iterator[str]:
    """Yield the types that `check` in `config/validation.py` accepts for a setting, as source text."""
    if expected in (str, str | None):
        yield "PathLike[str]"
    yield from types_of(expected)
    if name == "dtype":
        yield "torch.dtype"


def types_of(expected: Any) -> Iterator[str]:
    """Yield the types of a value that is converted to a type, as source text."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        for each in arguments:
            yield from types_of(each)
    elif origin is Annotated:
        yield from types_of(arguments[0])
    elif origin is Literal:
        yield f"Literal[{', '.join(map(repr, arguments))}]"
    elif origin is list:
        yield f"Sequence[{' | '.join(types_of(*arguments))}]"
    elif origin is dict:
        yield "Mapping[str, Any]"
    elif expected is type(None):
        yield "None"
    elif issubclass(expected, msgspec.Struct):
        yield from (expected.__name__, "Mapping[str, Any]")
    else:
        yield expected.__name__


def lines() -> Iterator[str]:
    """Yield the lines of the class: a key for each setting except the model, which is an argument of its own."""
    for group in (*Settings.groups().values(), VllmSettings):
        hints = get_type_hints(group, include_extras=True)
        yield f"    # {group.__doc__}"
        for field in fields(group):
            if field.name == "model":
                continue
            yield f"    {field.name}: {' | '.join(accepted_types(field.name, hints[field.name]))}"
            text = field.metadata["help"].rstrip(".")
            text = f"{text} ({allowed_values(hints[field.name])}; default: {default_of(field)!r})."
            wrapped = textwrap.wrap(f'"""{text}"""', 112, break_long_words=False, break_on_hyphens=False)
            yield from (f"    {line}" for line in wrapped)
    yield "    # Settings of vLLM of which only values that change nothing are accepted"
    yield from (f"    {name}: Any" for name in sorted(vllm_options.SETTINGS))


def source() -> str:
    """Return the text of the file, as ruff formats it."""
    ruff = [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", FILE, "-"]
    text = HEAD + "\n".join(lines()) + "\n"
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        FILE.write_text(source(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != source():
        sys.exit(f"{FILE} is out of date: run python tests/setting_arguments.py")
