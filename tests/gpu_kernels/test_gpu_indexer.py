"""The lightning indexer and attention to its choices in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from indexer_cases import SHAPES, Case, slots_of

from moeserve.ops.torch.attention import TorchLatentAttention
from moeserve.ops.triton.attention import TritonLatentAttention
from moeserve.ops.triton.indexer import TritonIndexer
from moeserve.triton_kernels import indexer

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from paged_steps import make_step, scatter_blocks

LENGTHS = [(1, 150), (0, 5), (3, 40), (2, 2)]  # rows and context


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("published", torch.float16), ("odd", torch.float32), ("compressed", torch.float16), ("one", torch.float32)],
)
def test_choices_are_those_of_the_definition(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several launches, with several iterations of the choice."""
    monkeypatch.setattr(indexer, "MAX_SCORES", 700)
    monkeypatch.setattr(indexer, "CHOOSE_ENTRIES", 64)
    shape = SHAPES[name]
    block_ids = scatter_blocks(LENGTHS, shape.block_size, seed=3)
    case = Case.random(name, dtype, make_step(LENGTHS, block_ids, shape.block_size))
    assert slots_of(case.run(TritonIndexer(shape.rule))) == case.by_hand()


@pytest.mark.parametrize("splits_contexts", [True, False])
def test_attention_to_chosen_positions(splits_contexts: bool) -> None:
    lengths, shape = [(1, 150), (0, 3), (5, 9)], SHAPES["odd"]
    block_ids = scatter_blocks(lengths, shape.block_size, seed=4)
    case = Case.random("odd", torch.float32, make_step(lengths, block_ids, shape.block_size))
    chosen = case.run(TritonIndexer(shape.rule))
    generator = torch.Generator().manual_seed(6)
    cache = torch.randn(len(case.key_cache), shape.block_size, 20, generator=generator)
    query_TNP = torch.randn(6, 3, 20, generator=generator)
    attention = TritonLatentAttention(0.3, 17, 3, splits_contexts=splits_contexts)
    attended = attention.attend_chosen(query_TNP, cache, chosen)
    expected = TorchLatentAttention(0.3, 17, 3).attend_chosen(query_TNP, cache, chosen)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
