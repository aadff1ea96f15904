"""Products in chunks against float64, and the bytes of any number of rows and ranks."""

from __future__ import annotations

import pytest
import torch

from moeserve.distributed.transport import sum_in_tree
from moeserve.triton_kernels.chunked_matmul import chunked_matmul

DTYPES = (torch.float32, torch.float16)  # the interpreter's products are wrong in bfloat16


@pytest.mark.slow_but("dtype1", "3-dtype0")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", range(1, 9))
def test_sums_of_chunks_are_added_in_a_tree(num_chunks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_chunks)
    size, num_outputs = 21, 40
    num_inputs = num_chunks * size - 2
    rows_TI = torch.randn(19, num_inputs + 3).to(dtype)[:, 3:]
    weight_OI, bias_O = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    whole = chunked_matmul(rows_TI, weight_OI, chunk_inputs=size, bias_O=bias_O)
    assert whole.dtype == dtype

    parts = [
        chunked_matmul(
            rows,
            weight.contiguous(),
            bias_O=bias_O if chunk == 0 else None,
            out_dtype=torch.float32,
        )
        for chunk, (rows, weight) in enumerate(
            zip(rows_TI.split(size, dim=1), weight_OI.split(size, dim=1), strict=True)
        )
    ]
    assert torch.equal(whole, sum_in_tree(torch.stack(parts), dtype))
    for part, rows, weight in zip(parts[1:], rows_TI.split(size, 1)[1:], weight_OI.split(size, 1)[1:], strict=True):
        torch.testing.assert_close(part.double(), rows.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_with_some_of_the_chunks(num_ranks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_ranks)
    rows_TI, weight_OI = torch.randn(5, 8 * 12).to(dtype), torch.randn(33, 8 * 12).to(dtype)
    size = 96 // num_ranks
    parts = [
        chunked_matmul(rows, weight.contiguous(), chunk_inputs=12, out_dtype=torch.float32)
        for rows, weight in zip(rows_TI.split(size, dim=1), weight_OI.split(size, dim=1), strict=True)
    ]
    assert torch.equal(sum_in_tree(torch.stack(parts), dtype), chunked_matmul(rows_TI, weight_OI, chunk_inputs=12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bytes_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows_TI, weight_OI = torch.randn(70, 50).to(dtype), torch.randn(30, 50).to(dtype)
    whole = chunked_matmul(rows_TI, weight_OI, chunk_inputs=7)
    for row in (0, 17, 69):
        assert torch.equal(chunked_matmul(rows_TI[row : row + 1], weight_OI, chunk_inputs=7)[0], whole[row])


def test_no_rows_and_no_inputs() -> None:
    assert chunked_matmul(torch.empty(0, 8), torch.empty(5, 8)).shape == (0, 5)
    assert chunked_matmul(torch.empty(2, 0), torch.empty(5, 0)).tolist() == [[0.0] * 5] * 2
