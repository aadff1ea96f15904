"""Settings from outside the command line: environment variables, and a YAML file.

The command line takes precedence over the environment, the environment over the file, and the file over the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from moeserve.config.environment import setting_variables
from moeserve.config.validation import check, convert, read_json_text
from moeserve.config.vllm_names import OWN_NAMES
from moeserve.config.vllm_options import SETTINGS, own_value, without_harmless
from moeserve.errors import SettingsError, missing_extra, nearest, shown

_EXPLANATION_OF_BOOL = "; YAML reads on, off, yes and no as True or False: write them in quotes"


def add_sources(options: argparse.Namespace, groups: Iterable[type]) -> None:
    """Add the settings of the environment and of the file to the options of the command line.

    The names of settings on the command line are stored as `options.on_command_line`.

    Args:
        groups: dataclasses of the settings that the command has.

    Raises:
        SettingsError: a variable or the file has a value of the wrong type, or the file an unknown key.
    """
    group_of_setting = {field.name: group for group in groups for field in dataclasses.fields(group)}
    if options.model_folder is not None:
        if "model" in options:
            options.parser.error(f"MODEL={options.model_folder} and --model={options.model} are both given; give one")
        options.model = options.model_folder
    options.on_command_line = group_of_setting.keys() & vars(options).keys()
    known = set(options.on_command_line)
    variables = setting_variables(group_of_setting)
    for source in (_of_environment(variables, group_of_setting), _of_file(options, variables, group_of_setting)):
        found = {name: value for name, value in source if not known & _spellings(name)}
        known |= set(found)
        vars(options).update(found)


def _spellings(name: str) -> set[str]:
    """Return a setting's name, and its other name if vLLM has one.

    A source with either name overrides both names in later sources.
    """
    return {name, OWN_NAMES.get(name, name), *(each for each, own in OWN_NAMES.items() if own == name)}


def _of_environment(variables: Mapping[str, str], group_of_setting: Mapping[str, type]) -> Iterator[tuple[str, Any]]:
    for name, text in variables.items():
        if name in group_of_setting and not _is_of_kubernetes(name, text):
            yield name, _parsed_variable(name, text, _expected(name, group_of_setting))


def _expected(name: str, group_of_setting: Mapping[str, type]) -> Any:
    """Return the type of a setting."""
    return get_type_hints(group_of_setting[name], include_extras=True)[name]


def _is_of_kubernetes(name: str, text: str) -> bool:
    """Return True for MOESERVE_PORT=tcp://..., which Kubernetes sets in every pod beside a service named moeserve."""
    return name == "port" and text.startswith("tcp://")


def _parsed_variable(name: str, text: str, expected: Any) -> Any:
    """Return the value of a variable. Commas separate the entries of a list; objects and lists may also be JSON."""
    try:
        value: Any = read_json_text(text) if text.startswith(("{", "[")) else text
        if "list" in str(expected) and isinstance(value, str):
            value = text.split(",")
        return convert(value, expected, strict=False)
    except ValueError as error:
        raise SettingsError(f"MOESERVE_{name.upper()}={shown(text)} {error}") from None


def _of_file(
    options: argparse.Namespace, variables: Mapping[str, str], group_of_setting: Mapping[str, type]
) -> Iterator[tuple[str, Any]]:
    path = options.config or variables.get("config")
    if not path:
        return
    seen: dict[str, str] = {}
    for key, value in _read_yaml(Path(path)).items():
        name = str(key).replace("-", "_")
        if name not in group_of_setting and name not in SETTINGS:
            hint = nearest(name, group_of_setting, otherwise="see --help")
            raise SettingsError(f"{path}: unknown setting {shown(key)}: {hint}")
        if name in seen:
            raise SettingsError(f"{path}: {seen[name]} and {key} are the same setting; give one")
        seen[name] = str(key)
        try:
            if name in group_of_setting:
                if isinstance(value, str) and "list[str]" in str(_expected(name, group_of_setting)):
                    value = [value]  # one entry, as on the command line
                yield name, check(name, own_value(name, value), group_of_setting[name])
            else:
                without_harmless({name: value})
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}{_EXPLANATION_OF_BOOL * isinstance(value, bool)}") from None


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        raise missing_extra("--config needs PyYAML", "server", error) from None
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"config={str(path)!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings or {}, dict):
        raise SettingsError(f"{path} must hold settings, such as `port: 9000`, not {shown(settings)}")
    return settings or {}
