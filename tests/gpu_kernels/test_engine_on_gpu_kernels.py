"""The engine on Triton kernels in Triton's interpreter: float32 tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attention_stand_ins
import mxfp4_checkpoints
import pytest
import torch
from build_contexts import cpu_context
from float8_checkpoints import write
from gpu_stand_ins import captured
from model_parts import networks_of
from reference_models import Reference, make_reference
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.kv.layer_cache import Places
from moeserve.layers.chunked_sums import InputShare
from moeserve.layers.grouped_query.attention import Attention
from moeserve.layers.linear_attention.attention import LinearAttention
from moeserve.layers.moe.dispatch.base import PackedTokens, SlottedTokens
from moeserve.layers.moe.experts import Experts
from moeserve.layers.weights import allocate_weights
from moeserve.ops.attention import flashinfer as flashinfer_attention
from moeserve.ops.attention.flashinfer import FlashInferAttention
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.attention.triton import TritonAttention
from moeserve.ops.latent_attention.flashinfer import FlashInferLatentAttention
from moeserve.ops.pairs import triton as triton_pairs
from moeserve.ops.pairs.triton import TritonPairs
from moeserve.ops.products.interface import RowGroups
from moeserve.ops.products.triton import TritonGroupedProduct
from moeserve.ops.rows.activations import SwiGLU
from moeserve.ops.select import select_backend
from moeserve.triton_kernels import grouped_matmul
from moeserve.triton_kernels.tuning import Config, Problem, config_by_rule
from moeserve.worker import loading
from moeserve.worker.cuda_graphs import CudaGraphs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.profiling import run_all_sizes
from moeserve.worker.step_runner import StepOutputs

# Families, and if their decode steps are replayed from graphs. The others run in `make soak` only.
FAMILIES = [
    ("mixtral-window", False),
    ("deepseek-v32", True),
    ("qwen2-moe", False),
    ("gpt-oss", True),
    ("qwen3-next", True),
]
MORE_FAMILIES = [(name, False) for name in ("mixtral", "deepseek-v2", "deepseek-v3", "qwen3-moe", "olmoe")]
MORE_FAMILIES.append(("deepseek-v4", True))
MORE_FAMILIES += [("nemotron-h-latent", False), ("mistral-large4", False)]
LENGTHS = [1, 19, 6]
NUM_TOKENS = [5, 3, 4]


def started(reference: Reference, **settings: Any) -> LLM:
    options: dict[str, Any] = dict(dtype="float32", num_threads=1, max_model_len=64, max_num_batched_tokens=24)
    return LLM(reference.folder, enforce_eager=True, kv_cache_memory="4MiB", show_progress=False, **options, **settings)


def model_of(llm: LLM) -> Any:
    return llm.core.replicas[0].executor.worker.runner.model  # type: ignore[attr-defined]


def assert_greedy_tokens(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(*LENGTHS)
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in NUM_TOKENS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference.greedy(prompt, number) for prompt, number in zip(prompts, NUM_TOKENS, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernels")
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Tokens equal those of transformers with the dequantised weights."""
    original = make_reference(tmp_path / "original", mxfp4_checkpoints.SHAPE)
    encoded, decoded, quantization = mxfp4_checkpoints.encoded_and_decoded(original)
    write(tmp_path / "encoded", original, encoded, quantization)
    write(tmp_path / "decoded", original, decoded, None)
    model = type(original.model).from_pretrained(tmp_path / "decoded", dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    twin = Reference(tmp_path / "encoded", model.eval())
    with started(twin, quantization="mxfp4") as llm:
        assert all(moe.experts.down.open.is_mxfp4 for _, moe in networks_of(model_of(llm)))
        assert_greedy_tokens(llm, twin)


class Replayed:
    """Captures graphs without a GPU, and counts their replays."""

    def __init__(self, llm: LLM) -> None:
        """Capture the steps of an engine."""
        self.sizes: list[int] = []
        self.num_replays = 0
        runner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]
        with torch.inference_mode():
            runner.step_runner = CudaGraphs(runner.model, runner.step_runner.caches, runner.context, (2, 4), self)

    def __call__(self, run: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
        replay, outputs = captured(run)
        self.sizes.append(len(outputs.hidden_TD))

        def counted_replay() -> None:
            self.num_replays += 1
            replay()

        return counted_replay, outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_captured"),
    [*FAMILIES, *(pytest.param(*family, marks=pytest.mark.soak) for family in MORE_FAMILIES)],
)
def test_tokens_equal_transformers(
    name: str, is_captured: bool, gpu_kernels: None, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    with started(reference) as llm:
        model = model_of(llm)
        mixers = [network for layer in networks_of(model) for network in layer if hasattr(network, "output")]
        for mixer in mixers:
            kernel = mixer.attend if isinstance(mixer, LinearAttention) else mixer.backend
            assert type(kernel).__module__.endswith(".triton")
        moe = next(iter(model.moe_layers.values()))
        assert isinstance(moe.experts.gate_up.product, TritonGroupedProduct)
        assert isinstance(moe.dispatcher.pairs, TritonPairs)
        capture = Replayed(llm) if is_captured else None
        assert_greedy_tokens(llm, reference)
        window = llm.expert_load()
    if capture is None:
        return
    assert capture.sizes == [4, 2], "the largest is captured first, so that the others fit into its memory"
    assert capture.num_replays > 0
    computed = [
        prompt + reference.greedy(prompt, number)[:-1]
        for prompt, number in zip(reference.prompts(*LENGTHS), NUM_TOKENS, strict=True)
    ]
    assert [list(counts) for counts in window.tokens_of_expert] == reference.expert_counts(computed)
    assert window.num_padding_tokens > 0


@pytest.mark.slow
def test_random_tokens_do_not_depend_on_the_kernels(
    reference_named: Callable[[str], Reference], request: pytest.FixtureRequest
) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_a_cache_of_8_bit_floats_has_the_tokens_of_the_cpu(
    name: str, reference_named: Callable[[str], Reference], request: pytest.FixtureRequest
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generated() -> list[list[int]]:
        with started(reference, kv_cache_dtype="fp8") as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = generated()
    request.getfixturevalue("gpu_kernels")
    request.getfixturevalue("torch_conversions")
    assert generated() == expected


@pytest.fixture
def flashinfer(gpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> attention_stand_ins.FlashInfer:
    """Install a stand-in for FlashInfer that supports float32 and any size, and select it."""
    package = attention_stand_ins.FlashInfer(
        dtypes=(torch.float32,), chunk_head_sizes=tuple(range(1, 65)), head_multiple=1
    )
    attention_stand_ins.install(monkeypatch, package)
    for name, value in (
        ("DTYPES", package.dtypes),
        ("CHUNK_HEAD_SIZES", package.chunk_head_sizes),
        ("DECODE_HEAD_MULTIPLE", package.head_multiple),
    ):
        monkeypatch.setattr(flashinfer_attention, name, value)
    made = Attention.make_cache

    def make_cache(self: Attention, places: Places) -> KeyValueCache:
        """Fill new caches with NaN: nothing may depend on uninitialised memory."""
        cache = made(self, places)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        return cache

    monkeypatch.setattr(Attention, "make_cache", make_cache)
    monkeypatch.setattr(
        loading, "select_backend", lambda device, dtype, _, size: select_backend(device, dtype, "flashinfer", size)
    )
    return package


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_captured"), [("mixtral-window", True), ("gpt-oss", False)])
def test_tokens_with_another_library_equal_transformers(
    name: str,
    is_captured: bool,
    flashinfer: attention_stand_ins.FlashInfer,
    reference_named: Callable[[str], Reference],
) -> None:
    """Chunks with sinks are served by our own kernels, all other steps by the library."""
    reference = reference_named(name)
    with started(reference) as llm:
        attention = networks_of(model_of(llm))[0][0].backend
        assert isinstance(attention, FlashInferAttention)
        assert isinstance(attention.own, TritonAttention)
        if is_captured:
            Replayed(llm)
        flashinfer.num_decodes = flashinfer.num_runs = 0
        assert_greedy_tokens(llm, reference)
    assert flashinfer.num_decodes > 0
    assert (flashinfer.num_runs > 0) == (name != "gpt-oss")


def test_latent_attention_may_use_another_library(
    flashinfer: attention_stand_ins.FlashInfer, reference_named: Callable[[str], Reference]
) -> None:
    with started(reference_named("deepseek-v3")) as llm:
        assert isinstance(networks_of(model_of(llm))[0][0].backend, FlashInferLatentAttention)


def test_expected_rows_determine_the_tiles_of_experts(gpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity of buffers must not determine the tiles."""
    chosen: list[int] = []

    def choose(problem: Problem, device_name: str) -> Config:
        chosen.append(problem.num_rows)
        return config_by_rule(problem)

    monkeypatch.setattr(grouped_matmul, "choose_config", choose)
    monkeypatch.setattr(grouped_matmul, "plan_launch", grouped_matmul.plan_launch.__wrapped__)  # without its cache
    experts = Experts(2, 16, InputShare(slice(0, 8), None), SwiGLU(), cpu_context(), has_bias=False)
    allocate_weights(experts)
    for weight in experts.parameters():
        weight.normal_()
    rows, counts_e = torch.randn(40, 16), torch.tensor([1, 2])
    experts(PackedTokens(rows, RowGroups(counts_e, has_spare_rows=True, expected_rows=4)))
    experts(SlottedTokens(rows.view(2, 20, 16), RowGroups(counts_e, expected_rows=5)))
    experts(PackedTokens(rows, RowGroups(torch.tensor([20, 20]))))
    assert chosen == [4, 4, 5, 5, 40, 40]


@pytest.mark.slow
def test_steps_of_all_sizes_run_before_serving(
    gpu_kernels: None, reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel must be compiled while requests wait."""
    with started(reference_named("mixtral")) as llm:
        runner: ModelRunner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]
        sizes: set[int] = set()

        def sum_up(output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
            sizes.add(len(weights_TK))
            return original(output_RD, pair_of_row_R, weights_TK, dtype)

        original = triton_pairs.weighted_sum
        monkeypatch.setattr(triton_pairs, "weighted_sum", sum_up)
        with torch.inference_mode():
            for cache in cast(Any, runner.step_runner).caches:
                cache.clear()
            run_all_sizes(runner, llm.core.config)
    assert sizes == {1, 2, 4, 8, 16, 24}
