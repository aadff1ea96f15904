"""Addition, gating, RMSNorm and rotary embedding in C++ against references in torch and float64; row maxima in both."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from paged_steps import NATIVE, same_bytes
from torch import Tensor

from moeserve.ops import rows as rows_ops
from moeserve.ops import sampling as sampling_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.native import set_num_threads
from moeserve.ops.rows.interface import Rotation

# T tokens, N heads, H head size, F rotated pairs, D width of a row

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-5
RowMaximum = Callable[[Tensor], tuple[Tensor, Tensor]]
WIDTHS = [1, 3, 15, 16, 31, 33, 64, 80, 128, 1037]


# Addition and gating


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (1, 31), (7, 1029), (150, 1024)])
def test_addition_and_gating(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sums have the bytes of torch. Gated rows are within the rounding of the gate's function and of the product."""
    torch.manual_seed(0)
    a, b = torch.randn(shape).to(dtype), (torch.randn(shape) * 100).to(dtype)
    gates = (torch.randn(shape[0], 1) * 20).to(dtype)
    before = a.clone(), b.clone()
    set_num_threads(3)
    assert same_bytes(rows_ops.make(NATIVE).add(a, b), a + b)
    factor = torch.tensor([0.7])
    assert same_bytes(rows_ops.make(NATIVE).add_scaled(a, b, factor), rows_ops.make(REFERENCE).add_scaled(a, b, factor))
    for is_softplus, function in ((False, torch.sigmoid), (True, torch.nn.functional.softplus)):
        gated = rows_ops.make(NATIVE).gate_rows(gates, a, is_softplus=is_softplus)
        assert same_bytes(a, before[0])
        assert same_bytes(b, before[1])
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        expected = function(gates.double()) * a.double()
        torch.testing.assert_close(gated.double(), expected, rtol=tolerance, atol=1e-37)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_of_addition_and_gating(dtype: torch.dtype) -> None:
    a = torch.tensor([[math.nan, math.inf, math.inf, 1.0]], dtype=dtype)
    b = torch.tensor([[1.0, -math.inf, 1.0, -math.inf]], dtype=dtype)
    torch.testing.assert_close(rows_ops.make(NATIVE).add(a, b), a + b, equal_nan=True)
    gates = torch.tensor([[math.nan], [math.inf], [-math.inf], [200.0], [-80.0], [0.0]], dtype=dtype)
    gated = rows_ops.make(NATIVE).gate_rows(gates, torch.full((6, 3), 2.0, dtype=dtype)).float()
    assert gated[0].isnan().all()
    assert gated[2].abs().max() < 1e-37
    expected = torch.tensor([2.0, 2.0, 2 * 1.8048514e-35, 1.0])[:, None].expand(4, 3)
    torch.testing.assert_close(gated[[1, 3, 4, 5]], expected, rtol=2**-7, atol=0)


# RMSNorm


