"""The checks and timed calls of bench/gpu, in Triton's interpreter: the checks detect each operation that is broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import attention_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve.bench.gpu import checks, costs, kernels
from moeserve.bench.gpu.check import FLOAT32_SLACK, WRONG, compare, run_check
from moeserve.bench.gpu.checks import CHECKS
from moeserve.bench.gpu.costs import GpuLimits, LatentShape, MoEShape, attention_shape
from moeserve.bench.gpu.inputs import Source
from moeserve.ops.interfaces import ClampedSwiGLU, Float8Rows, Kernels, KeyValueCache
from moeserve.ops.libraries.attention import open_library
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS

pytestmark = pytest.mark.usefixtures("torch_conversions")

FAULT = 1 + 1 / 16  # far less than a wrong row or scale
# With small shapes the checks of most models' products are alike.
# That of graphs needs a device: test_gpu_rehearsal.py.
DIFFERENT = [name for name in CHECKS if "products" not in name or name.endswith(("Mixtral-8x7B", "gpt-oss-20b"))]
DIFFERENT.remove("graphs")
# Each operation of the table that is not torch's, as field and method, and the check that covers it.
OPERATIONS = [
    *((field, None, "norms") for field in ("rms_norm", "rms_norm_in_place", "add_rms_norm")),
    *((field, None, "norms") for field in ("quantize_rows", "quantize_rms_norm")),
    *((field, None, "tokens") for field in ("row_maximum", "choose_tokens")),
    ("apply_rope", None, "rotary embedding and cache writes"),
    ("make_router", "__call__", "routing"),
    ("make_gated_delta", "__call__", "gated delta networks"),
    *(("pairs", method, "pairs") for method in ("sort", "order", "gather", "scatter", "weighted_sum", "weigh")),
    ("make_attention", "attend", "attention"),
    ("make_attention", "rotate_and_write", "rotary embedding and cache writes"),
    *(("make_latent_attention", method, "latent attention") for method in ("write", "attend")),
    ("make_latent_attention", "attend_expanded", "expanded attention"),
    *(
        ("make_product", method, f"products, {name}")
        for method in ("multiply", "multiply_rows", "multiply_slots")
        for name in ("gpt-oss-20b", "fp8, Mixtral-8x7B")
    ),
]


def source(dtype: torch.dtype = torch.float32, seed: int = 1) -> Source:
    device = torch.device("cpu")
    return Source(device, torch.Generator(device).manual_seed(seed), dtype)


def run(name: str, table: Kernels = TRITON_KERNELS, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return run_check(CHECKS[name], source(dtype), lambda: 1.0, is_small=True, kernels=table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_right_kernels_pass(name: str, dtype: torch.dtype) -> None:
    row = run(name, dtype=dtype)
    assert row["status"] == ("left out" if name == "attention of other libraries" else "passed"), row


def spoiled(value: Any) -> Any:
    """Return a result with a small error."""
    if isinstance(value, tuple):
        return tuple(map(spoiled, value))
    if isinstance(value, Float8Rows):
        return dataclasses.replace(value, scales=spoiled(value.scales))
    if not value.is_floating_point():
        return value.flip(0)
    return value * FAULT


def broken(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation with a small error in its results, or in the tensors that it writes."""

    def call(*args: Any, **options: Any) -> Any:
        given = [each for arg in args for each in (vars(arg).values() if isinstance(arg, KeyValueCache) else [arg])]
        tensors = [each for each in given if isinstance(each, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = operation(*args, **options)
        for tensor, old in zip(tensors, before, strict=True):
            if result is None and not torch.equal(tensor, old):
                tensor.mul_(FAULT)
        return None if result is None else spoiled(result)

    return call


class Broken:
    """An object with one method broken."""

    def __init__(self, right: Any, method: str) -> None:
        self._right = right
        setattr(self, method, broken(getattr(right, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def __call__(self, *args: Any) -> Any:
        return self.__dict__["__call__"](*args)


def with_fault(field: str, method: str | None) -> Kernels:
    right: Any = getattr(TRITON_KERNELS, field)
    if method is None:
        wrong: Any = broken(right)
    elif field.startswith("make_"):
        wrong = lambda *args: Broken(right(*args), method)  # noqa: E731
    else:
        wrong = Broken(right, method)
    return dataclasses.replace(TRITON_KERNELS, **{field: wrong})


@pytest.mark.parametrize(("field", "method", "check"), OPERATIONS)
def test_small_error_of_an_operation_is_detected(field: str, method: str | None, check: str) -> None:
    assert run(check, with_fault(field, method))["wrong"]


def test_every_operation_is_checked() -> None:
    """Fields of the table that hold other callables or objects than torch's."""
    own = {
        field.name
        for field in dataclasses.fields(Kernels)
        if getattr(TRITON_KERNELS, field.name) is not getattr(TORCH_KERNELS, field.name)
        and not isinstance(getattr(TRITON_KERNELS, field.name), (bool, str))
    }
    assert own == {field for field, _, _ in OPERATIONS}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for other libraries."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    found = [open_library("flashinfer", torch.device("cpu"))]
    for module in (checks, kernels):
        monkeypatch.setattr(module, "installed_libraries", lambda device: tuple(found))
    monkeypatch.setattr(checks, "SMALL_ATTENTION", {"windowed": attention_shape(4, 2, 64, window=11)})


def test_installed_libraries_are_checked(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check = "attention of other libraries"
    names = [case.name for case in CHECKS[check](source(torch.float16), True)]
    assert len([name for name in names if "flashinfer 1.2.3" in name]) == 5, names  # steps and block sizes
    assert run(check, dtype=torch.float16)["status"] == "passed"
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    assert len(run(check, dtype=torch.float16)["wrong"]) == len(names)


def test_libraries_are_timed_on_the_same_caches(libraries: None) -> None:
    half = source(torch.float16)  # bfloat16 is wrong in the interpreter
    for chunks in ([(1, 20), (1, 20)], [(4, 20), (4, 20)]):
        calls = kernels.attention_calls(half, attention_shape(4, 2, 64, window=7), chunks)
        assert [label.split()[0] for label in calls] == ["triton", "flashinfer"]
        own, *others = (call() for call in calls.values())
        for other in others:
            torch.testing.assert_close(other, own, atol=4e-3, rtol=4e-3)
    sinks = kernels.attention_calls(half, attention_shape(4, 2, 64, has_sinks=True), [(4, 20)])
    assert list(sinks) == ["triton"], "no other takes sinks in chunks"


@pytest.mark.parametrize("message", ["out of resources: shared memory", "CUDA error: an illegal memory access"])
def test_kernel_that_raises_fails_its_check(message: str) -> None:
    def refuse(*args: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError(message)

    table = dataclasses.replace(TRITON_KERNELS, row_maximum=refuse)
    if message.startswith("CUDA error"):  # the process cannot use the GPU any more
        with pytest.raises(RuntimeError, match="CUDA error"):
            run("tokens", table)
    else:
        row = run("tokens", table)
        assert row["status"] == "failed"
        assert message in row["error"]


def test_check_stops_when_its_time_is_over() -> None:
    row = run_check(CHECKS["norms"], source(), lambda: 0.0, is_small=True)
    assert (row["num_cases"], row["status"]) == (3, "passed")
    assert "left_out" in row


def test_comparison_detects_nan_shapes_single_and_systematic_errors() -> None:
    exact = torch.randn(10, 100, generator=torch.Generator().manual_seed(0))
    actual = exact.bfloat16()
    assert compare(actual, exact) <= 1
    assert compare(actual[1:], exact) == WRONG
    for bad in (math.nan, math.inf, -math.inf):
        assert compare(actual.index_fill(0, torch.tensor(3), bad), exact) > 1
    single = actual.clone()
    single[3, 7] += 1.0
    assert compare(single, exact) > 1
    assert compare(actual * (1 + FLOAT32_SLACK + 3 * torch.finfo(torch.bfloat16).eps), exact) > 1
    small_row = exact * torch.logspace(0, -6, 10)[:, None]  # a wrong row of small numbers
    wrong = small_row.bfloat16()
    wrong[-1] = wrong[-1].flip(0)
    assert compare(wrong, small_row) > 1
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])) == WRONG


class OneCall:
    """A timer that calls once."""

    def __init__(self) -> None:
        self.num_calls = 0

    def seconds(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return 1e-3

    seconds_without_graph = seconds


def test_everything_that_is_timed_runs() -> None:
    clamped = MoEShape(3, 160, 48, 2, ClampedSwiGLU(alpha=1.702, limit=7.0), has_bias=True)
    sizes = kernels.Sizes(
        moe={"a": MoEShape(3, 32, 16, 2), "b": clamped},
        attention={"Mixtral-8x7B": attention_shape(4, 2, 16), "c": attention_shape(4, 2, 16, window=7, has_sinks=True)},
        latent={"d": LatentShape(3, 16, 8)},
        vocab={"e": 40},
        num_tokens=(1,),
        decode_batches=((2, 20),),
        prefill_rows=20,
        latent_rows=3,
        row_counts=(2,),
        width=64,
        expert_width=48,
    )
    timer: Any = OneCall()
    limits = GpuLimits(1e12, 1e14, 2e14)
    items = list(kernels.items(source(torch.bfloat16), sizes))
    rows = {name: kernels.measure(make(), timer, limits) for name, make in items}
    assert len(rows) == len(items)
    assert timer.num_calls == len(rows) + sum(len(row["others"]) for row in rows.values())
    assert not [(name, other) for name, row in rows.items() for other in row["others"].values() if "error" in other]
    for row in rows.values():
        assert row["bytes"] > 0
        assert row["lines"][0].startswith("1,000.0 us")
    experts = rows["experts bf16 a, 1 tokens"]
    assert "2 of 3 experts have rows" in experts["lines"]
    assert [bar["is_met"] for bar in experts["bars"]] == [False]
    assert set(experts["others"]) == {"torch grouped_mm", "transformers"}


def test_other_implementation_that_fails_is_recorded() -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel for this shape")

    timed = kernels.Timed(lambda: None, costs.Work(1.0), others={"other": refuse})
    timer: Any = OneCall()
    row = kernels.measure(timed, timer, GpuLimits(1.0, 1.0, 1.0))
    assert "no kernel for this shape" in row["others"]["other"]["error"]


def test_timed_calls_compute_the_same_as_those_beside_them() -> None:
    sizes = kernels.Sizes(moe={"a": MoEShape(5, 32, 16, 2)}, num_tokens=(6,), row_counts=(3,), width=64)
    names = ("experts bf16", "rms_norm", "add_rms_norm", "silu_multiply", "weigh", "row_maximum")
    checked = set()
    for name, make in kernels.items(source(), sizes):  # the interpreter's products in bfloat16 are wrong
        if name.startswith(names):
            timed: Any = make()
            own = timed.call()
            others = timed.others | timed.eager_others
            others.pop("torch grouped_mm", None)  # without the order of pairs and the sum
            for other in others.values():
                checked.add(name.split()[0].rstrip(","))
                used = 3 if name.startswith("weigh") else None
                torch.testing.assert_close(own[:used], other()[:used], atol=1e-4, rtol=1e-4)
    assert checked == {name.split()[0] for name in names}


def test_experts_of_sglang_get_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the arguments of `fused_experts_impl` in SGLang 0.5.23 computes what our kernels do."""
    used: list[dict[str, Any]] = []

    def fused_experts_impl(
        hidden_TD: Tensor, w1: Tensor, w2: Tensor, weights_TK: Tensor, ids_TK: Tensor, **options: Any
    ) -> Tensor:
        used.append(options)
        total = torch.zeros_like(hidden_TD)
        for place in range(ids_TK.shape[1]):
            gate, up = torch.einsum("td,tod->to", hidden_TD, w1[ids_TK[:, place]]).chunk(2, dim=1)
            middle = torch.nn.functional.silu(gate) * up
            total += weights_TK[:, place, None] * torch.einsum("tc,tdc->td", middle, w2[ids_TK[:, place]])
        return total

    monkeypatch.setattr(kernels, "sglang_experts", lambda device: fused_experts_impl)
    sizes = kernels.Sizes(moe={"a": MoEShape(5, 128, 128, 2)}, num_tokens=(6,))
    timed = dict(kernels.items(source(), sizes))["experts bf16 a, 6 tokens"]()
    own: Any = timed.call()
    torch.testing.assert_close(own, timed.others["sglang"](), atol=1e-4, rtol=1e-4)
    assert "sglang" in dict(kernels.items(source(), sizes))["experts fp8 a, 6 tokens"]().others
    assert used == [{"filter_expert": False}]
    clamped = MoEShape(3, 160, 48, 2, ClampedSwiGLU(alpha=1.702, limit=7.0))
    sizes = kernels.Sizes(moe={"a": clamped}, num_tokens=(1,))
    assert "sglang" not in dict(kernels.items(source(), sizes))["experts bf16 a, 1 tokens"]().others
