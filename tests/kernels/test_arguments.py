"""Arguments that the C++ entry points refuse. The checks are the same for every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_steps import kernels, make_step, needs_kernels, same_bytes, scatter_blocks

pytestmark = needs_kernels


def attention_arguments() -> dict[str, Any]:
    lengths = [(1, 40), (2, 50)]
    step = make_step(lengths, scatter_blocks(lengths, 16, seed=0), 16)
    return dict(
        query=torch.randn(3, 4, 64),
        key_cache=torch.randn(10, 2, 16, 64),
        value_cache=torch.randn(10, 2, 16, 64),
        block_table=step.block_table,
        row_starts=step.row_starts,
        context_lens=step.context_lens,
        out=torch.zeros(3, 4, 64),
        scale=1.0,
        window=None,
        value_size=None,
        sinks=torch.zeros(4),
    )


def norm_arguments() -> dict[str, Any]:
    return {name: torch.randn(4, 40) for name in ("x", "update", "sum", "out")} | dict(
        weight=torch.randn(40), epsilon=1e-5
    )


SORT = dict(
    keys=torch.tensor([1, 0, -1]), first_key=0, num_known=2, order=torch.empty(3).long(), counts=torch.empty(2).long()
)
VALID: dict[str, dict[str, Any]] = dict(
    add=dict(a=torch.randn(3, 5), b=torch.randn(3, 5), out=torch.empty(3, 5)),
    gate_rows=dict(gates=torch.randn(3, 1), rows=torch.randn(3, 5), out=torch.empty(3, 5)),
    row_maximum=dict(rows=torch.randn(3, 5), largest=torch.empty(3), indices=torch.empty(3).long()),
    add_rms_norm=norm_arguments(),
    apply_rope=dict(
        heads=torch.randn(3, 2, 20),
        cosines=torch.randn(3, 8),
        sines=torch.randn(3, 8),
        is_interleaved=False,
        out=torch.empty(3, 2, 20),
    ),
    route=dict(
        hidden=torch.randn(3, 20),
        weight=torch.randn(6, 20),
        bias=torch.randn(6),
        correction=torch.randn(6),
        experts=torch.empty(3, 2).long(),
        weights=torch.empty(3, 2),
        scoring="softmax",
        num_groups=2,
        num_chosen_groups=1,
        experts_rating_group=2,
        is_normalized=False,
        scale=1.0,
    ),
    sort_pairs=SORT,
    order_pairs=SORT,
    gather_rows=dict(source=torch.randn(3, 4), indices=torch.tensor([5, 0]), divisor=2, out=torch.randn(2, 4)),
    scatter_rows=dict(source=torch.randn(2, 3), indices=torch.tensor([2, -1]), out=torch.empty(4, 3)),
    join_rows=dict(first=torch.zeros(2, 2).long(), second=torch.randn(2, 4), out=torch.empty(2, 8)),
    weighted_sum=dict(
        rows=torch.randn(3, 4), pair_of_row=torch.tensor([3, 0, 1]), weights=torch.rand(2, 2), out=torch.randn(2, 4)
    ),
    paged_attention=attention_arguments(),
)


@pytest.mark.parametrize("function", VALID)
def test_valid_arguments_are_accepted(function: str) -> None:
    getattr(kernels, function)(**VALID[function])


@pytest.mark.parametrize(
    ("function", "argument", "wrong", "message"),
    [
        ("add", "a", lambda t: t[0], "a has shape"),
        ("add", "a", lambda t: t.half(), "float32 or bfloat16"),
        ("add", "a", lambda t: torch.empty(3, 10)[:, ::2], "a is not contiguous"),
        ("add", "b", lambda t: t[:2], "b has shape"),
        ("add", "b", lambda t: t.bfloat16(), "b is not of type a's"),
        ("add", "out", lambda t: t[:, :4], "out has shape"),
        ("add", "out", lambda t: torch.empty(3, 10)[:, ::2], "out is not contiguous"),
        ("gate_rows", "gates", lambda t: t[:2], "gates has shape"),
        ("gate_rows", "gates", lambda t: t.bfloat16(), "gates is not of type rows'"),
        ("gate_rows", "rows", lambda t: t.half(), "float32 or bfloat16"),
        ("gate_rows", "rows", lambda t: torch.empty(3, 10)[:, ::2], "rows is not contiguous"),
        ("gate_rows", "out", lambda t: t[:, :4], "out has shape"),
        ("gate_rows", "out", lambda t: torch.empty(3, 10)[:, ::2], "out is not contiguous"),
        ("row_maximum", "rows", lambda t: t.half(), "float32 or bfloat16"),
        ("row_maximum", "rows", lambda t: torch.randn(5, 3).t(), "rows is not contiguous"),
        ("row_maximum", "rows", lambda t: t[:, :0], "no largest number"),
        ("row_maximum", "largest", lambda t: t[:2], "largest has shape"),
        ("row_maximum", "indices", lambda t: t.int(), "indices is not of type int64"),
        ("add_rms_norm", "x", lambda t: t[0], "x has shape .*, expected 3 dimensions"),
        ("add_rms_norm", "x", lambda t: t.half(), "x is not of type float32 or bfloat16"),
        ("add_rms_norm", "x", lambda t: t.t().contiguous().t(), "x is not contiguous"),
        ("add_rms_norm", "x", lambda t: t[:3], r"update has shape \[4, 40\], expected \[3, 40\]|out has shape"),
        ("add_rms_norm", "update", lambda t: t[:, :39], "update has shape"),
        ("add_rms_norm", "update", lambda t: t.bfloat16(), "update is not of type x's"),
        ("add_rms_norm", "weight", lambda t: t[:39], "weight has shape"),
        ("add_rms_norm", "weight", lambda t: t.bfloat16(), "weight is not of type x's"),
        ("add_rms_norm", "weight", lambda t: torch.randn(80)[::2], "weight is not contiguous"),
        ("add_rms_norm", "sum", lambda t: t[:, None], "sum has shape"),
        ("add_rms_norm", "out", lambda t: t.double(), "out is not of type x's"),
        ("add_rms_norm", "out", lambda t: t.t().contiguous().t(), "out is not contiguous"),
        ("apply_rope", "heads", lambda t: t[0], "3 dimensions"),
        ("apply_rope", "heads", lambda t: t.half(), "float32 or bfloat16"),
        ("apply_rope", "heads", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "heads is not contiguous"),
        ("apply_rope", "cosines", lambda t: t[:, None], "cosines has shape"),
        ("apply_rope", "cosines", lambda t: t[:2], "cosines has shape"),
        ("apply_rope", "sines", lambda t: t[:, :7], "sines has shape"),
        ("apply_rope", "cosines", lambda t: t.bfloat16(), "cosines is not of type float32"),
        ("apply_rope", "sines", lambda t: t.double(), "sines is not of type float32"),
        ("apply_rope", "sines", lambda t: torch.randn(3, 16)[:, ::2], "sines is not contiguous"),
        ("apply_rope", "out", lambda t: t[..., :19], "out has shape"),
        ("apply_rope", "out", lambda t: t.bfloat16(), "out is not of type heads'"),
        ("apply_rope", "out", lambda t: torch.empty(3, 2, 40)[..., ::2], "out is not contiguous"),
        ("route", "hidden", lambda t: t[0], "2 dimensions"),
        ("route", "hidden", lambda t: t.half(), "float32 or bfloat16"),
        ("route", "hidden", lambda t: t.t().contiguous().t(), "hidden is not contiguous"),
        ("route", "hidden", lambda t: t[:, :19], "weight has shape"),
        ("route", "weight", lambda t: t.bfloat16(), "weight is not of type float32"),
        ("route", "weight", lambda t: t.t().contiguous().t(), "weight is not contiguous"),
        ("route", "bias", lambda t: t[:5], "bias has shape"),
        ("route", "correction", lambda t: t.double(), "correction is not of type float32"),
        ("route", "experts", lambda t: t[:2], "experts has shape"),
        ("route", "experts", lambda t: t.int(), "experts is not of type int64"),
        ("route", "weights", lambda t: t[:, :1], "weights has shape"),
        ("route", "weights", lambda t: t.double(), "weights is not of type float32"),
        ("route", "num_groups", lambda n: 4, "num_groups=4 does not divide 6"),
        ("route", "num_groups", lambda n: 0, "num_groups=0"),
        ("route", "num_chosen_groups", lambda n: 3, "num_chosen_groups=3, but there are 2"),
        ("route", "experts_rating_group", lambda n: 3, "experts_rating_group=3"),
        ("route", "num_groups", lambda n: 6, "experts_rating_group=2"),
        ("route", "scoring", lambda n: "tanh", "scoring='tanh'"),
        ("sort_pairs", "keys", lambda t: t.double(), "keys is not of type int32 or int64"),
        ("sort_pairs", "keys", lambda t: torch.zeros(6, dtype=torch.int64)[::2], "keys is not contiguous"),
        ("sort_pairs", "keys", lambda t: torch.tensor([1, 2, 0]), "pair 1 has key 2, but there are 2"),
        ("sort_pairs", "keys", lambda t: torch.tensor([-2, 1, 0]), "pair 0 has key -2"),
        ("sort_pairs", "num_known", lambda n: 1, "of 1 keys, 2 from 0 on cannot be counted"),
        ("sort_pairs", "first_key", lambda n: -1, "2 from -1 on cannot be counted"),
        ("sort_pairs", "order", lambda t: t[:2], "order has shape"),
        ("sort_pairs", "counts", lambda t: t[:, None], "1 dimensions"),
        ("gather_rows", "source", lambda t: t.t().contiguous().t(), "source is not contiguous"),
        ("gather_rows", "indices", lambda t: torch.tensor([0, 6]), "row 1 comes from 6, but there are 6"),
        ("gather_rows", "indices", lambda t: torch.tensor([-2, 0]), "row 0 comes from -2"),
        ("gather_rows", "divisor", lambda n: 0, "divisor=0"),
        ("gather_rows", "out", lambda t: t[:, :3], "out has shape"),
        ("gather_rows", "out", lambda t: t.bfloat16(), "out is not of type source's"),
        ("order_pairs", "keys", lambda t: t.double(), "keys is not of type int32 or int64"),
        ("order_pairs", "keys", lambda t: torch.tensor([[1], [0], [2]]).int(), "pair 2 has key 2"),
        ("order_pairs", "keys", lambda t: t[None, :2], "order has shape"),
        ("scatter_rows", "indices", lambda t: torch.tensor([4, 0]), "row 0 goes to 4, but there are 4"),
        ("scatter_rows", "indices", lambda t: torch.tensor([0, -2]), "row 1 goes to -2"),
        ("scatter_rows", "indices", lambda t: t[:1], "indices has shape"),
        ("scatter_rows", "out", lambda t: t.half(), "out is not of type source's"),
        ("scatter_rows", "out", lambda t: t[:, :2], "out has shape"),
        ("join_rows", "second", lambda t: t[:1], "second has shape"),
        ("join_rows", "first", lambda t: t.t(), "first is not contiguous"),
        ("join_rows", "out", lambda t: t[:, :7].contiguous(), "does not fit rows of 16 . 16 bytes"),
        ("weighted_sum", "rows", lambda t: t.half(), "rows is not of type float32 or bfloat16"),
        ("weighted_sum", "pair_of_row", lambda t: torch.tensor([4, 0, 1]), "row 0 belongs to pair 4"),
        ("weighted_sum", "pair_of_row", lambda t: torch.tensor([3, 0, -1]), "row 2 belongs to pair -1"),
        ("weighted_sum", "pair_of_row", lambda t: t[:2], "pair_of_row has shape"),
        ("weighted_sum", "weights", lambda t: t.bfloat16(), "weights is not of type float32"),
        ("weighted_sum", "weights", lambda t: t.t(), "weights is not contiguous"),
        ("weighted_sum", "out", lambda t: t.bfloat16(), "out is not of type rows'"),
        ("paged_attention", "query", lambda t: t[:, :3], "does not fit key_cache"),
        ("paged_attention", "query", lambda t: t[..., :32].contiguous(), "does not fit key_cache"),
        ("paged_attention", "query", lambda t: t.half(), "float32 or bfloat16"),
        ("paged_attention", "query", lambda t: t[0], "3 dimensions"),
        ("paged_attention", "query", lambda t: torch.cat([t, t], dim=-1)[..., ::2], "query is not contiguous"),
        ("paged_attention", "key_cache", lambda t: t.bfloat16(), "value_cache is not of type"),
        ("paged_attention", "value_cache", lambda t: t[1:], "value_cache has shape"),
        (
            "paged_attention",
            "key_cache",
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "key_cache is not contiguous",
        ),
        ("paged_attention", "block_table", lambda t: t.long(), "block_table is not of type int32"),
        ("paged_attention", "block_table", lambda t: t + 1000, "has block"),
        ("paged_attention", "block_table", lambda t: t - 1000, "has block -"),
        ("paged_attention", "block_table", lambda t: t[:, :2].contiguous(), "its blocks hold 32"),
        ("paged_attention", "row_starts", lambda t: t[1:], "row_starts has shape"),
        ("paged_attention", "row_starts", lambda t: t + 1, "but there are 3 tokens"),
        ("paged_attention", "row_starts", lambda t: t - 1, "but there are 3 tokens"),
        ("paged_attention", "row_starts", lambda t: t.flip(0), "but there are 3 tokens"),
        ("paged_attention", "context_lens", lambda t: t.long(), "context_lens is not of type int32"),
        ("paged_attention", "context_lens", lambda t: -t, "context of -"),
        ("paged_attention", "out", lambda t: t[:2], "out has shape"),
        ("paged_attention", "window", lambda _: 0, "window=0"),
        ("paged_attention", "sinks", lambda t: t[:3], "sinks has shape"),
        ("paged_attention", "sinks", lambda t: t[:, None], "sinks has shape"),
        ("paged_attention", "sinks", lambda t: t.bfloat16(), "sinks is not of type float32"),
        ("paged_attention", "sinks", lambda t: t.repeat_interleave(2)[::2], "sinks is not contiguous"),
        ("paged_attention", "value_size", lambda _: 65, "value_size=65, but a row of the cache has 64"),
        ("paged_attention", "value_size", lambda _: -1, "value_size=-1"),
        ("paged_attention", "value_size", lambda _: 63, "out has shape"),
    ],
)
def test_wrong_arguments_are_refused(function: str, argument: str, wrong: Callable[[Any], Any], message: str) -> None:
    arguments = dict(VALID[function]) | {argument: wrong(VALID[function][argument])}
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(**arguments)
    assert all(same_bytes(arguments[name], value) for name, value in before.items()), "memory was written"


def test_rotating_more_elements_than_a_head_has_is_refused() -> None:
    arguments = VALID["apply_rope"] | dict(cosines=torch.randn(3, 11), sines=torch.randn(3, 11))
    with pytest.raises(ValueError, match="less than 2"):
        kernels.apply_rope(**arguments)
