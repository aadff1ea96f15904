"""`help`, `dir` and completion of the public names describe every setting and parameter."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import moeserve
from moeserve.api.setting_arguments import SettingArguments
from moeserve.config import vllm_options
from moeserve.config.settings import Settings
from moeserve.config.vllm_names import VllmSettings

SETTINGS = [field for group in (*Settings.groups().values(), VllmSettings) for field in dataclasses.fields(group)]


def entry_of(name: str, docstring: str | None) -> str:
    """Return the entry of an argument in a docstring, on one line."""
    lines = inspect.cleandoc(docstring or "").split("\n")
    (first,) = [number for number, line in enumerate(lines) if line.strip().startswith(f"{name}: ")]
    margin = len(lines[first]) - len(lines[first].lstrip())
    last = first + 1
    while last < len(lines) and lines[last].startswith(" " * (margin + 1)):
        last += 1
    return " ".join(line.strip() for line in lines[first:last])


@pytest.mark.parametrize("kind", [moeserve.LLM, moeserve.AsyncLLM])
def test_help_describes_every_setting(kind: type) -> None:
    for setting in SETTINGS:
        if setting.name != "model":
            entry = entry_of(setting.name, kind.__init__.__doc__)  # type: ignore[misc]
            assert setting.metadata["help"].split()[-1] in entry


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", ["from 1 to 128", "default: 1)"]),
        ("temperature", ["from 0 to 100", "default: 1.0"]),
        ("top_p", ["above 0 to 1", "default: 1.0"]),
        ("max_tokens", ["from 1 to 2**63 - 1", "None", "default: 16"]),
        ("stop", ["str | list[str] | None"]),
        ("output_kind", ["RequestOutputKind", "CUMULATIVE"]),
    ],
)
def test_help_gives_ranges_and_defaults_of_sampling_parameters(name: str, values: list[str]) -> None:
    entry = entry_of(name, moeserve.SamplingParams.__doc__)
    for value in values:
        assert value in entry


def test_help_describes_every_sampling_parameter() -> None:
    for field in dataclasses.fields(moeserve.SamplingParams):
        assert field.metadata["help"].split()[-1] in entry_of(field.name, moeserve.SamplingParams.__doc__)


@pytest.mark.parametrize("kind", [moeserve.LLM, moeserve.AsyncLLM])
def test_signatures_list_every_own_setting_with_its_default(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    for group in Settings.groups().values():
        for field in dataclasses.fields(group):
            assert parameters[field.name].default == field.default


def test_types_of_arguments_are_those_of_the_settings() -> None:
    arguments = get_type_hints(SettingArguments)
    assert {*arguments, "model"} == {field.name for field in SETTINGS} | vllm_options.SETTINGS.keys()


def test_public_names_are_listed_before_they_are_imported() -> None:
    code = (
        "import sys, rlcompleter, moeserve\n"
        "assert {*moeserve.__all__} <= {*dir(moeserve)}\n"
        "assert 'torch' not in sys.modules\n"
        "completer = rlcompleter.Completer({'moeserve': moeserve})\n"
        "assert completer.complete('moeserve.AsyncLLM', 0) == 'moeserve.AsyncLLM('\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
