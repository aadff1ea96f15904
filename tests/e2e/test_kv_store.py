"""Stores behind the KV cache: the same tokens with less computation, whatever happens to the store."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams, SettingsError
from moeserve.kv.load_rates import LoadRates

BLOCK = 16
NUM_BLOCKS = 20  # of KV cache: not enough for the prompts below
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load blocks though it may take longer than computing a tiny model."""
    monkeypatch.setattr(LoadRates, "pays", lambda _: True)


def prompts_that_return(seed: int = 0, num: int = 40) -> list[dict[str, list[int]]]:
    """Return prompts that begin with one of a few beginnings, of 5 blocks each."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(100) for _ in range(5 * BLOCK)] for _ in range(8)]
    tails = ([chance.randrange(100) for _ in range(chance.randint(1, 9))] for _ in range(num))
    return [{"prompt_token_ids": chance.choice(beginnings) + tail} for tail in tails]


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LLM]:
    defaults = dict(dtype="float32", max_model_len=128, max_num_seqs=3, block_size=BLOCK, show_progress=False)
    llm = LLM(model, **defaults | settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def cache_bytes(model: Path, **settings: Any) -> int:
    """Return the size of a KV cache of NUM_BLOCKS blocks on one rank."""
    with engine(model, kv_cache_memory="1GiB", **settings) as llm:
        tensors = [
            tensor
            for cache in llm.core.replicas[0].executor.worker.runner.step_runner.caches
            for tensor in cache.tensors
        ]
        return NUM_BLOCKS * sum(tensor[0].nbytes for tensor in tensors)


def run(llm: LLM, prompts: list[dict[str, list[int]]]) -> tuple[list[list[int]], int]:
    """Return the tokens of prompts that are served one after the other in small groups, and the cached tokens.

    Checks that all other tokens, and no others, were computed.
    """
    before = sum(stats.steps.num_tokens for stats in llm.core.replica_stats)
    outputs = [output for first in range(0, len(prompts), 3) for output in llm.generate(prompts[first:][:3], PARAMS)]
    tokens = [output.outputs[0].token_ids for output in outputs]
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    num_computed = sum(stats.steps.num_tokens for stats in llm.core.replica_stats) - before
    assert not sum(stats.num_preemptions for stats in llm.core.replica_stats)
    num_tokens = sum(
        len(prompt["prompt_token_ids"]) + len(found) - 1 for prompt, found in zip(prompts, tokens, strict=True)
    )
    assert num_computed == num_tokens - num_cached
    return tokens, num_cached


@pytest.mark.slow_but("memory-mixtral, fp8", "file-deepseek-v32", "folder-mixtral]")
@pytest.mark.parametrize("name", ["mixtral", "mixtral, fp8", "deepseek-v32"])
@pytest.mark.parametrize("store", ["memory", "file", "folder"])
def test_the_same_tokens_with_less_computation(
    name: str, store: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    name, _, kv_cache_dtype = name.partition(", ")
    model, prompts = reference_named(name).folder, prompts_that_return()
    of_store = {
        "memory": {"kv_host_memory": "16MiB"},
        "file": {"kv_host_memory": "16MiB", "kv_file": str(tmp_path)},
        "folder": {"kv_folder": str(tmp_path / "blocks")},
    }
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype or "auto"}
    settings["kv_cache_memory"] = cache_bytes(model, **settings)
    with engine(model, **settings) as llm:
        expected, num_cached = run(llm, prompts)
    with engine(model, **settings, **of_store[store]) as llm:
        found, num_cached_or_loaded = run(llm, prompts)
        (stats,) = llm.core.replica_stats
    assert found == expected
    assert num_cached_or_loaded > 1.5 * num_cached
    assert stats.num_loaded_tokens > 0
    assert stats.num_failed_blocks == 0


def test_a_prefix_that_two_requests_compute_at_once_is_saved(reference_named: Callable[[str], Reference]) -> None:
    beginning = [7] * 5 * BLOCK
    params = SamplingParams(temperature=0, max_tokens=1)
    with engine(reference_named("mixtral").folder, kv_host_memory="16MiB") as llm:
        llm.generate([{"prompt_token_ids": [*beginning, tail]} for tail in (1, 2)], params, use_tqdm=False)
        while llm.core.replica_stats[0].num_saved_blocks < 5:  # it saves while it has something to do
            llm.generate({"prompt_token_ids": [3]}, params, use_tqdm=False)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=["dp", "tp", "pp"])
def test_every_rank_of_a_replica_keeps_its_part(
    layout: tuple[int, int, int], reference_named: Callable[[str], Reference]
) -> None:
    model, prompts = reference_named("mixtral").folder, prompts_that_return()
    kv_cache_memory = cache_bytes(model)
    with engine(model, kv_cache_memory=kv_cache_memory) as llm:
        expected, _ = run(llm, prompts)
    tp, dp, pp = layout
    sizes = dict(tensor_parallel_size=tp, data_parallel_size=dp, pipeline_parallel_size=pp)
    with engine(
        model, kv_cache_memory=kv_cache_memory // tp // pp, kv_host_memory="16MiB", num_threads=1, **sizes
    ) as llm:
        found, _ = run(llm, prompts)
        assert sum(stats.num_loaded_tokens for stats in llm.core.replica_stats) > 0
    assert found == expected


def test_a_folder_outlives_the_engine_and_is_shared(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    model = reference_named("mixtral").folder
    prompt = {"prompt_token_ids": [index % 100 for index in range(7 * BLOCK + 1)]}
    with engine(model, kv_folder=str(tmp_path)) as first, engine(model, kv_folder=str(tmp_path)) as second:
        expected, num_cached = run(first, [prompt])
        assert num_cached == 0
        while len(list(tmp_path.glob("*/*.safetensors"))) < 7:  # an engine saves blocks while it has something to do
            first.generate([{"prompt_token_ids": [1]}], PARAMS)
        assert run(second, [prompt]) == (expected, 7 * BLOCK)
    with engine(model, kv_folder=str(tmp_path)) as third:
        assert run(third, [prompt]) == (expected, 7 * BLOCK)
    for other in ({"quantization": "int8"}, {"kv_cache_dtype": "fp8"}):  # whose blocks have other contents
        with engine(model, kv_folder=str(tmp_path), **other) as fourth:
            assert run(fourth, [prompt])[1] == 0
    with engine(model, kv_folder=str(tmp_path)) as fifth:  # the others have not taken its blocks for damaged ones
        assert run(fifth, [prompt]) == (expected, 7 * BLOCK)


def test_a_long_prefix_is_computed_once(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    model, prefix = tmp_path / "model", random.Random(0).choices(range(100), k=4096)
    shutil.copytree(reference_named("mixtral").folder, model)
    values = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(values))
    settings = dict(kv_folder=str(tmp_path / "blocks"), max_model_len=4352, kv_cache_memory="16MiB")
    with engine(model, **settings) as first, engine(model, **settings) as second:
        expected, num_cached = run(first, [{"prompt_token_ids": [*prefix, 1]}])
        assert num_cached == 0
        while len(list(tmp_path.glob("blocks/*/*.safetensors"))) < 4096 // BLOCK:
            first.generate([{"prompt_token_ids": [1]}], PARAMS)
        assert run(second, [{"prompt_token_ids": [*prefix, 1]}]) == (expected, 4096)
    with engine(model, **settings) as third:
        found, num_cached = run(third, [{"prompt_token_ids": [*prefix, 2]}])
    with engine(model, **settings | {"kv_folder": None}) as without:
        assert run(without, [{"prompt_token_ids": [*prefix, 2]}]) == (found, 0)
    assert num_cached == 4096


def test_damaged_and_lost_blocks_are_computed(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    model, prompts = reference_named("mixtral").folder, prompts_that_return()
    kv_cache_memory = cache_bytes(model)
    with engine(model, kv_cache_memory=kv_cache_memory, kv_folder=str(tmp_path)) as llm:
        expected, _ = run(llm, prompts)
    chance = random.Random(0)
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) > 30
    for path in files:
        data = bytearray(path.read_bytes())
        match chance.randrange(4):
            case 0:
                path.unlink()
            case 1:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
            case 2:
                path.write_bytes(data[: chance.randrange(len(data))])
    with engine(model, kv_cache_memory=kv_cache_memory, kv_folder=str(tmp_path)) as llm:
        found, _ = run(llm, prompts)
        (stats,) = llm.core.replica_stats
    assert found == expected
    assert stats.num_loaded_tokens > 0
    assert stats.num_failed_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_a_folder_keeps_its_size_while_engines_are_killed(
    reference_named: Callable[[str], Reference], tmp_path: Path, num_kills: int
) -> None:
    """Files appear whole, and what a killed engine has left is removed."""
    model, prompts = reference_named("mixtral").folder, prompts_that_return()
    kv_cache_memory, size = cache_bytes(model), 2**20
    program = (
        "import sys; sys.path[:0] = sys.argv[4:]; import test_kv_store as t\n"
        "from pathlib import Path\n"
        "settings = dict(kv_cache_memory=int(sys.argv[2]), kv_folder=sys.argv[3], kv_folder_size=2**20)\n"
        "with t.engine(Path(sys.argv[1]), **settings) as llm:\n"
        "    print('ready', flush=True)\n"
        "    seed = 0\n"
        "    while True:\n"
        "        seed += 1\n"
        "        t.run(llm, t.prompts_that_return(seed))\n"
    )
    chance = random.Random(1)
    for _ in range(num_kills):
        arguments = [str(model), str(kv_cache_memory), str(tmp_path), *(path for path in sys.path if "tests" in path)]
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"ready\n"
            try:
                process.wait(0.2 + chance.random())
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= size
    with engine(model, kv_cache_memory=kv_cache_memory) as llm:
        expected, _ = run(llm, prompts)
    with engine(model, kv_cache_memory=kv_cache_memory, kv_folder=str(tmp_path), kv_folder_size=size) as llm:
        assert run(llm, prompts)[0] == expected
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= size
    assert not list(tmp_path.glob("*/*.partial"))


def test_settings_that_contradict_each_other(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    model = reference_named("mixtral").folder
    for settings, word in (
        (dict(kv_folder=str(tmp_path), kv_host_memory="1MiB"), "exclude each other"),
        (dict(kv_file=str(tmp_path)), "kv_host_memory"),
        (dict(kv_host_memory="1MiB", enable_prefix_caching=False), "enable_prefix_caching"),
        (dict(kv_host_memory="1MiB", kv_file=str(tmp_path / "missing")), "missing"),
        (dict(kv_host_memory="many"), "many"),
    ):
        with pytest.raises(SettingsError, match=word), engine(model, **settings):
            pass
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    with pytest.raises(SettingsError, match="nobody else may write there"), engine(model, kv_folder=str(shared)):
        pass
