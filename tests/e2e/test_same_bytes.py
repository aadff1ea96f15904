"""A request's tokens and log-probabilities have the same bytes in any batch, order, chunking and layout with tp = 1.

They also do not depend on the prefix cache, the number of threads, or the number of ranks that hold the experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference
from small_steps import MIDDLE, PlantedBorder, bytes_of_tokens

from moeserve import LLM, SamplingParams

FAMILIES = (
    "mixtral", "mixtral-window", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v4", "glm4-moe", "gpt-oss",
    "beam", "cohere2-moe", "flex-olmo", "jamba", "kolibri1", "laguna", "minimax-m3", "olmoe", "qwen2-moe", "qwen3-moe",
    "axk2",
    "dots3-note",
    "hy-v4",
    "minimax",
    "jetmoe", "zaya",
    "glm5-next",
    "inkling",
    "inkling2",
    "qwen4-exp",
    "muse-spark",
)  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=2)
Results = list[tuple[Any, ...]]  # tokens and log-probabilities of each request


def make_prompts(num_prompts: int = 9) -> list[list[int]]:
    """Return prompts of 1 to 90 tokens, some with a common prefix."""
    source = random.Random(18)
    beginning = [source.randrange(90) for _ in range(40)]
    lengths = [1, 2, 7, 16, 17, 33, 50, 64, 90][:num_prompts]
    return [
        (beginning * (index % 2) + [source.randrange(90) for _ in range(length)])[-90:]
        for index, length in enumerate(lengths)
    ]


def generate(reference: Reference, prompts: list[list[int]], *, alone: bool = False, **options: Any) -> Results:
    options = {"num_threads": 1, "max_model_len": 128} | options
    llm = LLM(model=str(reference.folder), **options)
    try:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        batches = [[one] for one in inputs] if alone else [inputs]
        results = [result for batch in batches for result in llm.generate(batch, PARAMS)]
    finally:
        llm.shutdown()
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs, r.prompt_logprobs) for r in results]


@pytest.mark.slow_but("mixtral-bfloat16", "deepseek-v4-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_orders_chunks_and_threads(name: str, dtype: str, reference_named: Callable[[str], Reference]) -> None:
    reference, prompts = reference_named(name), make_prompts()
    expected = generate(reference, prompts, alone=True, enable_prefix_caching=False, dtype=dtype)

    assert generate(reference, prompts, dtype=dtype) == expected
    assert generate(reference, prompts[::-1], dtype=dtype)[::-1] == expected
    for num_tokens, num_threads in ((5, 1), (37, 2), (16, 3)):
        options = dict(max_num_batched_tokens=num_tokens, max_num_seqs=4, num_threads=num_threads)
        assert generate(reference, prompts, dtype=dtype, **options) == expected, options
    assert generate(reference, prompts, alone=True, dtype=dtype, block_size=4, num_threads=2) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(quantization: str, reference_named: Callable[[str], Reference]) -> None:
    reference, prompts = reference_named("deepseek-v3"), make_prompts()
    expected = generate(reference, prompts, alone=True, enable_prefix_caching=False, quantization=quantization)
    assert generate(reference, prompts, quantization=quantization) == expected
    options: dict[str, Any] = dict(max_num_batched_tokens=23, max_num_seqs=5, num_threads=2)
    assert generate(reference, prompts, quantization=quantization, **options) == expected


@pytest.mark.slow_but("mixtral-wide-4-bfloat16", "gpt-oss")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "tp", "dtype", "quantization"),
    [
        ("mixtral-wide", 2, "bfloat16", None),
        ("mixtral-wide", 4, "float32", None),
        ("mixtral-wide", 4, "bfloat16", "int4"),
        ("qwen3-moe-wide", 2, "bfloat16", "int8"),
        ("qwen3-moe-wide", 2, "float32", None),
        ("gpt-oss-wide", 2, "bfloat16", None),
    ],
)
def test_sliced_experts(
    name: str, tp: int, dtype: str, quantization: str | None, reference_named: Callable[[str], Reference]
) -> None:
    """Slices of experts give the bytes of whole experts on one rank and on several, in prompts and captured steps."""
    reference, prompts = reference_named(name), make_prompts(6)
    numbers = dict(dtype=dtype, quantization=quantization)
    expected = generate(reference, prompts, alone=True, **numbers)
    layout = dict(tensor_parallel_size=tp, kv_cache_memory="8MiB", executor="mp", max_num_batched_tokens=70)
    for is_whole in (True, False):
        assert generate(reference, prompts, expert_parallel=is_whole, **layout, **numbers) == expected


@pytest.mark.slow_but(
    "gpt-oss-3-all_to_all-0-bfloat16", "deepseek-v3-2-allgather-None-float32", "mixtral-3-shared_memory"
)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "data_parallel_size", "dispatcher", "max_small_tokens", "dtype"),
    [("mixtral", 2, "all_to_all", MIDDLE, "float32"), ("mixtral", 4, "allgather", MIDDLE, "bfloat16"),
     ("deepseek-v3", 2, "allgather", None, "float32"), ("gpt-oss", 3, "all_to_all", 0, "bfloat16"),
     ("deepseek-v3", 2, "shared_memory", 0, "bfloat16"), ("mixtral", 3, "shared_memory", MIDDLE, "float32"),
     pytest.param("mixtral", 2, "all_to_all", MIDDLE, "bfloat16", marks=pytest.mark.soak),
     pytest.param("mixtral", 4, "allgather", MIDDLE, "float32", marks=pytest.mark.soak),
     pytest.param("deepseek-v3", 2, "allgather", None, "bfloat16", marks=pytest.mark.soak),
     pytest.param("gpt-oss", 3, "all_to_all", 0, "float32", marks=pytest.mark.soak)],
)  # fmt: skip
def test_layouts(
    name: str,
    data_parallel_size: int,
    dispatcher: str,
    max_small_tokens: int | None,
    dtype: str,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cases: prompts in large steps and decoding in small ones, replayed; all steps small; all large."""
    reference, prompts = reference_named(name), make_prompts(6)
    expected = generate(reference, prompts, dtype=dtype)
    max_small_bytes = None if max_small_tokens is None else bytes_of_tokens(reference.folder, max_small_tokens, dtype)
    planted = PlantedBorder(tmp_path, max_small_bytes)
    for name, value in planted.environment.items():
        monkeypatch.setenv(name, value)
    options = dict(data_parallel_size=data_parallel_size, dispatcher=dispatcher, kv_cache_memory="8MiB", executor="mp")
    assert generate(reference, prompts, dtype=dtype, **options) == expected
    assert planted.ways() == {None: {True}, MIDDLE: {False, True}, 0: {False}}[max_small_tokens]
