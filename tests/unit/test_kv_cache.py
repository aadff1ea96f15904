"""The number of KV cache blocks of a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import CheckpointFacts, MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.errors import CacheTooSmallError
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.kv.rank.cache import RankMemory, count_blocks, free_bytes
from moeserve.kv.rules import CacheRules, KeepAll, KeepWindow
from moeserve.worker.profiling import largest_step

BYTES_PER_TOKEN = 100
NEEDS = CacheNeeds(CacheRules(), (10 * BYTES_PER_TOKEN,), 0, 10)


def config(**options: object) -> EngineConfig:
    facts = CheckpointFacts(
        path="x",
        dtype="float32",
        vocab_size=10,
        max_position_embeddings=1000,
        tensor_parallel_sizes=(1,),
        num_layers=2,
        num_sparse_layers=2,
        num_experts=5,
    )
    return resolve(parse_settings({"block_size": 10, **options}), facts, MachineFacts(has_cuda=True, num_cores=1))


def not_called() -> RankMemory:
    raise AssertionError("the profiling run was not needed")


def test_a_given_size_is_divided_into_blocks() -> None:
    assert count_blocks(config(kv_cache_memory=52_999, max_model_len=80), NEEDS, 0, not_called) == 52


def test_layers_with_windows_have_blocks_for_all_running_requests_at_most() -> None:
    """The number of blocks is the largest that fits, whether or not windows need fewer."""
    options = dict(max_num_seqs=3, max_num_batched_tokens=20, max_model_len=200)
    # A window of 30 tokens lies in 3 whole blocks or in 4, and another block may begin; two steps are in flight.
    most_in_windows = 3 * (3 + 2) + 2 * 20 // 10
    for bytes_per_token, window_bytes in ((60, 40), (0, 40), (60, 0)):
        rules = CacheRules((KeepAll(), KeepWindow(30, 10)))
        needs = CacheNeeds(rules, (10 * bytes_per_token, 10 * window_bytes), 0, 10)
        for memory in range(20_000, 50_000, 333):

            def fits(
                num_blocks: int, memory: int = memory, sizes: tuple[int, int] = (bytes_per_token, window_bytes)
            ) -> bool:
                return 10 * (num_blocks * sizes[0] + min(num_blocks, most_in_windows) * sizes[1]) <= memory

            largest = max(num_blocks for num_blocks in range(3 * 20 + 1) if fits(num_blocks))
            assert count_blocks(config(kv_cache_memory=memory, **options), needs, 0, not_called) == largest


def test_at_most_the_blocks_that_all_requests_can_use() -> None:
    options = {"kv_cache_memory": "1GB", "max_model_len": 95, "max_num_seqs": 3}
    assert count_blocks(config(**options), NEEDS, 0, not_called) == 3 * 10


@pytest.mark.parametrize(("max_model_len", "needed"), [({"max_model_len": 100}, 10_000), ({}, 2_000)])
def test_a_cache_too_small_for_one_request_is_refused(max_model_len: dict[str, int], needed: int) -> None:
    """Without a given length, two blocks are needed."""

    def count(memory: int) -> int:
        return count_blocks(config(kv_cache_memory=memory, **max_model_len), NEEDS, 0, not_called)

    assert count(needed) == needed // 1000
    with pytest.raises(CacheTooSmallError, match=f"{needed} bytes"):
        count(needed - 1)


def test_the_cache_takes_half_of_the_memory_beside_the_largest_step() -> None:
    memory = RankMemory(step=100 * 2**20, free=1000 * 2**20)
    num_blocks = count_blocks(config(max_num_seqs=10_000), NEEDS, 0, lambda: memory)
    assert num_blocks == 450 * 2**20 // (10 * BYTES_PER_TOKEN)


def test_ranks_share_the_memory() -> None:
    """Other processes change what is free meanwhile, but not to half or to twice of it."""
    alone, with_others = (free_bytes(config(data_parallel_size=num_ranks)) for num_ranks in (1, 8))
    assert alone / 2 < 8 * with_others < 2 * alone


def test_ranks_on_other_hosts_take_no_memory_of_this_one() -> None:
    two_of_eight = config(data_parallel_size=8).changed(parallel={"num_ranks_on_host": 2})
    alone = free_bytes(config(data_parallel_size=1))
    assert alone / 2 < 2 * free_bytes(two_of_eight) < 2 * alone


MEASURE = """
import torch
from moeserve.kv.rank.cache import measure_step_memory

