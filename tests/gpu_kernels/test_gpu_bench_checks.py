"""The checks and timed calls of bench/gpu, in Triton's interpreter: the checks detect each operation that is broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable
from typing import Any

import attention_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve import triton_kernels as package
from moeserve.bench.gpu import expert_cases, kernels, layer_cases
from moeserve.bench.gpu.cases import CASES
from moeserve.bench.gpu.check import FLOAT32_SLACK, WRONG, Case, compare, run_check
from moeserve.bench.gpu.compiled import launches_of, untouched_source
from moeserve.bench.gpu.costs import GpuLimits, Work
from moeserve.bench.gpu.inputs import Source
from moeserve.ops.compressed_attention import CompressedCache
from moeserve.ops.indexer import ChosenEntries
from moeserve.ops.interfaces import Float8Rows, Kernels, KeyValueCache
from moeserve.ops.libraries.attention import open_library
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS

pytestmark = pytest.mark.usefixtures("torch_conversions")

CACHES = KeyValueCache, CompressedCache
FAULT = 1 + 1 / 16  # far less than a wrong row or scale
# With small shapes the checks of most models' products are alike.
# That of graphs needs a device: test_gpu_rehearsal.py.
DIFFERENT = [name for name in CASES if "products, " not in name or name.endswith(("Mixtral-8x7B", "gpt-oss-20b"))]
DIFFERENT.remove("graphs")
# Each operation of the table that is not torch's, as field and method, and the check that covers it.
OPERATIONS = [
    *((field, None, "norms") for field in ("rms_norm", "rms_norm_in_place", "add_rms_norm")),
    *((field, None, "norms") for field in ("quantize_rows", "quantize_rms_norm")),
    *((field, None, "tokens") for field in ("row_maximum", "choose_tokens")),
    ("apply_rope", None, "rotary embedding and cache writes"),
    ("make_router", "__call__", "routing"),
    ("make_linear_attention", "__call__", "linear attention"),
    ("make_short_convolution", "__call__", "short convolutions"),
    *(("make_compressed_attention", method, "compressed attention") for method in ("pool", "write", "attend")),
    *(("make_streams", method, "hyper-connections") for method in ("collapse", "expand")),
    *(("pairs", method, "pairs") for method in ("sort", "order", "gather", "scatter", "weighted_sum", "weigh")),
    ("make_attention", "attend", "attention"),
    ("make_attention", "rotate_and_write", "rotary embedding and cache writes"),
    *(("make_latent_attention", method, "latent attention") for method in ("write", "attend")),
    ("make_latent_attention", "attend_chosen", "chosen positions"),
    ("make_indexer", "__call__", "chosen positions"),
    ("make_latent_attention", "attend_expanded", "expanded attention"),
    *(
        ("make_product", method, f"products, {name}")
        for method in ("multiply_rows", "multiply_slots")
        for name in ("gpt-oss-20b", "fp8, Mixtral-8x7B", "mxfp4, gpt-oss-20b")
    ),
    ("make_product", "multiply", "products of one weight"),
]


def source(dtype: torch.dtype = torch.float32, seed: int = 1) -> Source:
    device = torch.device("cpu")
    return Source(device, torch.Generator(device).manual_seed(seed), dtype)


def run(name: str, table: Kernels = TRITON_KERNELS, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    drawn = source(dtype)
    cases = (case for operation in CASES[name] for case in operation.cases(drawn, operation.small))
    return run_check(cases, lambda: 1.0, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_right_kernels_pass(name: str, dtype: torch.dtype) -> None:
    row = run(name, dtype=dtype)
    assert row["status"] == "passed", row


def spoiled(value: Any) -> Any:
    """Return a result with a small error."""
    if isinstance(value, tuple):
        return tuple(map(spoiled, value))
    if isinstance(value, ChosenEntries):
        return dataclasses.replace(value, counts_T=value.counts_T - 1)
    if isinstance(value, Float8Rows):
        return dataclasses.replace(value, scales=spoiled(value.scales))
    if not value.is_floating_point():
        return value.flip(0)
    return value * FAULT


def broken(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation with a small error in its results, or in the tensors that it writes."""

    def call(*args: Any, **options: Any) -> Any:
        given = [each for arg in args for each in (vars(arg).values() if isinstance(arg, CACHES) else [arg])]
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


