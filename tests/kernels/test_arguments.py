"""Arguments that the C++ entry points refuse. The checks are the same for every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged_steps import kernels, make_step, needs_kernels, same_bytes, scatter_blocks
from torch import Tensor

pytestmark = needs_kernels

LENGTHS = [(1, 40), (2, 50)]
STEP = make_step(LENGTHS, scatter_blocks(LENGTHS, 16, seed=0), 16)
CACHES = dict(key_cache=torch.randn(10, 2, 16, 64), value_cache=torch.randn(10, 2, 16, 64))
SORT = dict(
    keys=torch.tensor([1, 0, -1]), first_key=0, num_known=2, order=torch.empty(3).long(), counts=torch.empty(2).long()
)
NORM: dict[str, Any] = dict(x=torch.randn(4, 40), weight=torch.randn(40), epsilon=1e-5, out=torch.randn(4, 40))
VALID: dict[str, dict[str, Any]] = dict(
    add=dict(a=torch.randn(3, 5), b=torch.randn(3, 5), out=torch.empty(3, 5)),
    gate_rows=dict(gates=torch.randn(3, 1), rows=torch.randn(3, 5), out=torch.empty(3, 5)),
    row_maximum=dict(rows=torch.randn(3, 5), largest=torch.empty(3), indices=torch.empty(3).long()),
    draw_tokens=dict(
        scores=torch.randn(3, 5),
        temperatures=torch.ones(3),
        top_k=torch.zeros(3).long(),
        top_p=torch.ones(3),
        min_p=torch.zeros(3),
        uniform=torch.rand(3).double(),
        tokens=torch.empty(3).long(),
    ),
    rms_norm=NORM,
    add_rms_norm=NORM | dict(update=torch.randn(4, 40), sum=torch.randn(4, 40)),
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
    add_counts=dict(counts=torch.ones(4).long(), totals=torch.zeros(4).long()),
    choose_copies=dict(
        experts=torch.tensor([[0, 1], [1, -1], [1, 0]]),
        copies=torch.arange(6).view(2, 3),
        num_copies=torch.tensor([1, 3]),
        first_token=1,
        chosen=torch.empty(3, 2).long(),
    ),
    gather_rows=dict(source=torch.randn(3, 4), indices=torch.tensor([5, 0]), divisor=2, out=torch.randn(2, 4)),
    scatter_rows=dict(source=torch.randn(2, 3), indices=torch.tensor([2, -1]), out=torch.empty(4, 3)),
    join_rows=dict(first=torch.zeros(2, 2).long(), second=torch.randn(2, 4), out=torch.empty(2, 8)),
    weighted_sum=dict(
        rows=torch.randn(3, 4), pair_of_row=torch.tensor([3, 0, 1]), weights=torch.rand(2, 2), out=torch.randn(2, 4)
    ),
    write_cache=dict(key=torch.randn(3, 2, 64), value=torch.randn(3, 2, 64), slots=torch.tensor([40, -1, 5]), **CACHES),
    paged_attention=dict(
        query=torch.randn(3, 4, 64),
        block_table=STEP.block_table,
        row_starts=STEP.row_starts,
        context_lens=STEP.context_lens,
        out=torch.zeros(3, 4, 64),
        scale=1.0,
        window=None,
        value_size=None,
        sinks=torch.zeros(4),
        **CACHES,
    ),
)
HARMLESS = {
    ("row_maximum", "rows", "narrower in 1"),
    ("draw_tokens", "scores", "narrower in 1"),
    ("scatter_rows", "out", "narrower in 0"),
    *((sort, "keys", "one more dimension") for sort in ("sort_pairs", "order_pairs")),
    *((sort, "counts", "narrower in 0") for sort in ("sort_pairs", "order_pairs")),
}


def wrong_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that do not fit the others: of another type, shape or number of dimensions, or not contiguous."""
    yield "another type", tensor.to(torch.float16 if tensor.is_floating_point() else torch.int16)
    yield "one more dimension", tensor[None]
    if tensor.ndim > 1:
        yield "one dimension less", tensor[0]
    for dim in range(tensor.ndim):
        if tensor.shape[dim] > 1:
            yield f"narrower in {dim}", tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()
    if tensor.shape[-1] > 1:
        yield "not contiguous", tensor.repeat_interleave(2, -1)[..., ::2]


def assert_refused(function: str, arguments: dict[str, Any], message: str | None = None) -> None:
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(**arguments)
    assert all(same_bytes(arguments[name], value) for name, value in before.items()), "memory was written"


@pytest.mark.parametrize("function", VALID)
def test_a_tensor_that_does_not_fit_is_refused(function: str) -> None:
    getattr(kernels, function)(**VALID[function])
    for name, value in VALID[function].items():
        for change, wrong in wrong_tensors(value) if isinstance(value, Tensor) else ():
            if (function, name, change) in HARMLESS:
                continue
            try:
                assert_refused(function, VALID[function] | {name: wrong})
            except BaseException as error:
                raise AssertionError(f"{name} with {change}") from error


