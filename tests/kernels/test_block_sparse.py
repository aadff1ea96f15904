"""Block-sparse attention in torch and by C++ kernels: with many equal scores, in any batch, chunks and block sizes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from paged_steps import NATIVE, drawn_chunks, make_step, needs_kernels, same_bytes, scatter_blocks
from torch import Tensor

from moeserve.ops import attention as attention_ops
from moeserve.ops import block_sparse as block_sparse_ops
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.backend import REFERENCE
from moeserve.ops.block_sparse.interface import BlockSparseAttention, BlockSparseShape
from moeserve.ops.native import set_num_threads
from moeserve.step_inputs import StepInputs

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LENGTHS = [(1, 150), (23, 23), (9, 40), (1, 1), (0, 5), (2, 64)]  # rows and context
VALUE = 11


def shape_of(
    heads: tuple[int, int, int], *, size: int = 16, block_size: int, top_k: int, num_local: int
) -> BlockSparseShape:
    """Return a shape with these numbers of query, key-value and indexer's heads."""
    num_heads, num_kv_heads, num_index_heads = heads
    attention = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        value_size=VALUE,
        dtype=torch.float32,
        scale=0.25,
        whole_group_size=num_heads // num_kv_heads,
    )
    return BlockSparseShape(
        attention=attention, num_index_heads=num_index_heads, block_size=block_size, top_k=top_k, num_local=num_local
    )


# Shape, and positions in a block of the cache
SHAPES = {
    "published": (shape_of((16, 4, 4), block_size=128, top_k=2, num_local=1), 16),
    "small blocks": (shape_of((8, 2, 4), block_size=6, top_k=3, num_local=1), 9),
    "many heads": (shape_of((8, 4, 2), block_size=5, top_k=4, num_local=0), 8),
    "one": (shape_of((3, 1, 1), block_size=1, top_k=2, num_local=2), 1),
}


