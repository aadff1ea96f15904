"""Settings from the command line, the environment, a YAML file and defaults, and the script for completion."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import settings_table

from moeserve import SettingsError, cli
from moeserve.cli import serve
from moeserve.cli.parser import Parser, engine_settings, given
from moeserve.cli.sources import add_sources
from moeserve.config.settings import Settings, SpeculativeConfig
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_names import VllmSettings
from moeserve.server.settings import ServerSettings


def read(*arguments: str) -> argparse.Namespace:
    """Return the options of `moeserve serve` with those of the other sources."""
    command = Parser()
    command.set_defaults(parser=command)
    serve.add_arguments(command)
    options = command.parse_args(arguments)
    add_sources(options, command.settings)
    return options


def server_settings(*arguments: str) -> dict[str, Any]:
    return given(read(*arguments), ServerSettings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_the_command_line_wins_over_the_environment_and_the_environment_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("port: 1\nmax-waiting: 1\ndrain_timeout: 1\n")
    monkeypatch.setenv("MOESERVE_PORT", "2")
    monkeypatch.setenv("MOESERVE_MAX_WAITING", "2")
    monkeypatch.setenv("MOESERVE_CONFIG", str(file))
    assert server_settings("--port", "3") == {"port": 3, "max_waiting": 2, "drain_timeout": 1.0}
    assert server_settings("--port", "3", "--config", str(file))["drain_timeout"] == 1.0


def test_the_example_of_the_document(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = settings_table.DOCUMENT.read_text()
    ((text, command),) = re.findall(r"```yaml\n(.*?)```\n\n```bash\n(.*?)\n```", document, re.DOTALL)
    variable, _, _, *arguments = shlex.split(command)
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv(*variable.split("="))
    file.write_text(text)
    options = read(*arguments)
    assert given(options, ServerSettings) == {"port": 8001, "max_waiting": 64, "api_key": ["first-key", "second-key"]}
    settings = parse_settings(engine_settings(options))
    assert (settings.model.model, settings.parallel.data_parallel_size) == ("/models/mixtral", 2)
    assert settings.scheduler.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=4)


def test_an_earlier_source_hides_the_name_that_vllm_has_for_a_setting(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("kv_cache_memory: 1GiB\n")
    monkeypatch.setenv("MOESERVE_KV_CACHE_MEMORY_BYTES", "1000")
    assert engine_settings(read("--config", str(file))) == {"kv_cache_memory_bytes": 1000}
    assert engine_settings(read("--config", str(file), "--kv-cache-memory", "2GB")) == {"kv_cache_memory": "2GB"}


def test_nested_settings_of_a_file_are_those_of_the_python_api(file: Path) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    file.write_text(
        "model: folder\napi_key: [one, two]\npipeline_layers: [3, 4]\nenable_prefix_caching: false\n"
        "speculative_config:\n  method: ngram\n  num_speculative_tokens: 4\n"
    )
    options = read("--config", str(file))
    expected = dict(model="folder", pipeline_layers=[3, 4], enable_prefix_caching=False, speculative_config=speculation)
    assert parse_settings(engine_settings(options)) == parse_settings(expected)
    assert given(options, ServerSettings) == {"api_key": ["one", "two"]}
    assert engine_settings(read("other", "--config", str(file)))["model"] == "other"


def test_a_list_of_one_text_may_be_the_text(file: Path) -> None:
    file.write_text("served-model-name: small\napi_key: a,b\n")
    assert server_settings("--config", str(file)) == {"served_model_name": ["small"], "api_key": ["a,b"]}


def test_settings_of_vllm_that_change_nothing_may_be_in_a_file(file: Path) -> None:
    file.write_text("disable-log-requests: true\nmax_logprobs: 20\nload_format: safetensors\nlog_level: debug\n")
    options = read("--config", str(file))
    assert engine_settings(options) == {"load_format": "auto"}
    assert given(options, ServerSettings) == {"log_level": "debug"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("enable-lora: true", ["enable_lora=True", "merge the adapter"]),
        ("prt: 1", ["'prt'", "'port'"]),
        ("speculative_config: {methd: ngram}", ["speculative_config"]),
        ("port: many", ["port='many'", "an integer from 0"]),
        ("rebalance: off", ["rebalance=False", "quotes"]),
        ("max-waiting: 1\nmax_waiting: 2", ["max-waiting", "max_waiting"]),
        ("- port", ["settings", "port: 9000"]),
        ("port: [", ["not YAML", "line 1"]),
        ("port: !!python/object/apply:os.getcwd []", ["not YAML", "python/object"]),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(file: Path, text: str, named: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        read("--config", str(file))
    for each in (str(file), *named):
        assert each in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml"):
        read("--config", str(tmp_path / "none.yaml"))


def test_every_setting_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in (ServerSettings, *Settings.groups().values(), VllmSettings):
        for field in dataclasses.fields(group):
            monkeypatch.setenv(f"MOESERVE_{field.name.upper()}", '["?", {}]')  # a value of no setting
            with pytest.raises(SettingsError, match=f"MOESERVE_{field.name.upper()}="):
                read()
            monkeypatch.delenv(f"MOESERVE_{field.name.upper()}")


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("API_KEY", "one,two", ["one", "two"]),
        ("API_KEY", '["one,two"]', ["one,two"]),
        ("ALLOW_SCALE", "1", True),
        ("SSL_CERTFILE", "a,b", "a,b"),
    ],
)
def test_variables_are_read_as_flags_are(
    variable: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MOESERVE_{variable}", text)
    assert server_settings() == {variable.lower(): value}


def test_a_misspelt_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MOESERVE_MAX_WAITNG", "3")
    monkeypatch.setenv("MOESERVE_SERVICE_PORT_HTTP", "80")  # Kubernetes sets these beside a service named moeserve
    monkeypatch.setenv("MOESERVE_PORT", "tcp://10.0.0.1:80")
    assert server_settings() == {}
    (record,) = caplog.records
    assert "MOESERVE_MAX_WAITNG" in record.getMessage()
    assert "MOESERVE_MAX_WAITING" in record.getMessage()


def test_the_environment_names_no_model_for_a_chat_with_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESERVE_MODEL", "folder")
    assert cli.main(["chat", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [(["ser"], {"serve"}), (["serve", "--max-num-s"], {"--max-num-seqs"}), (["serve", "--device", "cu"], {"cuda"})],
)
def test_bash_completes_commands_flags_and_values(typed: list[str], expected: set[str]) -> None:
    script = (
        'source <("$0" -m moeserve --print-completion bash); '
        "complete=($(complete -p moeserve)); function=${complete[-2]}; "
        'COMP_WORDS=(moeserve "$@"); COMP_CWORD=$#; '
        '$function moeserve "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", script, sys.executable, *typed]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {*shown.split()} == expected


def test_completion_without_shtab_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["--print-completion", "bash"]) == 1
    assert "pip install 'moeserve[completion]'" in capsys.readouterr().err
