"""The command line: what its flags become, and what it answers to what is wrong. No model is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moeserve import cli
from moeserve.config.settings import Settings
from moeserve.sampling_params import SamplingParams


def parse(*arguments: str) -> Any:
    options, unknown = cli._parser().parse_known_args(["generate", *arguments])
    assert not unknown
    return options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--promt", "x"], "unknown flag --promt: did you mean --prompt?"),
        (["generate", "--prompt", "x", "--max-tokns=3"], "unknown flag --max-tokns: did you mean --max-tokens?"),
        (["generate", "--prompt", "x", "--max_num_seq", "3"], "did you mean --max-num-seqs?"),
        (["generate", "--prompt", "x", "--prom", "x"], "did you mean --prompt?"),  # no abbreviations
        (["generate"], "--prompt is missing"),
        (["generate", "--prompt", ""], "--prompt is missing"),
        (["generate", "one", "--model", "two", "--prompt", "x"], "MODEL=one and --model=two are both given"),
        (["generate", "--prompt", "x", "--max-num-seqs", "0"], "'0': Expected `int` >= 1"),
        (["generate", "--prompt", "x", "--dtype", "fp8"], "'float32', 'bfloat16'"),
        (["generate", "--prompt", "x", "--stop-token-ids", "a"], "--stop-token-ids"),
        (["viz", "loads.jsonl", "--htm", "x"], "unknown flag --htm: did you mean --html?"),
        (["viz"], "LOADS"),
        (["viz", "loads.jsonl", "--num-redundant-experts", "-1"], "'-1': Expected `int` >= 0"),
        (["upcycle", "a", "b", "--export", "4"], "unknown flag --export: did you mean --experts?"),
        (["bench", "thruput"], "invalid choice: 'thruput'"),
        (["bench", "moe", "--rows", "0"], "argument --rows: 0 is less than 1"),
        (["bench", "throughput", "--new-tokens", "1"], "argument --new-tokens: 1 is less than 2"),
        (["genrate"], "'generate', 'inspect', 'plan', 'simulate', 'viz', 'upcycle'"),
        ([], "COMMAND"),
    ],
)
def test_wrong_command_lines_are_answered(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "no/such/folder", "--prompt", "x"], "no/such/folder is not a folder"),
        (["generate", "no/such/folder", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "no/such/folder", "--prompt", "x", "--kv-cache-memory", "2X"], "no/such/folder"),
        (["upcycle", "no/such/file.gguf", "out"], "no/such/file.gguf"),
        (
            ["simulate", "x", "--hardware", "h800", "--ranks", "4", "--gpus-per-node", "2"],
            "--gpus-per-node 2 does not go",
        ),
        (
            ["simulate", "x", "--hardware", "h800", "--nodes", "4", "--exchange=node_limited", "--rebalance=auto"],
            "which --rebalance auto and --placement loads do not keep here; use --exchange by_node",
        ),
        (
            ["simulate", "x", "--hardware", "h800", "--nodes", "4", "--exchange=node_limited", "--placement=loads"],
            "which --rebalance auto and --placement loads do not keep here; use --exchange by_node",
        ),
        (["viz", "no/such/loads.jsonl"], "cannot read the expert loads in no/such/loads.jsonl"),
    ],
)
def test_errors_are_one_sentence_and_status_1(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("moeserve: ")
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_planned_and_simulated_is_said_alike(command: str) -> None:
    words = [command, "folder", "--hardware", "h800", "--nodes", "3", "--loads", "loads.json", "--dtype", "float16"]
    options = cli._parser().parse_args([*words, "--json"])
    assert (str(options.model), options.ranks, options.nodes, options.gpus_per_node) == ("folder", None, 3, None)
    assert (str(options.loads), options.dtype, options.json) == ("loads.json", "float16", True)
    assert cli._ranks(options) == (24, 8)


def test_flags_that_are_not_given_leave_every_default_alone() -> None:
    assert cli._given(parse("--prompt", "x"), *Settings.groups().values()) == {}
    assert cli._given(parse("--prompt", "x"), SamplingParams) == {"max_tokens": 256}


def test_flags_become_settings_and_parameters() -> None:
    options = parse(
        *("folder", "--prompt", "x", "--prompt", "y", "--kv-cache-memory", "2GB", "--no-enable-prefix-caching"),
        *("--max-num-seqs", "3", "--stop", "a", "--stop", "b", "--logit-bias", '{"5": -1.5}', "--temperature", "0.5"),
    )
    assert options.prompt == ["x", "y"]
    assert options.model_folder == "folder"
    settings = Settings.from_options(cli._given(options, *Settings.groups().values()))
    assert (settings.cache.kv_cache_memory, settings.cache.enable_prefix_caching) == ("2GB", False)
    assert settings.scheduler.max_num_seqs == 3
    params = SamplingParams(**cli._given(options, SamplingParams))
    assert (params.stop, params.logit_bias, params.temperature) == (["a", "b"], {5: -1.5}, 0.5)


def test_help_shows_every_setting_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    for group in Settings.groups().values():
        assert f"\n{group.__doc__}:\n" in shown
        for field in dataclasses.fields(group):
            assert f"--{field.name.replace('_', '-')} " in shown
            assert field.metadata["help"].split(";")[0] in " ".join(shown.split())
