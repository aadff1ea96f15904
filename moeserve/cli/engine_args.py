"""`EngineArgs`: settings as an object and as flags of a program, with vLLM's names."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from moeserve.cli.parser import add_flags, add_vllm_flags
from moeserve.config.settings import (
    CacheSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    Settings,
    TelemetrySettings,
)
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_names import VllmSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeserve.api.setting_arguments import SettingArguments

Parsed = TypeVar("Parsed", bound="EngineArgs")
# vLLM's engine does not have these settings either, so a program may have its own flags of these names.
_OF_SERVER = {"log_level", "chat_template"}


@dataclass(init=False, frozen=True)
class EngineArgs(
    ModelSettings, CacheSettings, SchedulerSettings, ParallelSettings, TelemetrySettings, VllmSettings
):  # inherited, so that `dataclasses.asdict` gives the arguments of `LLM`
    """The settings of an engine, for `LLMEngine.from_engine_args` or `LLM(**dataclasses.asdict(engine_args))`.

    Each setting is an attribute. `add_cli_args` adds all of them to the parser of a program as flags.

    Raises:
        SettingsError: a setting is unknown or out of range.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Unpack[SettingArguments]) -> None:
        """Check the settings.

        Args:
            model, settings: as for `LLM`.
        """
        given = {"model": None if model is None else os.fspath(model), **settings}
        parse_settings(given)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, given.get(field.name, field.default))

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `LLM`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, **others: Any) -> argparse.ArgumentParser:
        """Add a flag for each setting to a parser, and return the parser.

        A setting without a flag is absent from the parsed options, unless `parser.set_defaults` gives it a value.

        Args:
            others: further arguments of vLLM, which have no effect.
        """
        for group in (*Settings.groups().values(), VllmSettings):
            add_flags(parser.add_argument_group(group.__doc__), group)
        add_vllm_flags(parser, without=_OF_SERVER)
        return parser

    @classmethod
    def from_cli_args(cls: type[Parsed], args: argparse.Namespace) -> Parsed:
        """Return the settings among parsed options."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


@dataclass(init=False, frozen=True)
class AsyncEngineArgs(EngineArgs):
    """The same settings, for `AsyncLLM.from_engine_args`."""
