"""Checks of single settings: their names, types and ranges. `resolve` checks combinations of settings."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from moeserve.config import vllm_names, vllm_options
from moeserve.config.descriptions import bound
from moeserve.config.settings import Settings
from moeserve.errors import SettingsError, nearest, shown

MAX_BYTES = 2**50
_NAMES_OF_TYPES = {int: "an integer", float: "a number", str: "a text", bool: "True or False", type(None): "None"}


def parse_settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings for the flat keyword options of `LLM(...)`.

    Raises:
        SettingsError: an option is unknown (the message suggests the nearest name), has a wrong type, is out of range,
            or is also given by its vLLM name with another value.
    """
    options = vllm_options.without_harmless(options)
    groups = Settings.groups()
    group_of_option = {field.name: name for name, group in groups.items() for field in dataclasses.fields(group)}
    known = {*group_of_option, *vllm_names.NAMES}
    for option in options:
        if option not in known:
            hint = nearest(option, known, otherwise="help(moeserve.LLM.__init__) describes all settings")
            raise SettingsError(f"unknown setting {option!r}: {hint}")
    checked_vllm = {name: check(name, options[name], vllm_names.VllmSettings) for name in vllm_names.NAMES & {*options}}
    values = {name: value for name, value in options.items() if name in group_of_option}
    translated = vllm_names.translate(checked_vllm)
    for option, value in translated.items():
        own = check(option, values.get(option, value), groups[group_of_option[option]])
        if own is not None and (parse_bytes(option, own) if option == "kv_cache_memory" else own) != value:
            raise SettingsError(f"{option}={shown(own)} contradicts {shown(value)}, given under its name in vLLM")
    chosen: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for option, value in (values | translated).items():
        name = group_of_option[option]
        chosen[name][option] = check(option, value, groups[name])
    return Settings(**{name: group(**chosen[name]) for name, group in groups.items()})


def check(option: str, value: Any, group: type) -> Any:
    """Return a value converted to the type of a field of `group`, a dataclass of settings.

    Raises:
        SettingsError: the value has another type or is out of range.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif type(value).__module__ == "torch":  # torch.bfloat16
        value = str(value).removeprefix("torch.")
    try:
        converted = convert(value, get_type_hints(group, include_extras=True)[option])
        if isinstance(converted, dict):
            json.dumps(converted, allow_nan=False)
        return converted
    except (ValueError, TypeError, RecursionError) as error:
        help = next(field.metadata["help"] for field in dataclasses.fields(group) if field.name == option)
        raise SettingsError(f"{option}={shown(value)} {error} ({option}: {help})") from None


def convert(value: Any, expected: Any, *, strict: bool = True) -> Any:
    """Return a value converted to a type, which may include bounds.

    Args:
        strict: refuse numbers that are written as text.

    Raises:
        ValueError: the value is not allowed. The message says why, as the rest of a sentence about the value: "must be
            an integer from 1 to 8".
    """
    try:
        return msgspec.convert(value, expected, strict=strict)
    except msgspec.ValidationError:
        struct = _struct_of(expected)
        reason = _reason_in_struct(value, struct, strict) if struct is not None and isinstance(value, Mapping) else None
        raise ValueError(reason or f"must be {allowed_values(expected)}") from None


def read_json_text(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON; the message is the rest of a sentence about the text, as in `convert`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


def _struct_of(expected: Any) -> type[msgspec.Struct] | None:
    """Return the msgspec struct that a type is or, if it is a union, contains; None if there is none."""
    choices = (expected, *get_args(expected))
    return next((each for each in choices if isinstance(each, type) and issubclass(each, msgspec.Struct)), None)


def _reason_in_struct(value: Mapping[Any, Any], struct: type[msgspec.Struct], strict: bool) -> str | None:
    """Return why a struct does not accept an object, naming the key that is wrong; None if each key is right."""
    hints = get_type_hints(struct, include_extras=True)
    known = struct.__struct_fields__
    for key, each in value.items():
        if key not in known:
            return f"has an unknown key {shown(key)}: {nearest(str(key), known)}"
        try:
            convert(each, hints[key], strict=strict)
        except ValueError as error:
            return f"has {key}={shown(each)}, which {error}"
    required = known[: len(known) - len(struct.__struct_defaults__)]
    missing = [key for key in required if key not in value]
    return f"lacks {', '.join(missing)}" if missing else None


def parse_bytes(option: str, amount: int | str, *, least: int = 1) -> int:
    """Return the number of bytes of an amount such as 1048576, "512MiB", "2 GB" or "1.5GiB".

    Raises:
        SettingsError: the amount cannot be parsed, or is out of range. The message names the option.
    """
    if isinstance(amount, int):
        num_bytes = amount
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", amount)
        if match is None:
            raise SettingsError(f"{option}={shown(amount)} is not an amount of memory; write it like 512MiB or 2GB")
        prefix = match[2] or ""
        base = 1024 if prefix.endswith("i") else 1000
        num_bytes = int(min(float(match[1]), 1e30) * base ** " KMGT".index(prefix[:1] or " "))
    if not least <= num_bytes <= MAX_BYTES:
        raise SettingsError(f"{option}={shown(amount)} must be from {least} to {MAX_BYTES} bytes")
    return num_bytes


def parse_length(option: str, length: int | str | None) -> int | None:
    """Return the number of tokens of a length such as 4096, "4096", "4k" (4000), "4K" (4096) or "1.5M".

    None, -1 and "auto" stand for None.

    Raises:
        SettingsError: the length cannot be parsed, or is out of range. The message names the option.
    """
    if length in (None, -1, "-1", "auto"):
        return None
    number = length if type(length) is int else 0
    if isinstance(length, str) and (match := re.fullmatch(r"(\d{1,10}(?:\.\d{1,10})?)([kmKM]?)", length.strip())):
        number = int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "K": 2**10, "M": 2**20}[match[2]])
    if not 2 <= number < 2**31:
        raise SettingsError(
            f"{option}={shown(length)} must be an integer from 2 to {2**31 - 1}, a text such as '32k' (32000) or '32K' "
            "(32768), or None, -1 or 'auto' for the longest"
        )
    return number


def allowed_values(expected: Any) -> str:
    """Return a description of a type's values in words."""
    if get_origin(expected) is Literal:
        return f"one of {', '.join(map(repr, get_args(expected)))}"
    if get_origin(expected) is list:
        return f"a list, each entry {allowed_values(*get_args(expected))}"
    if get_origin(expected) in (Union, types.UnionType):
        return " or ".join(allowed_values(each) for each in get_args(expected))
    if get_origin(expected) is Annotated:
        kind, bounds = get_args(expected)
        low = f"above {bound(bounds.gt)}" if bounds.gt is not None else f"from {bound(bounds.ge)}"
        high = "" if bounds.le is None else f" to {bound(bounds.le)}"
        return f"{allowed_values(kind)} {low}{high}"
    return _NAMES_OF_TYPES.get(expected, "a dict (in JSON, an object)")
