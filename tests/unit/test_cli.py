"""The command line: help, flags, and messages for wrong command lines. No model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeserve import cli
from moeserve.api import default_model
from moeserve.bench.commands import MODULES as BENCHMARKS
from moeserve.cli import generate
from moeserve.cli.engine_args import EngineArgs
from moeserve.cli.parser import Parser, add_cluster, cluster_of, given
from moeserve.config.settings import ModelSettings, Settings
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_names import VllmSettings
from moeserve.sampling_params import SamplingParams


def parse_generate(*arguments: str) -> argparse.Namespace:
    command = Parser()
    generate.add_arguments(command)
    return command.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--promt", "x"], ["--promt", "--prompt?"]),
        (["generate", "--prompt", "x", "--max-tokns=3"], ["--max-tokns", "--max-tokens?"]),
        (["generate", "--prompt", "x", "--max_num_seq", "3"], ["--max-num-seqs?"]),
        (["generate", "--prompt", "x", "--gpu-memory-utilisation", "1"], ["--gpu-memory-utilization?"]),
        (["generate", "--prompt", "x", "--prom", "x"], ["--prompt?"]),  # no abbreviations
        (["generate", "--tp", "2", "question"], ["--tp", "-tp?"]),
        (["generate", "--enable-lora", "--prompt", "x"], ["--enable-lora", "merge the adapter"]),
        (["serve", "x", "--cpu-offload-gb", "4"], ["--cpu-offload-gb", "cpu_offload_gb=4"]),
        (["generate", "question", "--bogus", "x"], ["--bogus"]),
        (["generate"], ["prompt"]),
        (["generate", "owner/name"], ["prompt", "moeserve generate owner/name"]),
        (["generate", "folder", "question", "--prompt", "another"], ["'question'"]),
        (["generate", "--prompt", ""], ["prompt"]),
        (["generate", "one", "--model", "two", "--prompt", "x"], ["MODEL=one", "--model=two"]),
        (["generate", "--prompt", "x", "--max-num-seqs", "0"], ["--max-num-seqs", "'0'", "an integer from 1"]),
        (["generate", "--prompt", "x", "--dtype", "fp8"], ["--dtype", "'fp8'", "bfloat16"]),
        (["generate", "--prompt", "x", "--stop-token-ids", "a"], ["--stop-token-ids", "an integer"]),
        (["generate", "--prompt", "x", "--pipeline-layers", "3,x"], ["--pipeline-layers", "3,x", "an integer"]),
        (["generate", "x", "--speculative-config", '{"method": "eagle"}'], ["method='eagle'", "'ngram', 'mtp'"]),
        (["generate", "x", "--speculative-config", "{method: ngram}"], ["{method: ngram}", "is not JSON"]),
        (["generate", "--prompt", "x", "--zzzz"], ["unknown flag --zzzz: see --help"]),
        (["generate", "--prompt", "x", "-qq", "2"], ["unknown flag -qq: see --help"]),
        (["viz", "loads.jsonl", "--pgn", "x"], ["--pgn", "--png?"]),
        (["viz"], ["LOADS"]),
        (["viz", "loads.jsonl", "--num-redundant-experts", "-1"], ["'-1'", "an integer from 0"]),
        (["upcycle", "a", "b", "--exprts", "4"], ["--exprts", "--experts?"]),
        (["bench", "thruput"], ["'thruput'", "throughput"]),
        (["bench", "moe", "--rows", "0"], ["--rows", "0"]),
        (["genrate"], ["genrate", *cli.COMMANDS]),
        ([], ["COMMAND"]),
    ],
)
def test_wrong_command_lines_exit_with_status_2(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    for text in named:
        assert text in shown
    assert "Expected" not in shown  # no text of msgspec's


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "no/such/folder", "--prompt", "x"], ["no/such/folder"]),
        (["generate", "no/such/folder", "--prompt", "x", "--temperature", "-1"], ["--temperature -1.0"]),
        (["generate", "x", "-tp", "2"], ["--tensor-parallel-size 2 does"]),
        (["generate", "x", "-dp", "2", "--executor", "uniproc"], ["--executor uniproc runs", "use --executor mp\n"]),
        (
            ["generate", "x", "--batch-invariant", "-tp", "3", "-dp", "2", "--dispatcher", "local"],
            ["--dispatcher local"],
        ),
        (["generate", "x", "--kv-file", "f"], ["--kv-file f", "--kv-host-memory"]),
        (["generate", "x", "--kv-folder", "f", "--no-enable-prefix-caching"], ["--enable-prefix-caching\n"]),
        (["upcycle", "no/such/file.gguf", "out"], ["no/such/file.gguf"]),
        (["plan", "x", "--ranks", "4", "--decode-requests", "2"], ["--decode-requests", "--hardware"]),
        (["simulate", "x", "--hardware", "h800"], ["--ranks", "--nodes"]),
        (["simulate", "x", "--hardware", "h800", "--ranks", "4", "--gpus-per-node", "2"], ["--gpus-per-node 2"]),
        (["viz", "no/such/loads.jsonl"], ["no/such/loads.jsonl"]),
        (["serve", "no/such/folder", "--served-model-name", "a", "b"], ["no/such/folder"]),
        (["serve", "--served-model-name", "a", "b", "no/such/folder"], ["no/such/folder"]),
    ],
)
def test_errors_are_one_line_and_status_1(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("moeserve: ")
    assert shown.count("\n") == 1
    for text in named:
        assert text in shown


HARMLESS = [
    *("--disable-log-requests", "--max-logprobs", "20", "--tokenizer-mode", "auto", "--task", "generate"),
    *("--no-enable-lora", "--limit-mm-per-prompt", '{"image":0}', "--compilation-config", "3", "--cpu-offload-gb", "0"),
    *("--guided-decoding-backend", "xgrammar", "--cuda-graph-sizes", "1", "2", "--disable-custom-all-reduce"),
    *("--load-format", "safetensors", "--model-impl", "vllm", "--quantization", "awq_marlin"),
]


def test_flags_of_vllm_that_change_nothing_are_accepted() -> None:
    options = parse_generate(*HARMLESS, "folder", "question")
    assert (options.model_folder, options.prompt) == ("folder", ["question"])
    assert parse_settings(given(options, *Settings.groups().values())) == Settings(
        model=ModelSettings(model_impl="moeserve", quantization="awq")
    )
    args = vars(EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(HARMLESS))
    parse_settings(args)


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "-1"],
        ["--device", "cuda"],
        ["--trust-remote-code"],
        ["--tensor-parallel-size", "2"],  # the default model has 9 attention heads
        ["--tokenizer", "no/such/folder"],
        ["--expert-loads", "no/such/file"],
    ],
)
def test_the_default_model_is_not_made_for_a_command_line_that_is_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "default_model", lambda *_: pytest.fail("the default model was made"))
    assert cli.main(["generate", "--prompt", "x", *flags]) == 1


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["inspect"], "family      Mixtral"), (["plan", "--ranks", "3"], "4 experts in a layer")]
)
def test_the_default_model_is_described_if_none_is_named(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "model", "prompts"),
    [
        (["question"], None, ["question"]),
        (["what is 1/2?"], None, ["what is 1/2?"]),
        (["--max-tokens", "3", "question"], None, ["question"]),
        (["question", "--max-tokens", "3"], None, ["question"]),
        (["folder", "question"], "folder", ["question"]),
        (["folder", "--max-tokens", "3", "question"], "folder", ["question"]),
        (["--max-tokens", "3", "folder", "question", "--raw"], "folder", ["question"]),
        (["folder", "--prompt", "one", "--prompt", "two"], "folder", ["one", "two"]),
    ],
)
def test_the_prompt_may_be_the_last_positional_argument(
    arguments: list[str], model: str | None, prompts: list[str]
) -> None:
    options = parse_generate(*arguments)
    assert (options.model_folder, options.prompt) == (model, prompts)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kv_file='f' needs kv_host_memory", "--kv-file f needs --kv-host-memory"),
        ("enable_prefix_caching=True, not False", "--enable-prefix-caching, not False"),
        ("enable_prefix_caching=False", "--no-enable-prefix-caching"),
        ("expert_parallel=True", "--expert-parallel True"),
        ("pipeline_layers=[4, 4] has", "--pipeline-layers 4,4 has"),
        ("kv_host_memory='4 GiB'.", "--kv-host-memory '4 GiB'."),
        ("gpu_memory_utilization=0.9.", "--gpu-memory-utilization 0.9."),
        ("the seed of a model: seed=3", "the seed of a model: --seed 3"),
        # no settings
        *(
            (text, text)
            for text in ("c/config.json: dtype='int8'", "s.yaml: max_num_seqs=0", "/a/kv_folder/b, kv_folder/b")
        ),
        *((text, text) for text in ("'kv_folder'", "LLM.seed=1", "hidden_size=3")),
    ],
)
def test_messages_write_settings_as_flags(text: str, shown: str) -> None:
    command = Parser()
    generate.add_arguments(command)
    assert command.as_flags(text) == shown
    assert command.as_flags(shown) == shown


def test_plan_and_simulate_share_the_flags_of_a_cluster() -> None:
    command = Parser()
    add_cluster(command)
    options = command.parse_args(["folder", "--nodes", "3", "--loads", "a.json", "--dtype", "float16", "--json"])
    assert (str(options.model), str(options.loads), options.dtype, options.json) == (
        "folder",
        "a.json",
        "float16",
        True,
    )
    assert cluster_of(options) == (24, 8)


def test_flags_that_are_not_given_keep_every_default() -> None:
    assert given(parse_generate("--prompt", "x"), *Settings.groups().values(), VllmSettings) == {}
    assert given(parse_generate("--prompt", "x"), SamplingParams) == {"max_tokens": generate.MAX_TOKENS}


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["-v", "inspect", "no/such/folder"], logging.INFO),
        (["inspect", "no/such/folder", "--verbose"], logging.INFO),
        (["inspect", "no/such/folder"], logging.WARNING),
    ],
)
def test_verbose_may_stand_before_or_after_the_command(
    arguments: list[str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: levels.append(options["level"]))
    assert cli.main(arguments) == 1
    assert levels == [level]


def test_flags_become_settings_and_sampling_parameters() -> None:
    options = parse_generate(
        *("folder", "--prompt", "x", "--prompt", "y", "--kv-cache-memory", "2GB", "--no-enable-prefix-caching"),
        *("--no-enable-chunked-prefill",),
        *("--max-num-seqs", "3", "--dtype", "half", "--distributed-executor-backend", "mp"),
        *("--stop", "a", "--stop", "b", "--logit-bias", '{"5": -1.5}', "--temperature", "0.5"),
    )
    assert options.prompt == ["x", "y"]
    assert options.model_folder == "folder"
    assert given(options, VllmSettings) == {"enable_chunked_prefill": False, "distributed_executor_backend": "mp"}
    settings = parse_settings(given(options, *Settings.groups().values(), VllmSettings))
    assert (settings.cache.kv_cache_memory, settings.cache.enable_prefix_caching) == ("2GB", False)
    assert (settings.scheduler.max_num_seqs, settings.parallel.executor, settings.model.dtype) == (3, "mp", "half")
    params = SamplingParams(**given(options, SamplingParams))
    assert (params.stop, params.logit_bias, params.temperature) == (["a", "b"], {5: -1.5}, 0.5)


COMMANDS = [[], *([name] for name in cli.COMMANDS), *(["bench", name] for name in BENCHMARKS)]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_the_terminal(
    command: list[str], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width


def test_benchmarks_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    _, _, listed = capsys.readouterr().out.partition("NAME\n")
    summaries = re.findall(r"^    (\w+)\s+\S", listed, re.MULTILINE)  # the summary of a long name is in the next line
    assert summaries == list(BENCHMARKS)


def test_help_shows_every_setting_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    for group in (*Settings.groups().values(), VllmSettings):
        assert f"\n{group.__doc__}:\n" in shown
        for field in dataclasses.fields(group):
            assert f"{field.name.replace('_', '-')} " in shown.replace("\n", " \n")


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["launch", "--help"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from moeserve.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_m_moeserve_is_the_command_line() -> None:
    run: Any = subprocess.run([sys.executable, "-m", "moeserve", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()[0]) == (0, "moeserve")