def normed_in_float64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def assert_is_norm(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    if x.dtype == torch.float32:
        torch.testing.assert_close(actual.double(), normed_in_float64(x, weight), atol=1e-6, rtol=1e-6)
    else:
        # Both round at the same two places, so only the order of the sum differs and few numbers are one step away.
        expected = rows_ops.make(REFERENCE).rms_norm(x, weight, EPSILON)
        torch.testing.assert_close(actual.double(), expected.double(), atol=1e-6, rtol=2**-7)
        assert actual.numel() == 0 or (actual != expected).float().mean() <= 0.01


def random_rows(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [T, D] or heads [T, N, H], some of them views, and a weight."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.choice(WIDTHS)
    weight = torch.randn(width).to(dtype)
    num_tokens = draw.choice([0, 1, 2, 5, 40])
    wide = torch.randn(num_tokens, draw.choice([1, 2, 5]), width + draw.choice([0, 6])) * draw.choice([1e-3, 1.0, 50.0])
    heads = wide.to(dtype)[..., -width:]
    return (heads if draw.random() < 0.5 else heads[:, 0]), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_norm_and_norm_after_an_addition(dtype: torch.dtype, seed: int) -> None:
    x, weight = random_rows(seed, dtype)
    update = torch.randn(x.shape).to(dtype) * 3
    before = x.clone(), update.clone()
    assert_is_norm(rows_ops.make(NATIVE).rms_norm(x, weight, EPSILON), x, weight)
    total, normed = rows_ops.make(NATIVE).add_rms_norm(x, update, weight, EPSILON)
    assert same_bytes(total, x + update)
    assert_is_norm(normed, x + update, weight)
    assert same_bytes(normed, rows_ops.make(NATIVE).rms_norm(total, weight, EPSILON))
    assert same_bytes(x, before[0])
    assert same_bytes(update, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [57, 66])
def test_norm_in_place_leaves_the_rest_of_wider_rows(dtype: torch.dtype, width: int) -> None:
    wide = torch.randn(5, 100).to(dtype)
    before, x, weight = wide.clone(), wide[:, 3 : 3 + width], torch.randn(width).to(dtype)
    before[:, 3 : 3 + width] = rows_ops.make(NATIVE).rms_norm(x, weight, EPSILON)
    rows_ops.make(NATIVE).rms_norm_in_place(x, weight, EPSILON)
    assert same_bytes(wide, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 70).to(dtype), torch.ones(70, dtype=dtype)
    x[4] = 0
    expected = rows_ops.make(NATIVE).rms_norm(x, weight, EPSILON)
    x[1, 69], x[3, 0] = math.nan, math.inf
    actual = rows_ops.make(NATIVE).rms_norm(x, weight, EPSILON)
    assert actual[1].isnan().all()
    assert actual[3, 0].isnan()
    assert same_bytes(actual[[0, 2, 4]], expected[[0, 2, 4]])
    assert not actual[4].any()


# Rotary embedding


def angles(num_tokens: int, num_pairs: int) -> tuple[Tensor, Tensor]:
    angles_TF = torch.randn(num_tokens, num_pairs) * 10
    return angles_TF.cos(), angles_TF.sin()


def rotated_in_float64(heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool) -> Tensor:
    rotated = heads_TNH.double()
    num_pairs = cosines_TF.shape[1]
    for f in range(num_pairs):
        first, second = (2 * f, 2 * f + 1) if is_interleaved else (f, num_pairs + f)
        a, b = heads_TNH[..., first].double(), heads_TNH[..., second].double()
        cosine, sine = cosines_TF[:, f : f + 1].double(), sines_TF[:, f : f + 1].double()
        rotated[..., first], rotated[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return rotated


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_heads_of_a_projection_are_rotated_in_place(seed: int, dtype: torch.dtype, is_interleaved: bool) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_pairs = draw.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 48, 64])
    num_tokens, num_heads = draw.choice([0, 1, 2, 5, 30]), draw.choice([1, 2, 5])
    before, behind = draw.choice([0, 5]), draw.choice([0, 3])
    projected = torch.randn(num_tokens, num_heads + 2, before + 2 * num_pairs + behind).to(dtype)
    original = projected.clone()
    heads_TNH = projected[:, 1 : 1 + num_heads, before:]
    rotation = Rotation(*angles(num_tokens, num_pairs), is_interleaved)
    expected = rotated_in_float64(heads_TNH, rotation.cosines, rotation.sines, is_interleaved)

    rotated = rows_ops.make(NATIVE).apply_rope(heads_TNH, rotation)
    assert rotated.dtype == dtype
    assert rotated.data_ptr() == heads_TNH.data_ptr()
    original[:, 1 : 1 + num_heads, before : before + 2 * num_pairs] = rotated[..., : 2 * num_pairs]
    assert same_bytes(projected, original), "elements that are not rotated must stay unchanged"
    rounding = 2**-8 * 1.001 if dtype == torch.bfloat16 else 1e-6
    assert ((rotated.double() - expected).abs() <= expected.abs() * rounding + 2e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotation_into_a_part_of_a_wider_tensor(dtype: torch.dtype, is_interleaved: bool) -> None:
    source_TNH, target_TNH = torch.randn(5, 3, 80).to(dtype), torch.randn(5, 3, 100).to(dtype)
    heads_TNH, out_TNH = source_TNH[..., 8:], target_TNH[..., 28:]
    before, left = source_TNH.clone(), target_TNH[..., :28].clone()
    rotation = Rotation(*angles(5, 32), is_interleaved)
    for kernel in (rows_ops.make(NATIVE).apply_rope, rows_ops.make(REFERENCE).apply_rope):
        result = kernel(heads_TNH, rotation, out_TNH)
        assert result.data_ptr() == out_TNH.data_ptr()
        torch.testing.assert_close(out_TNH, rows_ops.make(REFERENCE).apply_rope(heads_TNH.clone(), rotation))
        assert same_bytes(source_TNH, before)
        assert same_bytes(target_TNH[..., :28], left)


# Batch invariance


def add_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat(rows_ops.make(NATIVE).add_rms_norm(x, x.flip(-1), weight, EPSILON), dim=-1)


def rotate(x: Tensor, is_interleaved: bool) -> Tensor:
    heads_TNH, num_pairs = x.unflatten(-1, (4, -1)), x.shape[1] // 8 - 1
    angles_TF = x[:, :num_pairs].float()
    return rows_ops.make(NATIVE).apply_rope(
        heads_TNH.clone(), Rotation(angles_TF.cos(), angles_TF.sin(), is_interleaved)
    )


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate": lambda x, weight: rows_ops.make(NATIVE).gate_rows(x[:, :1].contiguous(), x),
    "norm": add_norm,
    "rope": lambda x, weight: rotate(x, False),
    "interleaved rope": lambda x, weight: rotate(x, True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1000])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(
    operation: str, dtype: torch.dtype, width: int
) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(400, width).to(dtype), torch.randn(width).to(dtype)
    run = OPERATIONS[operation]
    set_num_threads(1)
    expected = run(x, weight)
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        assert same_bytes(run(x, weight), expected)
    for rows in (slice(0, 1), slice(1, 2), slice(200, 201), slice(399, 400), slice(3, 9)):
        assert same_bytes(run(x[rows], weight), expected[rows])


# Row maxima


@pytest.fixture(params=[REFERENCE, NATIVE], ids=["torch", "native"])
def row_maximum(request: pytest.FixtureRequest) -> RowMaximum:
    return sampling_ops.make(request.param).row_maximum


def assert_found(row_maximum: RowMaximum, rows: Tensor) -> None:
    largest, indices = row_maximum(rows)
    assert indices.dtype == torch.int64
    for row, number, index in zip(rows.tolist(), largest.tolist(), indices.tolist(), strict=True):
        is_nan = [math.isnan(value) for value in row]
        if any(is_nan):
            assert math.isnan(number)
            assert index == is_nan.index(True)
        else:
            assert number == max(row)
            assert index == row.index(max(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 31, 1024, 1025, 5000])
def test_largest_and_first(row_maximum: RowMaximum, width: int, dtype: torch.dtype) -> None:
    draw = random.Random(width)
    torch.manual_seed(width)
    rows = torch.randn(30, width + 2).to(dtype)[:, 2:]  # bfloat16 has many ties
    rows[1] = 1.5
    rows[2] = -math.inf
    rows[3] = torch.tensor([0.0, -0.0]).repeat(width)[:width]
    for row, bad in enumerate([math.nan, -math.nan, math.inf, -math.inf] * 3, start=10):
        rows[row, draw.randrange(width)] = bad
    for row in range(14, 22):
        rows[row, draw.randrange(width)] = math.nan
        rows[row, draw.randrange(width)] = math.inf
    assert_found(row_maximum, rows)


def test_every_index(row_maximum: RowMaximum) -> None:
    width = 1100
    rows = -torch.ones(width, width) - torch.eye(width)  # the maximum is off the diagonal
    assert_found(row_maximum, rows)
    assert_found(row_maximum, torch.eye(width).bfloat16())


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_rows_on_any_number_of_threads(row_maximum: RowMaximum, num_threads: int) -> None:
    set_num_threads(num_threads)
    assert_found(row_maximum, torch.randn(40, 3000).bfloat16())
    assert row_maximum(torch.empty(0, 5))[1].shape == (0,)
