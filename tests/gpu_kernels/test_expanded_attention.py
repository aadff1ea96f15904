"""Latent attention over expanded keys and values in Triton's interpreter, and the number of its launches."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops.latent_attention.interface import LatentAttentionBackend
from moeserve.ops.latent_attention.reference import TorchLatentAttention
from moeserve.ops.latent_attention.triton import TritonLatentAttention
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels import expanded_attention as expanded

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from attention_cases import Shape, make_case, only_chunk
from paged_steps import make_step, same_bytes

# T tokens, N heads, L latent size, K and E parts of a key, V values of a head, C positions, n some heads

MAX_ROWS = 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
LENGTHS = [(9, 70), (1, 40), (0, 7), (20, 20), (4, 30), (5, 140)]


@dataclasses.dataclass
class Sizes:
    num_heads: int
    latent_size: int
    key_size: int
    extra_size: int
    value_size: int


SMALL = Sizes(2, 20, 24, 8, 12)
DEEPSEEK = Sizes(1, 512, 128, 64, 128)


class Layer:
    """Queries, a cache with NaN where nothing was written, and the maps of the heads."""

    def __init__(
        self,
        sizes: Sizes,
        lengths: list[tuple[int, int]],
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> None:
        self.sizes = sizes
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        shape = Shape(sizes.num_heads, 1, sizes.latent_size + sizes.extra_size, latent_size=sizes.latent_size)
        self.case = make_case(lengths, shape, dtype=dtype, block_size=block_size)
        num_tokens = len(self.case.query_TNH)
        self.query_TNK = draw(num_tokens, sizes.num_heads, sizes.key_size + 3)[..., : sizes.key_size]
        self.query_TNE = draw(num_tokens, sizes.num_heads, sizes.extra_size)
        self.key_NLK = draw(sizes.num_heads, sizes.latent_size, sizes.key_size) * sizes.latent_size**-0.5
        self.value_NLV = draw(sizes.num_heads, sizes.latent_size, sizes.value_size) * sizes.latent_size**-0.5

    def expand(self, latent_CL: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return latent_CL @ self.key_NLK[heads], latent_CL @ self.value_NLV[heads]

    def attend(
        self, backend: type[Any] = TritonLatentAttention, step: StepInputs | None = None, rows: slice = slice(None)
    ) -> Tensor:
        sizes, step = self.sizes, step or self.case.step
        out_TNV = self.query_TNK.new_zeros(len(step.positions), sizes.num_heads, sizes.value_size)
        scale = (sizes.key_size + sizes.extra_size) ** -0.5
        attention: LatentAttentionBackend = backend(scale, sizes.latent_size, sizes.num_heads)
        cache = self.case.key_cache[:, 0]
        queries = self.query_TNK[rows], self.query_TNE[rows]
        attention.attend_expanded(*queries, cache, step, MAX_ROWS, self.expand, out_TNV)
        return out_TNV

    def set_piece_size(self, num_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
        per_position = self.sizes.num_heads * (self.sizes.key_size + self.sizes.value_size)
        num_bytes = num_positions * per_position * self.query_TNK.element_size()
        monkeypatch.setattr(expanded, "MAX_EXPANDED_BYTES", num_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "lengths", "block_size"),
    [(SMALL, [(1, 3), (70, 150)], 7), (SMALL, LENGTHS, 1), (DEEPSEEK, [(5, 80), (40, 40)], 64)],
    ids=["blocks of 7", "blocks of 1", "DeepSeek"],
)
def test_results_equal_torch(sizes: Sizes, lengths: list[tuple[int, int]], block_size: int, dtype: torch.dtype) -> None:
    layer = Layer(sizes, lengths, dtype, block_size)
    actual = layer.attend()
    torch.testing.assert_close(actual, layer.attend(TorchLatentAttention), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    is_long = torch.cat([torch.full((num_rows,), num_rows > MAX_ROWS) for num_rows, _ in lengths])
    assert torch.equal(actual.abs().sum((1, 2)) > 0, is_long)


def test_rows_before_position_0_are_not_written() -> None:
    layer = Layer(SMALL, [(12, 12), (9, 9)], torch.float32)
    step = make_step([(12, 12), (9, 9)], layer.case.step.block_table.tolist(), 16)
    spans = tuple(span._replace(context_len=5) for span in step.spans)
    step = dataclasses.replace(step, spans=spans, context_lens=torch.tensor([5, 5], dtype=torch.int32))
    actual = layer.attend(step=step)
    torch.testing.assert_close(actual, layer.attend(TorchLatentAttention, step), atol=1e-5, rtol=1e-5)
    assert not actual[:7].any()
    assert actual[7:12].all()


@pytest.mark.slow_but("128-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("piece_size", [1, 128])
def test_neither_pieces_nor_other_chunks_change_a_byte(
    piece_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(SMALL, LENGTHS, dtype)
    whole = layer.attend()
    layer.set_piece_size(piece_size, monkeypatch)
    assert same_bytes(layer.attend(), whole)
    for chunk, span in enumerate(layer.case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        alone = only_chunk(layer.case, chunk).step
        if span.num_rows > MAX_ROWS:
            assert same_bytes(layer.attend(step=alone, rows=rows), whole[rows]), f"chunk {chunk}: {span}"


def test_launches_depend_on_the_memory_of_expanded_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3: chunks that end contexts of 32k; tensors have shapes only, and launches are counted."""
    launches: Counter[str] = Counter()

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launches.update([self.name])

    for name in ("gather_vectors_kernel", "attend_expanded_kernel"):
        monkeypatch.setattr(expanded, name, Counted(name))

    def expand(latent_CL: Tensor) -> tuple[Tensor, Tensor]:
        launches.update(["product", "product"])
        return latent_CL.new_empty(128, len(latent_CL), 128), latent_CL.new_empty(128, len(latent_CL), 128)

    for lengths in ([(8192, 32768)], [(2048, 8192)] * 4, [(512, 2048)] * 16):
        launches.clear()
        num_tokens = sum(num_rows for num_rows, _ in lengths)
        tensor = torch.empty(num_tokens, 128, 192, dtype=torch.bfloat16, device="meta")
        tables = (len(lengths), 2048), (len(lengths) + 1,), (len(lengths),)
        expanded.expanded_attention(
            tensor[..., :128],
            tensor[..., 128:],
            torch.empty(1, 16, 576, dtype=torch.bfloat16, device="meta"),
            *(torch.empty(shape, dtype=torch.int32, device="meta") for shape in tables),
            [context_len for _, context_len in lengths],
            expand,
            torch.empty(num_tokens, 128, 128, dtype=torch.bfloat16, device="meta"),
            scale=1.0,
        )
        assert launches == {"gather_vectors_kernel": 4, "product": 8, "attend_expanded_kernel": 4}, lengths