held = torch.ones(30 * 2**20 // 4)

def step():
    torch.ones(60 * 2**20 // 4)
    torch.ones(20 * 2**20 // 4)

print(measure_step_memory(step, "cpu"))
"""


def test_step_memory_is_the_peak_above_the_held_memory() -> None:
    """This needs a new process, because freed memory of earlier tests would be used again."""
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=100)
    assert int(run.stdout) == pytest.approx(60 * 2**20, rel=0.2)


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "max_len"), [(2048, 64, 1000), (7, 64, 100), (50, 3, 10), (5, 5, 5)]
)
def test_the_largest_step_is_as_large_as_the_limits_allow(max_tokens: int, max_seqs: int, max_len: int) -> None:
    chunks = largest_step(
        config(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, max_model_len=max_len, block_size=4)
    )
    lengths = [len(chunk.token_ids) for chunk in chunks]
    assert sum(lengths) == min(max_tokens, max_seqs * max_len)
    assert len(lengths) == min(max_seqs, max_tokens)
    assert max(lengths) <= max_len
    assert len({chunk.slot for chunk in chunks}) == len(chunks)
    assert chunks[0].end == max_len
    assert all(chunk.samples for chunk in chunks)


@pytest.mark.parametrize(("most", "num_tokens", "num_chunks"), [(1, 1, 1), (4, 4, 4), (16, 16, 5), (64, 50, 5)])
def test_a_smaller_step_has_the_given_tokens(most: int, num_tokens: int, num_chunks: int) -> None:
    chunks = largest_step(config(max_num_batched_tokens=50, max_num_seqs=5, max_model_len=20, block_size=4), most)
    assert (sum(len(chunk.token_ids) for chunk in chunks), len(chunks)) == (num_tokens, num_chunks)


def test_memory_cached_by_torch_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the largest step torch still caches its memory, which must not be subtracted twice."""
    cached = [0]

    def run_largest_step() -> None:
        cached[0] = 10 * 2**30

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 30 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30 * 2**30 + cached[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cached.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 2**30 - cached[0], 80 * 2**30))
    on_gpu = config(device="cuda", dtype="bfloat16", max_num_seqs=1_000_000, gpu_memory_utilization=0.75)
    memory = RankMemory.measured(on_gpu, run_largest_step)
    assert memory == RankMemory(step=10 * 2**30, free=50 * 2**30, own_gpu=30 * 2**30)
    num_blocks = count_blocks(on_gpu, NEEDS, 0, lambda: memory)
    assert num_blocks == (60 - 30 - 10) * 2**30 // (10 * BYTES_PER_TOKEN)


@pytest.mark.parametrize(
    ("own", "free", "gigabytes"),
    [
        (20, 50, 20 - 3 - 1),  # of its share, less the largest step and what is reserved
        (52, 40, 40 - 3 - 1),  # another process takes more than the rest
        (0, 60, 0),
    ],
)
def test_a_rank_takes_a_share_of_its_gpu(own: int, free: int, gigabytes: int) -> None:
    memory = RankMemory(step=3 * 2**30, free=free * 2**30, own_gpu=own * 2**30)
    on_gpu = config(device="cuda", dtype="bfloat16", max_num_seqs=1_000_000)
    if gigabytes:
        num_blocks = count_blocks(on_gpu, NEEDS, 2**30, lambda: memory)
        assert num_blocks == gigabytes * 2**30 // (10 * BYTES_PER_TOKEN)
    else:
        with pytest.raises(CacheTooSmallError, match="gpu_memory_utilization"):
            count_blocks(on_gpu, NEEDS, 2**30, lambda: memory)


@pytest.mark.parametrize(("device", "logprobs"), [("cpu", None), ("cuda", 1)])
def test_the_largest_step_has_logprobs_on_a_gpu(device: str, logprobs: int | None) -> None:
    chunks = largest_step(config(device=device, dtype="bfloat16", max_num_seqs=3))
    assert {chunk.request.params.logprobs for chunk in chunks} == {logprobs}
