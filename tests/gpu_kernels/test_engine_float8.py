"""The engine with quantization='fp8' on Triton kernels, in Triton's interpreter.

The reference is transformers' model with dequantised weights, which rounds the inputs of each projection and expert to
E4M3 with a scale for each 128 values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import make_chunk
from float8_checkpoints import encoded_and_decoded, large, write
from model_parts import networks_of
from reference_models import Reference, make_reference
from torch import Tensor
from torch.nn import functional

from moeserve import LLM, SamplingParams
from moeserve.config import resolve, resolve_weights
from moeserve.config.devices import DEVICES
from moeserve.models.checkpoint.packing import weights_of
from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups
from moeserve.ops.products.triton import TritonProduct
from moeserve.ops.products.triton_blocks import TritonBlockGroupedProduct, TritonBlockProduct
from moeserve.ops.rows.activations import SquaredReLU, SwiGLU, num_parts_of

pytestmark = pytest.mark.usefixtures("torch_conversions", "gpu_kernels")

FLOAT8 = torch.float8_e4m3fn
LENGTHS = [1, 5, 3, 4, 2, 6, 4, 3]
NUM_TOKENS = 2
# Float32 logits differ by less. But a number next to the border between two codes may be rounded to the other code,
# which differs by 1/8 and affects the rest of the prompt. Which numbers those are depends on the processor's order of
# sums. A wrong product or scale affects all positions.
LARGEST_DIFFERENCE = 1e-3
SHARE_OF_POSITIONS = 0.5
# Smallest difference of any position if the inputs of products are not rounded.
DIFFERENCE_OF_ROUNDING = 0.05


def rounded(rows: Tensor) -> Tensor:
    """Return dequantised rows, as defined: 448 stands for the largest absolute number of each 128."""
    blocks = []
    for block in rows.float().split(128, dim=-1):
        largest = block.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        blocks.append((block * (448 / largest)).to(FLOAT8).float() * (largest / 448))
    return torch.cat(blocks, dim=-1)


@contextmanager
def rounding_of_inputs(reference: Reference) -> Iterator[set[str]]:
    """Round the inputs of the reference's products; yield the names of their weights."""
    name_of = {
        weight.untyped_storage().data_ptr(): name
        for name, weight in reference.model.named_parameters()
        if re.search(r"(_proj|kv_a_proj_with_mqa|wq_b|wk)(\.weight)?$", name)
        and not re.search("kv_b_proj|weights_proj", name)
    }
    linear, done = functional.linear, set[str]()

    def rounding(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = name_of.get(weight.untyped_storage().data_ptr())
        if name is not None:
            done.add(name)
            rows = rounded(rows)
        return linear(rows, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", rounding)
        yield done
    assert done == set(name_of.values())


@pytest.fixture(autouse=True)
def _allow_fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept quantization="fp8" on the CPU, which replaces a GPU here, also for checkpoints stored so."""
    cpu = dataclasses.replace(DEVICES["cpu"], quantizations=DEVICES["cuda"].quantizations)
    monkeypatch.setitem(DEVICES, "cpu", cpu)
    monkeypatch.setattr(resolve, "check_device", lambda *arguments: None)
    monkeypatch.setattr(resolve_weights, "_own_quantization", lambda name, *others: name)


def logits_of(llm: LLM, prompts: list[list[int]]) -> list[Tensor]:
    """Return the logits [T, vocab_size] of each prompt, computed in one step."""
    runner = llm.core.replicas[0].executor.worker.runner  # type: ignore[attr-defined]
    assert max(map(len, prompts)) <= runner.model.context.block_size
    chunks = [make_chunk(runner.table, block, prompt, 0, [block]) for block, prompt in enumerate(prompts)]
    with torch.inference_mode():
        step = runner.build_inputs(chunks, (sum(map(len, prompts)),))
        hidden = runner.model(step, runner.step_runner.caches)
        return list(runner.model.logits(hidden).split([len(prompt) for prompt in prompts]))


def differences(own: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the largest difference at each position, [T] for each prompt."""
    return [(one - other).abs().amax(-1) for one, other in zip(own, others, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v32", "mixtral"])
def test_logits_equal_those_with_rounded_weights_and_inputs(name: str, tmp_path: Path) -> None:
    original = make_reference(tmp_path / "original", large(name))
    encoded, decoded, quantization = encoded_and_decoded(original, (128, 128))
    write(tmp_path / "encoded", original, encoded, quantization)
    write(tmp_path / "twin", original, decoded, None)
    model = type(original.model).from_pretrained(tmp_path / "twin", dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    twin = Reference(tmp_path / "twin", model.eval())
    prompts = twin.prompts(*LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options: dict[str, Any] = dict(dtype="float32", num_threads=1, max_model_len=64, max_num_batched_tokens=28)
    with LLM(
        tmp_path / "encoded",
        quantization="fp8",
        enforce_eager=True,
        kv_cache_memory="4MiB",
        show_progress=False,
        **options,
    ) as llm:
        held = weights_of(llm.core.replicas[0].executor.worker.runner.model)  # type: ignore[attr-defined]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        own = logits_of(llm, prompts)
    in_blocks = [weights for weights in held.values() if weights.scales is not None]
    assert all(isinstance(weights.product, TritonBlockProduct | TritonBlockGroupedProduct) for weights in in_blocks)
    stored = [name for name in encoded if f"{name}_scale_inv" in encoded and "kv_b_proj" not in name]
    assert sum(weights.open.weight_eOI.nbytes for weights in in_blocks) == sum(encoded[name].numel() for name in stored)

    with rounding_of_inputs(twin):
        off = differences(own, [twin.logits(prompt) for prompt in prompts])
        likeliest = [
            twin.logits(prompt + output.outputs[0].token_ids[:-1])[len(prompt) - 1 :].argmax(-1)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
    assert (torch.cat(off) < LARGEST_DIFFERENCE).float().mean() >= SHARE_OF_POSITIONS, off
    assert (tokens == torch.stack(likeliest)).float().mean() >= SHARE_OF_POSITIONS
    exact = Reference(twin.folder, twin.model)  # without the results that `twin` keeps
    without_rounding = differences(own, [exact.logits(prompt) for prompt in prompts])
    assert min(each.min() for each in without_rounding) > DIFFERENCE_OF_ROUNDING, without_rounding


@pytest.mark.slow_but("squared_relu")
@pytest.mark.parametrize("activation", [None, SwiGLU(), SquaredReLU()], ids=["plain", "swiglu", "squared_relu"])
def test_products(activation: Any) -> None:
    """Compare packed rows, gathered rows, slots and a single weight with products of dequantised numbers."""
    torch.manual_seed(0)
    num_weights, num_outputs, num_inputs = 3, 400, 200
    parts = num_parts_of(activation)
    codes_eOI = torch.randn(num_weights, num_outputs, num_inputs).mul(100).to(FLOAT8)
    scales_eGB = torch.rand(num_weights, parts * -(-num_outputs // parts // 128), 2) / 1000 + 1e-3
    scale_of_row_eOB = torch.cat(
        [scales.repeat_interleave(128, 1)[:, : num_outputs // parts] for scales in scales_eGB.chunk(parts, 1)], 1
    )
    values_eOI = codes_eOI.float() * scale_of_row_eOB.repeat_interleave(128, 2)[..., :num_inputs]
    bias_eO = torch.randn(num_weights, num_outputs)
    product = TritonBlockGroupedProduct(OpenWeights(codes_eOI, bias_eO, activation, scales_eGB))

    def expected(rows: Tensor, weight: int) -> Tensor:
        output = (rounded(rows).double() @ values_eOI[weight].double().T + bias_eO[weight]).float()
        return output if activation is None else activation(*output.chunk(parts, dim=-1))

    counts = [4, 0, 2]
    counts_e = torch.tensor(counts)
    source = torch.randn(5, num_inputs)
    indices_R = torch.tensor([9, 0, 3, 4, 8, 5, 1])  # two pairs for each token; the last row is unused
    rows = source[indices_R // 2]
    reference = torch.cat([expected(rows[:4], 0), expected(rows[4:6], 2)])
    for given in (
        product.multiply(rows, RowGroups(counts_e, has_spare_rows=True))[:6],
        product.multiply(source, RowGroups(counts_e, has_spare_rows=True), Gather(indices_R, 2))[:6],
    ):
        torch.testing.assert_close(given, reference, atol=1e-3, rtol=1e-4)
    slots_eSI = torch.full((num_weights, 4, num_inputs), 1e30)
    slots_eSI[0], slots_eSI[2, :2] = rows[:4], rows[4:6]
    given_eSC = product.multiply_slots(slots_eSI, RowGroups(counts_e))
    torch.testing.assert_close(torch.cat([given_eSC[0], given_eSC[2, :2]]), reference, atol=1e-3, rtol=1e-4)

    alone = TritonBlockProduct(OpenWeights(codes_eOI[1:2], bias_eO[1:2], activation, scales_eGB[1:2]))
    torch.testing.assert_close(alone.multiply(source), expected(source, 1), atol=1e-3, rtol=1e-4)
    assert alone.multiply(source[:0]).shape == (0, num_outputs // parts)
    assert alone.multiply(source.half()).dtype == torch.float16


def test_weights_that_cannot_be_divided_into_blocks_stay_float32(
    tmp_path: Path, reference_named: Callable[[str], Reference]
) -> None:
    """With heads of 8 values, queries, keys and values share blocks, so only the experts are quantised."""
    reference = reference_named("mixtral")
    with LLM(reference.folder, quantization="fp8", dtype="float32", kv_cache_memory="4MiB", enforce_eager=True) as llm:
        attention, moe = networks_of(llm.core.replicas[0].executor.worker.runner.model)[0]  # type: ignore[attr-defined]
        assert isinstance(attention.query_key_value.weights.product, TritonProduct)
        assert attention.query_key_value.weight.dtype == torch.float32
        assert isinstance(moe.experts.down.product, TritonBlockGroupedProduct)
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
