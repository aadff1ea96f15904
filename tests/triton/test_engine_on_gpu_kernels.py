"""The engine on the kernels for GPUs, which run in Triton's interpreter: tokens are transformers', in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_models import Reference
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.ops.gpu import GpuAttention, GpuLatentAttention, GpuPairs, GpuProduct
from moeserve.worker.cuda_graphs import CudaGraphs

FAMILIES = ["mixtral-window", "deepseek-v3", "qwen2-moe", "gpt-oss"]
MORE_FAMILIES = ["mixtral", "deepseek-v2", "qwen3-moe", "olmoe"]
LENGTHS = [1, 19, 6]
NUM_TOKENS = [5, 3, 4]


def started(reference: Reference, **settings: Any) -> LLM:
    options: dict[str, Any] = dict(dtype="float32", num_threads=1, max_model_len=64, max_num_batched_tokens=24)
    return LLM(reference.folder, enforce_eager=True, kv_cache_memory="4MiB", show_progress=False, **options, **settings)


def model_of(llm: LLM) -> Any:
    return llm.core.executor.worker.runner.model  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.soak) for name in MORE_FAMILIES)])
def test_tokens_are_those_of_transformers(
    name: str, gpu_kernels: None, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in NUM_TOKENS]
    with started(reference) as llm:
        model = model_of(llm)
        attention = model.layers[0].attention.backend
        assert isinstance(attention, (GpuAttention, GpuLatentAttention))
        moe = next(iter(model.moe_layers.values()))
        assert isinstance(moe.experts.gate_up.product, GpuProduct)
        assert isinstance(moe.dispatcher.pairs, GpuPairs)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference.greedy(prompt, number) for prompt, number in zip(prompts, NUM_TOKENS, strict=True)
    ]


def test_random_tokens_are_those_of_the_other_kernels(
    reference_named: Callable[[str], Reference], request: pytest.FixtureRequest
) -> None:
    """Seeded: (seed, position) decides, whatever draws."""
    reference = reference_named("mixtral")
    prompts = reference.prompts(*LENGTHS)
    params = [
        SamplingParams(temperature=1.0, max_tokens=4, seed=1, ignore_eos=True),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, max_tokens=4, seed=2, ignore_eos=True),
        SamplingParams(temperature=0.7, min_p=0.05, max_tokens=4, seed=3, ignore_eos=True),
    ]

    def drawn() -> list[list[int]]:
        with started(reference) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = drawn()
    request.getfixturevalue("gpu_kernels")
    assert drawn() == expected


class Replayed:
    """A graph without a GPU: plays by calling the function again, and writes where the result lies."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_plays = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run().clone()
        self.sizes.append(len(result))

        def play() -> None:
            self.num_plays += 1
            result.copy_(run())

        return play, result


@pytest.mark.parametrize("name", ["mixtral-window", "deepseek-v3", "gpt-oss"])
def test_graphs_of_these_kernels_give_the_same_tokens(
    name: str, gpu_kernels: None, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in NUM_TOKENS]
    with started(reference) as llm:
        worker = llm.core.executor.worker  # type: ignore[attr-defined]
        capture = Replayed()
        with torch.inference_mode():
            graphs = CudaGraphs(worker.runner.model, worker.runner.caches, worker.groups.mesh, 0, 4, (2, 4), capture)
        worker.graphs = worker.runner.forward = graphs
        outputs = llm.generate(prompts, params, use_tqdm=False)
        window = llm.expert_load()
    assert capture.sizes == [4, 2], "the largest first, so that the others fit into its memory"
    assert capture.num_plays > 0
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference.greedy(prompt, number) for prompt, number in zip(prompts, NUM_TOKENS, strict=True)
    ]
    computed = [
        prompt + reference.greedy(prompt, number)[:-1] for prompt, number in zip(prompts, NUM_TOKENS, strict=True)
    ]
    assert [list(counts) for counts in window.tokens_of_expert] == reference.expert_counts(computed)
    assert window.num_padding_tokens > 0
