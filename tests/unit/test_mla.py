"""Latent attention: both of its ways against a loop over positions in float64, and which way it chooses."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from build_contexts import cpu_context
from chunks import make_chunk
from torch import Tensor

from moeserve.distributed.mesh import Mesh
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.layers.latent.attention import LatentAttention, LatentAttentionSpec
from moeserve.layers.network import Run
from moeserve.layers.rotary import Rotary, RotarySpec
from moeserve.layers.weights import Weights, allocate_weights
from moeserve.ops import rows as rows_ops
from moeserve.ops import select
from moeserve.ops.attention.dense import attend_causally
from moeserve.ops.native import native_kernels
from moeserve.ops.select import select_backend
from moeserve.step_inputs import StepInputs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable

CPU = torch.device("cpu")
WIDTH, BLOCK_SIZE = 24, 4


def rotary_of(dim: int) -> RotarySpec:
    return RotarySpec(dim=dim, theta=100.0, is_interleaved=True)


SHAPE = LatentAttentionSpec(
    num_heads=3, query_rank=10, latent_size=20, key_dim=7, rotary=rotary_of(6), value_dim=5, score_factor=1.3
)
SHAPES = {
    "compressed query": SHAPE,
    "plain query, wide values, biases": dataclasses.replace(SHAPE, query_rank=None, value_dim=15, has_bias=True),
}


def make_layer(config: LatentAttentionSpec) -> LatentAttention:
    layer = LatentAttention(config, WIDTH, dataclasses.replace(cpu_context(), block_size=BLOCK_SIZE))
    allocate_weights(layer)
    for weight in layer.parameters():
        weight.normal_(0.0, 0.4)
    return layer


def make_step(*chunks: tuple[int, int, list[int]]) -> StepInputs:
    """Return a step of chunks (start, rows, block ids)."""
    table = RequestTable(max(1, len(chunks)), max((len(ids) for _, _, ids in chunks), default=1))
    made = [make_chunk(table, slot, [0] * rows, start, ids) for slot, (start, rows, ids) in enumerate(chunks)]
    context = RankContext(mesh=Mesh(tp=1, dp=1), tp_rank=0, max_blocks=0, device=CPU)
    model, unused = SimpleNamespace(context=SimpleNamespace(block_size=BLOCK_SIZE)), cast(Any, None)
    return ModelRunner(cast(Any, model), context, unused, table).build_inputs(made, (0,))


def rotary(config: LatentAttentionSpec) -> Rotary:
    return Rotary(config.rotary, CPU)


def by_hand(layer: LatentAttention, hidden_CD: Tensor) -> Tensor:
    """Compute the outputs [C, D] of one context in float64, with explicit keys and values of every head."""
    config = layer.config

    def linear(part: Any, rows: Tensor) -> Tensor:
        product = rows @ part.weight.double().T
        return product if part.bias is None else product + part.bias.double()

    def norm(part: Any, rows: Tensor) -> Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * part.weight.double()

    hidden = hidden_CD.double()
    query: Any = layer.query
    if config.query_rank is None:
        queries = linear(query, hidden)
    else:
        queries = linear(query.up, norm(query.norm, linear(query.down, hidden)))
    queries = queries.view(len(hidden), config.num_heads, -1)
    latent, rotated = linear(layer.compress, hidden).split([config.latent_size, config.rotary_dim], dim=-1)
    maps, latent = layer.head_maps, norm(layer.latent_norm, latent)
    keys = torch.einsum("cl,nlk->cnk", latent, maps.keys.open.weight_eOI.double())
    values = torch.einsum("cl,nvl->cnv", latent, maps.values.open.weight_eOI.double())
    rotation = rotary(config).at(torch.arange(len(hidden)))
    rotated_queries = (
        rows_ops.make(select_backend(CPU)).apply_rope(queries[..., config.key_dim :].float(), rotation).double()
    )
    rotated = rows_ops.make(select_backend(CPU)).apply_rope(rotated[:, None].float(), rotation)[:, 0].double()

    rows = []
    for position in range(len(hidden)):
        heads = []
        for head in range(config.num_heads):
            scores = [
                queries[position, head, : config.key_dim] @ keys[other, head]
                + rotated_queries[position, head] @ rotated[other]
                for other in range(position + 1)
            ]
            scale = config.score_factor / math.sqrt(config.key_dim + config.rotary_dim)
            weights = torch.softmax(torch.stack(scores) * scale, dim=0)
            heads.append(weights @ values[: position + 1, head])
        rows.append(torch.cat(heads))
    return linear(layer.output, torch.stack(rows))


@pytest.mark.parametrize("way", ["kernels", "absorbed", "expanded", "expanded, a head at a time", "as chosen"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_give_the_same_results(shape: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contexts are computed in chunks of several sizes, in the same steps, with blocks in no order."""
    torch.manual_seed(0)
    if way != "kernels":
        monkeypatch.setattr(select, "native_kernels", lambda: None)
    layer = make_layer(SHAPES[shape])
    if way not in ("kernels", "as chosen"):
        limit = 10**6 if way == "absorbed" else 0
        monkeypatch.setattr(LatentAttentionSpec, "max_absorbed_rows", property(lambda config: limit))
    if way == "expanded, a head at a time":
        monkeypatch.setattr("moeserve.ops.latent_attention.reference.MAX_EXPANDED_SIZE", 1)
    contexts = [torch.randn(41, WIDTH), torch.randn(19, WIDTH)]
    blocks = [[9, 2, 14, 0, 5, 11, 3, 12, 7, 1, 15], [4, 13, 6, 10, 8]]
    cache = layer.make_cache(Places.equal(CacheRules(), 16))
    cache.latents.fill_(math.nan)

    outputs: list[list[Tensor]] = [[], []]
    for spans in [((0, 30), (0, 1)), ((30, 31), (1, 18)), ((31, 41), (18, 19))]:
        step = make_step(*((start, stop - start, ids) for (start, stop), ids in zip(spans, blocks, strict=True)))
        hidden = torch.cat([context[slice(*span)] for context, span in zip(contexts, spans, strict=True)])
        output = layer(hidden, Run(step, {layer.config.rotary: rotary(layer.config).at(step.positions)}), cache)
        for rows, part in zip(outputs, output.split([stop - start for start, stop in spans]), strict=True):
            rows.append(part)
    for rows, context in zip(outputs, contexts, strict=True):
        torch.testing.assert_close(torch.cat(rows).double(), by_hand(layer, context), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native_kernels() is None, reason="moeserve._cpu is not built")
