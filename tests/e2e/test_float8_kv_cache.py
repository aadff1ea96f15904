"""A KV cache of 8-bit floats: the same bytes in any batch, chunking, layout and cache, and other ones than without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reference_models import Reference
from test_same_bytes import PARAMS, Results, generate, make_prompts

from moeserve import LLM, SettingsError

FLOAT8 = {"kv_cache_dtype": "fp8"}


@pytest.mark.slow_but("mixtral-bfloat16", "gpt-oss-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_batches_orders_chunks_and_threads(name: str, dtype: str, reference_named: Callable[[str], Reference]) -> None:
    reference, prompts = reference_named(name), make_prompts()
    expected = generate(reference, prompts, alone=True, enable_prefix_caching=False, dtype=dtype, **FLOAT8)
    assert generate(reference, prompts, dtype=dtype) != expected, "the setting has no effect"

    assert generate(reference, prompts, dtype=dtype, **FLOAT8) == expected
    for num_tokens, num_threads, block_size in ((5, 1, 16), (37, 2, 4)):
        options = dict(
            max_num_batched_tokens=num_tokens, max_num_seqs=4, num_threads=num_threads, block_size=block_size
        )
        assert generate(reference, prompts, dtype=dtype, **options, **FLOAT8) == expected, options


def test_float16_runs_without_its_own_kernels(reference_named: Callable[[str], Reference]) -> None:
    reference, prompts = reference_named("mixtral"), make_prompts(4)
    tokens, chosen = (
        [tokens for tokens, *_ in generate(reference, prompts, dtype="float16", kv_cache_dtype=name)]
        for name in ("fp8", "fp8_e4m3")
    )
    assert tokens == chosen


def test_preempted_requests_and_cached_prefixes(reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named("mixtral")
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
    alone = generate(reference, make_prompts(), alone=True, enable_prefix_caching=False, **FLOAT8)
    block_bytes = cache_bytes_per_block(reference)
    with_few_blocks = LLM(
        reference.folder, max_model_len=128, kv_cache_memory=10 * block_bytes, num_threads=1, **FLOAT8
    )
    try:
        results = with_few_blocks.generate(prompts, PARAMS) + with_few_blocks.generate(prompts[-2:], PARAMS)
        (stats,) = with_few_blocks.core.replica_stats
    finally:
        with_few_blocks.shutdown()
    found: Results = [(r.outputs[0].token_ids, r.outputs[0].logprobs, r.prompt_logprobs) for r in results]
    assert found == alone + alone[-2:]
    assert stats.num_preemptions > 0


def cache_bytes_per_block(reference: Reference) -> int:
    """Return the size of a block, whose 16 tokens have 8 bits for each number and 16 for each scale."""
    config = reference.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(16 * config.num_hidden_layers * config.num_key_value_heads * 2 * (size + 2))


def test_the_size_of_a_block(reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named("mixtral")
    block_bytes = cache_bytes_per_block(reference)
    llm = LLM(reference.folder, max_model_len=64, kv_cache_memory=10 * block_bytes - 1, num_threads=1, **FLOAT8)
    try:
        assert llm.core.num_blocks == 9
        tensors = [
            tensor
            for cache in llm.core.replicas[0].executor.worker.runner.step_runner.caches
            for tensor in cache.tensors
        ]
        assert sum(tensor[0].nbytes for tensor in tensors) == block_bytes
    finally:
        llm.shutdown()


@pytest.mark.slow_but("bfloat16-tp 4 dp 2", "float32-pp 2")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [dict(tensor_parallel_size=2), dict(tensor_parallel_size=4, data_parallel_size=2), dict(pipeline_parallel_size=2)],
    ids=["tp 2", "tp 4 dp 2", "pp 2"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(layout: dict[str, Any], dtype: str, reference_named: Callable[[str], Reference]) -> None:
    reference, prompts = reference_named("qwen3-moe-eight-heads"), make_prompts(6)
    expected = generate(reference, prompts, alone=True, dtype=dtype, **FLOAT8)
    options = dict(kv_cache_memory="8MiB", executor="mp", dtype=dtype)
    assert generate(reference, prompts, **options, **layout, **FLOAT8) == expected


def test_latent_attention_is_refused(reference_named: Callable[[str], Reference]) -> None:
    with pytest.raises(SettingsError, match="kv_cache_dtype='fp8' does not support models with latent attention"):
        LLM(reference_named("deepseek-v3").folder, **FLOAT8)
