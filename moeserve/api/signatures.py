"""Signatures and docstrings of the constructors that take settings as keyword arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

from moeserve.config.descriptions import argument_section, extended
from moeserve.config.settings import Settings
from moeserve.config.validation import allowed_values
from moeserve.config.vllm_names import VllmSettings

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def lists_settings(init: Constructor) -> Constructor:
    """Decorate a constructor so that its signature and docstring have every setting, for `help` and completion.

    The last parameter of the constructor takes the settings. Type checkers read them from `SettingArguments`.
    """
    parameters = list(inspect.signature(init).parameters.values())[:-1]
    described = {parameter.name for parameter in parameters}
    for group in Settings.groups().values():
        for setting in dataclasses.fields(group):
            if setting.name not in described:
                parameters.append(
                    inspect.Parameter(
                        setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=setting.type
                    )
                )
    vars(init)["__signature__"] = inspect.Signature(parameters)
    groups = (*Settings.groups().values(), VllmSettings)
    sections = [_section_of(group, without=described) for group in groups]
    init.__doc__ = extended(init.__doc__, sections)
    return init


def _section_of(group: type, *, without: set[str]) -> str:
    hints = get_type_hints(group, include_extras=True)
    title = f"Settings ({group.__doc__})"
    return argument_section(title, group, lambda field: allowed_values(hints[field.name]), without=without)