class Case:
    """Queries of the tokens of a step, and caches."""

    def __init__(self, name: str, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
        self.shape, self.block_size = SHAPES[name]
        self.lengths = lengths
        self.block_ids = scatter_blocks(lengths, self.block_size, seed=3)
        self.step = make_step(lengths, self.block_ids, self.block_size)
        attention, generator = self.shape.attention, torch.Generator().manual_seed(len(name))
        num_blocks, num_tokens = 1 + int(self.step.block_table.max()), len(self.step.token_ids)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(dtype)

        def draw_integers(*sizes: int) -> Tensor:  # whose products are exact in any order, and often equal
            return torch.randint(-2, 3, sizes, generator=generator).to(dtype)

        of_heads = num_blocks, attention.num_kv_heads, self.block_size
        self.cache = KeyValueCache(draw(*of_heads, attention.head_size), draw(*of_heads, VALUE))
        self.query = draw(num_tokens, attention.num_heads, attention.head_size)
        projected = draw_integers(num_tokens, self.shape.num_index_heads * 12 + 1)  # the queries are a view of it
        self.index_query = projected[:, 1:].unflatten(1, (self.shape.num_index_heads, 12))
        self.index_keys = draw_integers(num_blocks, self.block_size, 12)

    def run(
        self, attend: BlockSparseAttention, rows: list[int] | None = None, step: StepInputs | None = None
    ) -> Tensor:
        own = slice(None) if rows is None else rows
        queries = self.query[own].contiguous(), self.index_query[own]
        return attend.attend(*queries, self.cache, self.index_keys, self.step if step is None else step)

    def by_hand(self) -> Tensor:
        """Return the result in float64 from the definition, one token and one head after the other."""
        shape, attention = self.shape, self.shape.attention
        out = torch.zeros(len(self.query), attention.num_heads, VALUE, dtype=torch.float64)
        for span, blocks in zip(self.step.spans, self.step.block_table.tolist(), strict=True):
            for row in range(span.first_row, span.first_row + span.num_rows):
                position = span.context_len - span.num_rows + row - span.first_row
                places = [(blocks[p // self.block_size], p % self.block_size) for p in range(position + 1)]
                ids, offsets = (torch.tensor(each) for each in zip(*places, strict=True))
                own_block = position // shape.block_size
                for head in range(attention.num_heads):
                    of_indexer = head * shape.num_index_heads // attention.num_heads
                    products = self.index_keys[ids, offsets].double() @ self.index_query[row, of_indexer].double()
                    scores = [float(each.max()) for each in products.split(shape.block_size)]
                    for block in range(max(0, own_block - shape.num_local + 1), own_block + 1):
                        scores[block] = float("inf")
                    best = sorted(range(len(scores)), key=lambda block: (-scores[block], block))[: shape.top_k]
                    seen = torch.tensor([p for p in range(position + 1) if p // shape.block_size in best])
                    of_kv = head * attention.num_kv_heads // attention.num_heads
                    keys, values = (
                        part[ids[seen], of_kv, offsets[seen]].double() for part in (self.cache.keys, self.cache.values)
                    )
                    weights = torch.softmax(attention.scale * keys @ self.query[row, head].double(), dim=0)
                    out[row, head] = weights @ values
        return out


@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_results_are_those_of_the_definition(name: str, dtype: torch.dtype, implementation: str) -> None:
    case = Case(name, dtype, [(2, 400), *LENGTHS])
    attended = case.run(block_sparse_ops.make(REFERENCE if implementation == "torch" else NATIVE, case.shape))
    # Weights and results in bfloat16 are rounded to 8 bits; values are below 4.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    torch.testing.assert_close(attended.double(), case.by_hand(), rtol=tolerance, atol=tolerance)


@needs_kernels
def test_several_threads_score_parts_of_a_long_context(isa: str) -> None:
    case = Case("small blocks", torch.float32, [(2, 9000), (1, 4000)])
    torch.testing.assert_close(
        case.run(block_sparse_ops.make(NATIVE, case.shape)), case.run(block_sparse_ops.make(REFERENCE, case.shape))
    )


@needs_kernels
@DTYPES
def test_bytes_do_not_depend_on_chunks_or_threads(dtype: torch.dtype, isa: str) -> None:
    """Scores of random numbers are rounded."""
    case = Case("published", dtype, [(1300, 1300), (70, 70)])
    noise = torch.Generator().manual_seed(0)
    case.index_keys.copy_(torch.randn(case.index_keys.shape, generator=noise))
    attend = block_sparse_ops.make(NATIVE, case.shape)
    wanted = case.run(attend)
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        for pieces, rows in drawn_chunks(case.step.spans, random.Random(num_threads)):
            step = make_step(pieces, case.block_ids, case.block_size)
            assert same_bytes(case.run(attend, rows, step), wanted[rows])


@needs_kernels
@DTYPES
def test_attention_to_all_blocks_has_the_bytes_of_dense_attention(dtype: torch.dtype, isa: str) -> None:
    """The context is longer than a partition of the sums."""
    case = Case("small blocks", dtype, [(3, 600), (40, 40)])
    everything = dataclasses.replace(case.shape, top_k=100)
    dense = attention_ops.make(NATIVE, case.shape.attention).attend(case.query, case.cache, case.step)
    assert same_bytes(case.run(block_sparse_ops.make(NATIVE, everything)), dense)


def test_keys_are_written_to_their_slots(implementation: str) -> None:
    case = Case("many heads", torch.float32, [(3, 9), (2, 2)])
    case.step.cache_slots[1] = -1
    keys, before = torch.randn(5, 12), case.index_keys.clone()
    backend = REFERENCE if implementation == "torch" else NATIVE
    block_sparse_ops.make(backend, case.shape).write(keys, case.index_keys, case.step)
    kept = [0, 2, 3, 4]
    before.flatten(0, 1)[case.step.cache_slots[kept]] = keys[kept]
    assert torch.equal(case.index_keys, before)


@needs_kernels
def test_arguments_out_of_range_are_refused() -> None:
    case = Case("small blocks", torch.float32, [(2, 9)])
    attend = block_sparse_ops.make(NATIVE, case.shape)
    for change in ({"block_table": case.step.block_table + 99}, {"context_lens": case.step.context_lens + 99}):
        with pytest.raises(ValueError, match="choose_blocks"):
            case.run(attend, step=dataclasses.replace(case.step, **change))
    too_many = dataclasses.replace(case.shape, num_local=4)
    with pytest.raises(ValueError, match="num_local=4"):
        case.run(block_sparse_ops.make(NATIVE, too_many))
