"""The lightning indexer in Triton's interpreter. bench/gpu/attention_cases.py has attention to its choices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from indexer_cases import SHAPES, Case, slots_of

from moeserve.ops.indexer.triton import TritonIndexer
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
