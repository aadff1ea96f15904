"""Expert loads that an engine reports, against the routers of transformers."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.errors import EngineError, SettingsError
from moeserve.telemetry.expert_load import LoadWindow, read_windows, summed

SETTINGS: dict[str, Any] = dict(
    dtype="float32", kv_cache_memory="8MiB", max_model_len=256, max_num_batched_tokens=32, enable_prefix_caching=False
)
NUM_TOKENS = 8


def recount(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """Return counts by layer, by expert. All tokens of a request but the last one go through the model."""
    continued = zip(prompts, reference.continuations(prompts, NUM_TOKENS), strict=True)
    return reference.expert_counts([prompt + tokens[:-1] for prompt, tokens in continued])


def generate(llm: LLM, prompts: list[list[int]]) -> None:
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-odd", {}),
        ("mixtral-odd", {"data_parallel_size": 2, "num_redundant_experts": 3}),
        ("deepseek-v3-four-heads", {"tensor_parallel_size": 2, "dispatcher": "allgather"}),
        ("mixtral-wide", {"tensor_parallel_size": 2, "expert_parallel": False}),
        ("qwen3-moe", {"pipeline_parallel_size": 3}),  # the second stage has no experts
        ("mixtral-odd", {"pipeline_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
def test_counts_are_those_of_the_routers(
    name: str, settings: dict[str, Any], reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(3, 40, 17)
    expected = recount(reference, prompts)
    num_ranks = settings.get("tensor_parallel_size", 1) * settings.get("data_parallel_size", 1)
    num_slices = 1 if settings.get("expert_parallel", True) else num_ranks
    num_computed = sum(map(len, prompts)) + len(prompts) * (NUM_TOKENS - 1)
    with LLM(reference.folder, show_progress=False, **SETTINGS, **settings) as llm:
        assert sum(map(sum, llm.expert_load().tokens_of_expert)) == 0  # the profiling run is not counted
        for _ in range(2):  # the second time from graphs
            generate(llm, prompts)
            window = llm.expert_load()
            assert [list(counts) for counts in window.tokens_of_expert] == expected
            computed = [num_slices * sum(counts) for counts in expected]
            assert [sum(counts) for counts in window.tokens_of_rank] == computed
            assert {len(counts) for counts in window.tokens_of_rank} == {num_ranks}
            assert window.num_tokens == num_computed
            assert window.num_padding_tokens == 0
            assert 0 < window.seconds < 60
            assert (window.bytes_dispatched > 0) == (num_ranks > 1)
            assert (window.straggler_seconds > 0) == (num_ranks > 1)
    with pytest.raises(EngineError, match="shut down"):
        llm.expert_load()


@pytest.mark.ranks
def test_file_and_metrics_get_every_window(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = reference_named("mixtral-odd")
    prompts = reference.prompts(3, 40, 17, 24)
    expected = recount(reference, prompts)
    path, port = tmp_path / "loads.jsonl", free_port()
    settings = dict(expert_load_window=3, expert_load_file=str(path), metrics_port=port)
    with LLM(reference.folder, show_progress=False, data_parallel_size=2, **SETTINGS, **settings) as llm:
        generate(llm, prompts)
        loads = [llm.expert_load()]
        while (rest := llm.expert_load()).num_steps:  # of a round that was in flight
            loads.append(rest)
        reported = summed(loads)
        windows = read_windows(path)
        llm.save_placement(tmp_path / "placement.json")  # ends a window of no steps, which is not reported
        assert llm.expert_load().num_steps == 0
        assert read_windows(path) == windows
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            metrics = dict(
                line.decode().rsplit(" ", 1) for line in answer.read().splitlines() if not line.startswith(b"#")
            )
        generate(llm, prompts)
    total = summed(windows)
    # The call returns everything since the last call, also what is in the file.
    assert (reported.num_steps, reported.tokens_of_expert) == (total.num_steps, total.tokens_of_expert)
    assert {window.num_steps for window in windows[:-1]} <= {3, 4}  # a round more may be in flight
    ends = itertools.accumulate(window.num_steps for window in windows)
    assert [window.first_step for window in windows] == [0, *ends][:-1]
    assert [list(counts) for counts in total.tokens_of_expert] == expected
    assert float(metrics["moeserve_tokens_total"]) == total.num_tokens
    assert float(metrics["moeserve_steps_total"]) == total.num_steps
    last: LoadWindow = windows[-1]
    for layer, counts in zip(last.layers, last.tokens_of_expert, strict=True):
        shown = float(metrics[f'moeserve_expert_load_max_over_mean{{layer="{layer}"}}'])
        assert shown == pytest.approx(max(counts) * len(counts) / max(1, sum(counts)) if sum(counts) else 1.0)
    assert summed(read_windows(path)).num_tokens == 2 * total.num_tokens  # the engine wrote the rest as it closed
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


def test_unwritable_file_is_named(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expert_load_file='.*/loads.jsonl'"):
        LLM(reference_named("mixtral").folder, expert_load_file=str(tmp_path / "no" / "loads.jsonl"), **SETTINGS)