def test_every_kernel_is_checked_with_each_format() -> None:
    """Cases launch all kernels of the package, and those that read several formats with each of them."""
    drawn = untouched_source()
    makes = [
        make
        for name in [each for each in CASES if each != "graphs"]
        for operation in CASES[name]
        # Only many pairs are sorted by several kernels.
        for shapes in [(*operation.small, *(operation.large if name == "pairs" else ()))]
        for _, make in operation.cases(drawn, shapes)
    ]
    launches = launches_of(makes)
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]
    all_kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {launch.name for launch in launches} == all_kernels

    def dtypes(kernel: str, argument: str) -> set[torch.dtype]:
        return {each.arguments[argument].dtype for each in launches if each.name == kernel}

    assert dtypes("grouped_matmul_kernel", "weight_ptr") == {torch.bfloat16, torch.float8_e4m3fn, torch.uint8}
    for kernel in ("attend_tile_kernel", "attend_split_kernel", "rotary_with_cache_write_kernel"):
        assert dtypes(kernel, "key_cache_ptr") == {torch.bfloat16, torch.uint8}
    assert dtypes("chunked_matmul_kernel", "weight_ptr") == {torch.bfloat16, torch.float32}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a stand-in for another library, and return its label."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    found = open_library("flashinfer", torch.device("cpu"))
    monkeypatch.setattr(layer_cases, "installed_libraries", lambda device: (found,))
    return found.label


def test_installed_libraries_are_checked_and_timed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the same inputs as our kernels."""
    check = "attention of other libraries"
    drawn = source(torch.float16)  # bfloat16 is wrong in the interpreter
    made = [make() for each in CASES[check] for _, make in each.cases(drawn, each.small)]
    assert len([case for case in made if library in case.others]) == 5  # steps and block sizes
    row = kernels.measure(next(case for case in made if case.others), TRITON_KERNELS, OneCall(), LIMITS)
    assert row["others"][library]["seconds"] == 1e-3
    assert row["fastest"] == "triton"
    assert run(check, dtype=torch.float16)["status"] == "passed"
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    wrong = run(check, dtype=torch.float16)["wrong"]
    assert len(wrong) == 5
    assert all(library in each for each in wrong)


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
    (operation, *_) = CASES["norms"]
    row = run_check(operation.cases(source(), operation.small), lambda: 0.0)
    assert (row["num_cases"], row["status"]) == (1, "passed")
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


LIMITS = GpuLimits(1e12, 1e14, 2e14)


class OneCall:
    """A timer that calls once."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return 1e-3


def test_everything_that_is_timed_runs() -> None:
    timer = OneCall()
    cases = list(kernels.timed_cases(source(torch.bfloat16), is_small=True))
    rows = {name: kernels.measure(make(), TRITON_KERNELS, timer, LIMITS) for name, make in cases}
    assert len(rows) == len(cases)
    assert timer.num_calls == len(rows) + sum(len(row["others"]) for row in rows.values())
    assert {name for name, row in rows.items() if any("error" in other for other in row["others"].values())} <= {
        "experts, bf16, small, clamped, 4"  # torch needs rows of multiples of 16 bytes
    }
    for row in rows.values():
        assert row["bytes"] > 0
        assert row["lines"][0].startswith("1,000.0 us")
    experts = rows["experts, bf16, small, 1"]
    assert "2 of 3 experts have rows" in experts["lines"]
    assert [bar["is_met"] for bar in experts["bars"]] == [False]
    assert set(experts["others"]) == {"torch grouped_mm"}
    assert rows["rms_norm, 3, 40"]["bytes"] == 2 * (3 * 40 + 40 + 3 * 40)


def test_other_implementation_that_fails_is_recorded() -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel for this shape")

    case = Case(lambda kernels: None, (), beside={"other": refuse}, work=Work(1.0))
    row = kernels.measure(case, TRITON_KERNELS, OneCall(), GpuLimits(1.0, 1.0, 1.0))
    assert "no kernel for this shape" in row["others"]["other"]["error"]


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

    monkeypatch.setattr(expert_cases, "sglang_experts", lambda device: fused_experts_impl)
    case = expert_cases.experts(source(), "bf16", "small", 6)
    assert dict(case.ratios(TRITON_KERNELS))["sglang"] <= 1
    assert used == [{"filter_expert": False}]
    assert "sglang" in expert_cases.experts(source(), "fp8", "small blocks", 6).others
    assert "sglang" not in expert_cases.experts(source(), "bf16", "small, clamped", 1).others