def test_with_kernels_the_size_of_chunks_changes_no_byte() -> None:
    torch.manual_seed(0)
    layer, hidden, ids = make_layer(SHAPE), torch.randn(30, WIDTH), list(range(8))
    for module in layer.modules():
        if isinstance(module, Weights):
            module.pack()

    def outputs(*sizes: int) -> Tensor:
        cache, rows, start = layer.make_cache(Places.equal(CacheRules(), 8)), [], 0
        for size in sizes:
            step = make_step((start, size, ids))
            rows.append(
                layer(hidden[start : start + size], Run(step, {SHAPE.rotary: rotary(SHAPE).at(step.positions)}), cache)
            )
            start += size
        return torch.cat(rows)

    assert torch.equal(outputs(30), outputs(1, 20, 9))


def test_the_cache_of_deepseek_v3_holds_576_values() -> None:
    config = dataclasses.replace(SHAPE, latent_size=512, rotary=rotary_of(64))
    layer = LatentAttention(config, WIDTH, cpu_context(torch.bfloat16))
    allocate_weights(layer)
    assert [items.num_bytes for items in layer.cache_items] == [16 * 576 * 2]
    assert layer.make_cache(Places.equal(CacheRules(), 5)).latents.nbytes == 5 * 16 * 576 * 2


@pytest.mark.parametrize("num_positions", [500, 5000])
def test_the_way_with_fewer_multiplications_is_chosen(num_positions: int) -> None:
    """The limit does not depend on the length of the context."""
    config = LatentAttentionSpec(
        num_heads=128, query_rank=1536, latent_size=512, key_dim=128, rotary=rotary_of(64), value_dim=128
    )

    def absorbed(rows: int) -> int:
        return rows * num_positions * (512 + 64 + 512)

    def expanded(rows: int) -> int:
        return rows * num_positions * (128 + 64 + 128) + num_positions * 512 * (128 + 128)

    limit = config.max_absorbed_rows
    assert absorbed(limit) <= expanded(limit)
    assert absorbed(limit + 1) > expanded(limit + 1)
    large_heads = dataclasses.replace(SHAPE, latent_size=4, key_dim=8, value_dim=8)
    assert large_heads.max_absorbed_rows > 2**30  # they are never expanded


@pytest.mark.parametrize("window", [None, 1, 6, -5])
@pytest.mark.parametrize(("num_rows", "num_positions"), [(1, 23), (9, 9), (7, 30)])
@pytest.mark.parametrize("sizes", [(8, 8), (6, 9), (9, 6)])
def test_dense_attention(
    num_rows: int, num_positions: int, window: int | None, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.ops.attention.dense.MAX_MASK_SIZE", 3 * num_positions)  # three rows at a time
    torch.manual_seed(1)
    query, key = torch.randn(num_rows, 4, sizes[0]), torch.randn(2, num_positions, sizes[0])
    value = torch.randn(2, num_positions, sizes[1])
    given = attend_causally(query, key, value, scale=0.3, window=window)
    assert given.shape == (num_rows, 4, sizes[1])
    for row in range(num_rows):
        position = num_positions - num_rows + row
        first = 0 if window is None else max(0, position - window + 1)
        if window is not None and window < 0:
            first = position // -window * -window
        for head in range(4):
            scores = key[head // 2, first : position + 1].double() @ query[row, head].double() * 0.3
            expected = scores.softmax(0) @ value[head // 2, first : position + 1].double()
            torch.testing.assert_close(given[row, head].double(), expected, atol=1e-5, rtol=1e-5)
