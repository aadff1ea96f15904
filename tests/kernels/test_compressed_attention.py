"""Compressed entries, attention to them, and hyper-connections: torch and C++ kernels against their definitions."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from paged_steps import NATIVE, drawn_chunks, kernels, make_step, needs_kernels, same_bytes, scatter_blocks
from torch import Tensor

from moeserve.ops import compressed_attention as compressed_attention_ops
from moeserve.ops import indexer as indexer_ops
from moeserve.ops import routing as routing_ops
from moeserve.ops import streams as streams_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import IndexerRule
from moeserve.ops.native import set_num_threads
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, H head size, I size of an indexer's key, n heads of an indexer, m tokens of a window, Y
# values of all series, S streams, D model width, X = S * D, C coefficients

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
BLOCK_SIZE = 8
LENGTHS = [(61, 61), (9, 9), (140, 140)]
# Windows that cross the ends of blocks, and windows with overlap and an indexer
SHAPES = {
    "plain": CompressedShape(
        num_heads=3, whole_num_heads=3, head_size=20, scale=0.3, window=6, ratio=5, index_size=None
    ),
    "indexed": CompressedShape(
        num_heads=5, whole_num_heads=5, head_size=300, scale=0.1, window=9, ratio=4, index_size=14
    ),
    "window": CompressedShape(
        num_heads=2, whole_num_heads=2, head_size=17, scale=0.5, window=11, ratio=None, index_size=None
    ),
}


@dataclass(frozen=True)
class Inputs:
    """Inputs of the operations of a layer for the tokens of some requests."""

    shape: CompressedShape
    vector_TH: Tensor
    projected_TX: Tensor
    bias_mY: Tensor
    index_projected_TX: Tensor
    index_bias_mY: Tensor
    query_TNH: Tensor
    index_query_TnI: Tensor
    weight_Tn: Tensor
    sinks_N: Tensor

    @classmethod
    def random(cls, shape: CompressedShape, num_tokens: int, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(3)
        index_size, series, ratio = shape.index_size or 1, shape.num_series, shape.ratio or 1

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        return cls(
            shape,
            draw(num_tokens, shape.head_size).to(dtype),
            draw(num_tokens, 2 * series * shape.head_size + 3)[:, 3:].to(dtype),
            draw(ratio, series * shape.head_size),
            draw(num_tokens, 2 * series * index_size).to(dtype),
            draw(ratio, series * index_size),
            draw(num_tokens, shape.num_heads, shape.head_size).to(dtype),
            draw(num_tokens, 6, index_size).to(dtype),
            draw(num_tokens, 6).to(dtype),
            draw(shape.num_heads),
        )

    def of_rows(self, rows: list[int]) -> Inputs:
        """Return the inputs of some tokens."""
        per_token = {
            field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self) if "_T" in field.name
        }
        return dataclasses.replace(self, **per_token)

    def run(self, backend, cache: CompressedCache, step: StepInputs) -> Tensor:  # type: ignore[no-untyped-def]
        """Return what the rows of a step attend to, [T, N, H]."""
        attention = compressed_attention_ops.make(backend, self.shape)
        entry_TH = key_TI = chosen = None
        if cache.tails is not None:
            entry_TH = attention.pool(self.projected_TX, self.bias_mY, cache.tails, BLOCK_SIZE, step)
        if cache.index_tails is not None:
            key_TI = attention.pool(self.index_projected_TX, self.index_bias_mY, cache.index_tails, BLOCK_SIZE, step)
        attention.write(self.vector_TH, entry_TH, key_TI, cache, step, step)
        if cache.index_keys is not None:
            assert self.shape.ratio is not None
            choose = indexer_ops.make(backend, IndexerRule(top_k=7, tokens_per_entry=self.shape.ratio))
            chosen = choose(self.index_query_TnI, self.weight_Tn, cache.index_keys, step)
        return attention.attend(self.query_TNH, chosen, self.sinks_N, cache, step, step)

    def entries(self, projected_TX: Tensor, bias_mY: Tensor, num_tokens: int) -> Tensor:
        """Return the entries of a request by their definition: one softmax over the tokens of each window."""
        ratio, series = self.shape.ratio or 1, self.shape.num_series
        value, gate = (part.double().unflatten(1, (series, -1)) for part in projected_TX.chunk(2, dim=1))
        found = []
        for end in range(ratio, num_tokens + 1, ratio):
            own = slice(end - ratio, end)
            gates = [gate[own, series - 1] + bias_mY.double().unflatten(1, (series, -1))[:, series - 1]]
            values = [value[own, series - 1]]
            if series == 2 and end > ratio:
                before = slice(end - 2 * ratio, end - ratio)
                gates.append(gate[before, 0] + bias_mY.double().unflatten(1, (2, -1))[:, 0])
                values.append(value[before, 0])
            found.append((torch.cat(gates).softmax(dim=0) * torch.cat(values)).sum(dim=0))
        return torch.stack(found) if found else torch.zeros(0, value.shape[-1], dtype=torch.float64)

    def attended(self, num_tokens: int) -> Tensor:
        """Return the results of one request, whose tokens these are, by the definition."""
        shape, dtype = self.shape, self.vector_TH.dtype
        entries = keys = torch.zeros(0, shape.head_size, dtype=torch.float64)
        if shape.ratio is not None:
            entries = self.entries(self.projected_TX, self.bias_mY, num_tokens).to(dtype).double()
        if shape.index_size is not None:
            keys = self.entries(self.index_projected_TX, self.index_bias_mY, num_tokens).to(dtype).double()
        rows = []
        for position in range(num_tokens):
            first = max(0, position + 1 - shape.window)
            seen = list(range((position + 1) // shape.ratio)) if shape.ratio is not None else []
            if shape.index_size is not None:
                products = (self.index_query_TnI[position].double() @ keys[seen].T).relu()
                scores = (self.weight_Tn[position].double() @ products).tolist()
                seen = sorted(sorted(seen, key=lambda entry: (-scores[entry], entry))[:7])
            vectors = torch.cat([self.vector_TH[first : position + 1].double(), entries[seen]])
            scores_NC = shape.scale * self.query_TNH[position].double() @ vectors.T
            weights_NC = torch.cat([scores_NC, self.sinks_N.double()[:, None]], dim=1).softmax(dim=1)[:, :-1]
            rows.append(weights_NC @ vectors)
        return torch.stack(rows)


def new_cache(shape: CompressedShape, dtype: torch.dtype, block_ids: list[list[int]]) -> CompressedCache:
    num_blocks = 1 + max(max(ids) for ids in block_ids)
    cache = CompressedCache.empty(
        shape,
        num_blocks=num_blocks,
        num_window_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))  # nothing that was not written may be read
    return cache


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_definition(name: str, implementation: str) -> None:
    shape, backend = SHAPES[name], REFERENCE if implementation == "torch" else NATIVE
    block_ids = scatter_blocks(LENGTHS, BLOCK_SIZE, seed=1)
    step = make_step(LENGTHS, block_ids, BLOCK_SIZE)
    inputs = Inputs.random(shape, len(step.positions), torch.float32)
    found = inputs.run(backend, new_cache(shape, torch.float32, block_ids), step)
    for span in step.spans:
        rows = list(range(span.first_row, span.last_row + 1))
        expected = inputs.of_rows(rows).attended(len(rows))
        torch.testing.assert_close(found[rows].double(), expected, rtol=2e-5, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_bytes_do_not_depend_on_chunks_blocks_or_threads(name: str, dtype: torch.dtype, isa: str) -> None:
    shape = SHAPES[name]
    block_ids = scatter_blocks(LENGTHS, BLOCK_SIZE, seed=1)
    whole_step = make_step(LENGTHS, block_ids, BLOCK_SIZE)
    inputs = Inputs.random(shape, len(whole_step.positions), dtype)
    whole = inputs.run(NATIVE, new_cache(shape, dtype, block_ids), whole_step)
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        moved = scatter_blocks(LENGTHS, BLOCK_SIZE, seed=num_threads)
        cache, parts = new_cache(shape, dtype, moved), torch.empty_like(whole)
        for pieces, rows in drawn_chunks(whole_step.spans, random.Random(num_threads)):
            parts[rows] = inputs.of_rows(rows).run(NATIVE, cache, make_step(pieces, moved, BLOCK_SIZE))
        assert same_bytes(parts, whole)


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_drafts_are_forgotten(name: str, implementation: str) -> None:
    """A chunk ends with wrong drafts, some of which end windows and blocks. The next chunk begins at the first."""
    shape, backend = SHAPES[name], REFERENCE if implementation == "torch" else NATIVE
    block_ids = scatter_blocks([(61, 61)], BLOCK_SIZE, seed=1)
    inputs = Inputs.random(shape, 61, torch.float32)
    other = inputs.of_rows(list(range(61))[::-1])
    cache, num_drafts = new_cache(shape, torch.float32, block_ids), 11
    for known, drafted, drafts in (((0, 23), (0, 0), 0), ((23, 26), (26, 37), num_drafts), ((26, 61), (0, 0), 0)):
        rows, after = list(range(*known)), list(range(*drafted))
        step = make_step([(len(rows) + len(after), max(rows + after) + 1)], block_ids, BLOCK_SIZE)
        step = dataclasses.replace(step, spans=(step.spans[0]._replace(num_drafts=drafts),))
        both = [inputs.of_rows(rows), other.of_rows(after)]
        per_token = {
            field.name: torch.cat([getattr(part, field.name) for part in both])
            for field in dataclasses.fields(Inputs)
            if "_T" in field.name
        }
        found = dataclasses.replace(inputs, **per_token).run(backend, cache, step)
    torch.testing.assert_close(found.double(), inputs.attended(61)[26:], rtol=2e-5, atol=2e-5)


CONFIGS = [StreamsSpec(num_streams=4, num_iterations=20, epsilon=1e-6), StreamsSpec(
    num_streams=3, num_iterations=4, epsilon=1e-3), StreamsSpec(
    num_streams=5, num_iterations=0, epsilon=1e-2, output_factor=1.5, output_epsilon=0.1)]  # fmt: skip


def random_weights(config: StreamsSpec, width: int, *, is_last: bool) -> StreamsWeights:
    num_coefficients = config.num_streams if is_last else config.num_coefficients
    size = config.num_streams * width
    return StreamsWeights(
        torch.randn(num_coefficients, size) * size**-0.5,
        torch.randn(num_coefficients),
        torch.rand(1 if is_last else config.num_kinds) + 0.5,
    )


@needs_kernels
@pytest.mark.parametrize("config", CONFIGS, ids=["four", "three", "no matrix"])
@pytest.mark.parametrize("width", [40, 33])
@DTYPES
def test_streams(config: StreamsSpec, width: int, dtype: torch.dtype, isa: str) -> None:
    streams_TX = torch.randn(19, config.num_streams * width).to(dtype)
    update_TD = torch.randn(19, width).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7  # one rounding, perhaps to a neighbouring number
    native, reference = streams_ops.make(NATIVE, config, 1e-5), streams_ops.make(REFERENCE, config, 1e-5)
    for is_last in (False, True):
        weights = random_weights(config, width, is_last=is_last)
        found, wanted = native.collapse(streams_TX, weights), reference.collapse(streams_TX, weights)
        torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-5)
        alone = [native.collapse(streams_TX[t : t + 1], weights) for t in range(19)]
        assert all(
            same_bytes(torch.cat(rows), whole) for rows, whole in zip(zip(*alone, strict=True), found, strict=True)
        )
        if is_last:
            continue
        if config.num_iterations:
            matrix_TSS = found[1][:, 2 * config.num_streams :].unflatten(1, (config.num_streams, -1))
            slack = 1e-4 + 10 * config.epsilon
            ones_TS = torch.ones(19, config.num_streams)
            torch.testing.assert_close(matrix_TSS.sum(dim=1), ones_TS, rtol=slack, atol=slack)
        expanded = native.expand(streams_TX, update_TD, found[1])
        torch.testing.assert_close(
            expanded, reference.expand(streams_TX, update_TD, found[1]), rtol=tolerance, atol=tolerance
        )
        one = native.expand(streams_TX[3:4], update_TD[3:4], found[1][3:4])
        assert same_bytes(one, expanded[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_routing_by_token(dtype: torch.dtype, implementation: str) -> None:
    """Scores are weights alone, in the order of the given experts."""
    config = RouterSpec(num_experts=9, top_k=3, scoring="sqrt_softplus", is_normalized=True, scale=1.5, table_size=50)
    hidden_TD, weight_ED = torch.randn(7, 40).to(dtype), torch.randn(9, 40) * 0.5
    given_TK = torch.rand(7, 9).argsort(dim=1)[:, :3].contiguous()
    router = routing_ops.make(REFERENCE if implementation == "torch" else NATIVE, config)
    experts_TK, weights_TK = router(hidden_TD, weight_ED, None, None, given_TK)
    assert torch.equal(experts_TK, given_TK)
    logits_TE = hidden_TD.double() @ weight_ED.double().T
    expected_TK = (logits_TE.exp() + 1).log().sqrt().gather(1, given_TK)
    expected_TK = 1.5 * expected_TK / expected_TK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_what_is_out_of_range_is_refused() -> None:
    config = RouterSpec(num_experts=9, top_k=1, scoring="sqrt_softplus", table_size=50)
    with pytest.raises(ValueError, match="expert 9"):
        routing_ops.make(NATIVE, config)(torch.randn(1, 4), torch.randn(9, 4), None, None, torch.tensor([[9]]))
    shape, block_ids = SHAPES["plain"], [[0, 1]]
    step = make_step([(9, 9)], block_ids, BLOCK_SIZE)
    inputs = Inputs.random(shape, 9, torch.float32)
    for change in ({"block_table": step.block_table + 2}, {"context_lens": step.context_lens + 9}):
        with pytest.raises(ValueError, match="compressed attention"):
            inputs.run(NATIVE, new_cache(shape, torch.float32, block_ids), dataclasses.replace(step, **change))
    assert kernels is not None
    with pytest.raises(ValueError, match="streams"):
        kernels.expand_streams(torch.ones(2, 9), torch.ones(2, 2), torch.ones(2, 24), torch.ones(2, 9), num_streams=4)