@pytest.mark.parametrize(
    ("function", "argument", "wrong", "message"),
    [
        ("row_maximum", "rows", lambda t: t[:, :0], "no largest number"),
        ("draw_tokens", "scores", lambda t: t[:, :0], "have no tokens"),
        ("route", "num_groups", lambda n: 4, "num_groups=4 does not divide 6"),
        ("route", "num_groups", lambda n: 0, "num_groups=0"),
        ("route", "num_chosen_groups", lambda n: 3, "num_chosen_groups=3, but there are 2"),
        ("route", "experts_rating_group", lambda n: 3, "experts_rating_group=3"),
        ("route", "num_groups", lambda n: 6, "experts_rating_group=2"),
        ("route", "scoring", lambda n: "tanh", "scoring='tanh'"),
        ("sort_pairs", "keys", lambda t: torch.tensor([1, 2, 0]), "pair 1 has key 2, but there are 2"),
        ("sort_pairs", "keys", lambda t: torch.tensor([-2, 1, 0]), "pair 0 has key -2"),
        ("sort_pairs", "num_known", lambda n: 1, "of 1 keys, 2 from 0 on cannot be counted"),
        ("sort_pairs", "first_key", lambda n: -1, "2 from -1 on cannot be counted"),
        ("order_pairs", "keys", lambda t: torch.tensor([[1], [0], [2]]).int(), "pair 2 has key 2"),
        ("choose_copies", "first_token", lambda n: -1, "first_token=-1"),
        ("gather_rows", "indices", lambda t: torch.tensor([0, 6]), "row 1 comes from 6, but there are 6"),
        ("gather_rows", "indices", lambda t: torch.tensor([-2, 0]), "row 0 comes from -2"),
        ("gather_rows", "divisor", lambda n: 0, "divisor=0"),
        ("scatter_rows", "indices", lambda t: torch.tensor([4, 0]), "row 0 goes to 4, but there are 4"),
        ("scatter_rows", "indices", lambda t: torch.tensor([0, -2]), "row 1 goes to -2"),
        ("weighted_sum", "pair_of_row", lambda t: torch.tensor([4, 0, 1]), "row 0 belongs to pair 4"),
        ("weighted_sum", "pair_of_row", lambda t: torch.tensor([3, 0, -2]), "row 2 belongs to pair -2"),
        ("write_cache", "slots", lambda t: torch.tensor([3, 4, 160]), "has slot 160"),
        ("write_cache", "slots", lambda t: torch.tensor([3, 4, -2]), "has slot -2"),
        ("write_cache", "value", lambda t: None, "value and value_cache go together"),
        ("write_cache", "value_cache", lambda t: None, "value and value_cache go together"),
        ("paged_attention", "block_table", lambda t: t + 1000, "has block"),
        ("paged_attention", "block_table", lambda t: t - 1000, "has block -"),
        ("paged_attention", "row_starts", lambda t: t + 1, "but there are 3 tokens"),
        ("paged_attention", "row_starts", lambda t: t - 1, "but there are 3 tokens"),
        ("paged_attention", "row_starts", lambda t: t.flip(0), "but there are 3 tokens"),
        ("paged_attention", "context_lens", lambda t: -t, "context of -"),
        ("paged_attention", "window", lambda _: 0, "window=0"),
        ("paged_attention", "value_size", lambda _: 65, "value_size=65, but a row of the cache has 64"),
        ("paged_attention", "value_size", lambda _: -1, "value_size=-1"),
    ],
)
def test_wrong_values_are_refused(function: str, argument: str, wrong: Callable[[Any], Any], message: str) -> None:
    assert_refused(function, VALID[function] | {argument: wrong(VALID[function][argument])}, message)


def test_rotating_more_elements_than_a_head_has_is_refused() -> None:
    assert_refused(
        "apply_rope", VALID["apply_rope"] | dict(cosines=torch.randn(3, 11), sines=torch.randn(3, 11)), "less than 2"
    )


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"'mmx'.*{kernels.usable_isas()[-1]}"):
        kernels.set_isa("mmx")
    with pytest.raises(ValueError, match="num_threads=0"):
        kernels.set_num_threads(0)


def test_an_unknown_limit_of_instruction_sets_is_refused_with_the_names() -> None:
    command = [sys.executable, "-c", "from moeserve.ops.native import native_kernels; native_kernels()"]
    environment = os.environ | {"MOESERVE_ISA": "avx"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode != 0
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("moeserve.errors.SettingsError: MOESERVE_ISA=avx is no instruction set")
    assert all(name in last for name in kernels.usable_isas())
