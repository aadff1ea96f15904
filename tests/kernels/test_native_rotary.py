"""The rotation of heads in C++ with each instruction set, against the reference in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from paged_steps import (
    INSTRUCTION_SETS,
    KERNELS,
    kernels,
    needs_kernels,
    same_bytes,
    settings_restored,
    use_instruction_set,
)
from torch import Tensor

from moeserve.ops.interfaces import Rotation
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS

# T tokens, N heads, H head size, F rotated pairs

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with settings_restored():
        use_instruction_set(request.param)
        yield


def angles(num_tokens: int, num_pairs: int) -> tuple[Tensor, Tensor]:
    angles_TF = torch.randn(num_tokens, num_pairs) * 10
    return angles_TF.cos(), angles_TF.sin()


def exactly(heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool) -> Tensor:
    """Pair by pair, in float64."""
    turned = heads_TNH.double()
    num_pairs = cosines_TF.shape[1]
    for f in range(num_pairs):
        first, second = (2 * f, 2 * f + 1) if is_interleaved else (f, num_pairs + f)
        a, b = heads_TNH[..., first].double(), heads_TNH[..., second].double()
        cosine, sine = cosines_TF[:, f : f + 1].double(), sines_TF[:, f : f + 1].double()
        turned[..., first], turned[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return turned


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(25))
def test_heads_of_a_projection_turn_where_they_lie(seed: int, dtype: torch.dtype, is_interleaved: bool) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_pairs = draw.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 48, 64])
    num_tokens, num_heads = draw.choice([0, 1, 2, 5, 30]), draw.choice([1, 2, 5])
    before, behind = draw.choice([0, 5]), draw.choice([0, 3])
    # More heads and more elements of each than turn: all others must stay as they are.
    projected = torch.randn(num_tokens, num_heads + 2, before + 2 * num_pairs + behind).to(dtype)
    original = projected.clone()
    cosines_TF, sines_TF = angles(num_tokens, num_pairs)
    heads_TNH = projected[:, 1 : 1 + num_heads, before:]
    expected = exactly(heads_TNH, cosines_TF, sines_TF, is_interleaved)
    reference = TORCH_KERNELS.apply_rope(heads_TNH, Rotation(cosines_TF, sines_TF, is_interleaved))

    turned = KERNELS.apply_rope(heads_TNH, Rotation(cosines_TF, sines_TF, is_interleaved))
    assert turned.dtype == dtype
    if kernels is not None:
        assert turned.data_ptr() == heads_TNH.data_ptr()
    original[:, 1 : 1 + num_heads, before : before + 2 * num_pairs] = turned[..., : 2 * num_pairs]
    assert same_bytes(projected, original)
    if dtype == torch.float32:
        torch.testing.assert_close(turned.double(), expected, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(turned, reference, atol=2e-6, rtol=1e-6)
    else:
        assert ((turned.double() - expected).abs() <= expected.abs() * 2**-8 * 1.001 + 1e-6).all()  # rounded once


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(
    dtype: torch.dtype, is_interleaved: bool
) -> None:
    torch.manual_seed(0)
    heads_TNH = torch.randn(900, 3, 50).to(dtype)
    cosines_TF, sines_TF = angles(900, 21)

    def turned(tokens: slice) -> Tensor:
        return KERNELS.apply_rope(
            heads_TNH[tokens].clone(), Rotation(cosines_TF[tokens], sines_TF[tokens], is_interleaved)
        )

    set_num_threads(1)
    expected = turned(slice(None))
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        assert same_bytes(turned(slice(None)), expected)
    for tokens in (slice(0, 1), slice(899, 900), slice(7, 20)):
        assert same_bytes(turned(tokens), expected[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_result_in_a_part_of_something_wider(dtype: torch.dtype, is_interleaved: bool) -> None:
    """As latent attention has its queries: what turns is taken from one tensor's end, and goes to another's."""
    source_TNH, target_TNH = torch.randn(5, 3, 80).to(dtype), torch.randn(5, 3, 100).to(dtype)
    heads_TNH, out_TNH = source_TNH[..., 8:], target_TNH[..., 28:]
    before, left, turning = source_TNH.clone(), target_TNH[..., :28].clone(), heads_TNH.clone()
    angle_pairs = angles(5, 32)
    for kernel in (KERNELS.apply_rope, TORCH_KERNELS.apply_rope):
        result = kernel(heads_TNH, Rotation(*angle_pairs, is_interleaved), out_TNH)
        assert result.data_ptr() == out_TNH.data_ptr()
        torch.testing.assert_close(out_TNH, TORCH_KERNELS.apply_rope(turning, Rotation(*angle_pairs, is_interleaved)))
        assert same_bytes(source_TNH, before)
        assert same_bytes(target_TNH[..., :28], left)


def test_nan_stays_in_its_pair() -> None:
    heads_TNH = torch.randn(2, 3, 64)
    heads_TNH[1, 2, 5] = float("nan")
    turned = KERNELS.apply_rope(heads_TNH, Rotation(*angles(2, 32), False))
    assert turned.isnan().nonzero().tolist() == [[1, 2, 5], [1, 2, 37]]


def test_float16_is_the_reference() -> None:
    heads_TNH, (cosines_TF, sines_TF) = torch.randn(3, 2, 8).half(), angles(3, 4)
    expected = TORCH_KERNELS.apply_rope(heads_TNH, Rotation(cosines_TF, sines_TF, True))
    assert same_bytes(KERNELS.apply_rope(heads_TNH, Rotation(cosines_TF, sines_TF, True)), expected)


@needs_kernels
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("heads", lambda t: t[0], "3 dimensions"),
        ("heads", lambda t: t.half(), "float32 or bfloat16"),
        ("heads", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "heads is not contiguous"),
        ("heads", lambda t: t[..., :15], "less than 2"),
        ("cosines", lambda t: t[:, None], "cosines has shape"),
        ("cosines", lambda t: t[:2], "cosines has shape"),
        ("sines", lambda t: t[:, :7], "sines has shape"),
        ("cosines", lambda t: t.bfloat16(), "cosines is not of type float32"),
        ("sines", lambda t: t.double(), "sines is not of type float32"),
        ("sines", lambda t: torch.randn(3, 16)[:, ::2], "sines is not contiguous"),
        ("out", lambda t: t[..., :19], "out has shape"),
        ("out", lambda t: t.bfloat16(), "out is not of type heads'"),
        ("out", lambda t: torch.empty(3, 2, 40)[..., ::2], "out is not contiguous"),
    ],
)
def test_wrong_tensors_are_refused(argument: str, wrong: Callable[[Tensor], Tensor], message: str) -> None:
    tensors = dict(heads=torch.randn(3, 2, 20), cosines=torch.randn(3, 8), sines=torch.randn(3, 8))
    tensors["out"] = torch.empty(3, 2, 20)
    arguments = tensors | {argument: wrong(tensors[argument])}
    if argument == "heads" and arguments["heads"].dim() == 3:
        arguments["out"] = torch.empty_like(arguments["heads"])
    with pytest.raises(ValueError, match=message):
        kernels.apply_rope(is_interleaved=False, **arguments)
