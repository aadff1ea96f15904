"""The checks and timed calls of bench/gpu, in Triton's interpreter: the checks detect each operation that is broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import attention_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve import triton_kernels as package
from moeserve.bench.gpu import attention_cases, kernels
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
LIMITS = GpuLimits(1e12, 1e14, 2e14)
# With small shapes the checks of most models' products are alike. Graphs need a device.
DIFFERENT = [name for name in CASES if "products, " not in name or name.endswith(("Mixtral-8x7B", "gpt-oss-20b"))]
DIFFERENT.remove("graphs")
# The operations of the table that are not torch's, as field and method, by the check that covers them.
OPERATIONS: dict[str, list[tuple[str, str | None]]] = {
    "norms": [
        *(("rms_norm", None), ("rms_norm_in_place", None), ("add_rms_norm", None)),
        *(("quantize_rows", None), ("quantize_rms_norm", None)),
    ],
    "tokens": [("row_maximum", None), ("choose_tokens", None)],
    "rotary embedding and cache writes": [("apply_rope", None), ("make_attention", "rotate_and_write")],
    "routing": [("make_router", "__call__")],
    "linear attention": [("make_linear_attention", "__call__")],
    "short convolutions": [("make_short_convolution", "__call__")],
    "compressed attention": [("make_compressed_attention", method) for method in ("pool", "write", "attend")],
    "hyper-connections": [("make_streams", "collapse"), ("make_streams", "expand")],
    "pairs": [("pairs", method) for method in ("sort", "order", "gather", "scatter", "weighted_sum", "weigh")],
    "attention": [("make_attention", "attend")],
    "latent attention": [("make_latent_attention", "attend")],
    "chosen positions": [
        *(("make_latent_attention", "write"), ("make_latent_attention", "attend_chosen"), ("make_indexer", "__call__"))
    ],
    "expanded attention": [("make_latent_attention", "attend_expanded")],
    **{
        f"products, {name}": [("make_product", "multiply_rows"), ("make_product", "multiply_slots")]
        for name in ("gpt-oss-20b", "fp8, Mixtral-8x7B", "mxfp4, gpt-oss-20b")
    },
    "products of one weight": [("make_product", "multiply")],
}


def small_cases(name: str, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Callable[[], Case]]]:
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(1), dtype)
    return (case for operation in CASES[name] for case in operation.cases(source, operation.small))


def run(name: str, table: Kernels = TRITON_KERNELS, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return run_check(small_cases(name, dtype), lambda: 1.0, table)


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
    return value * FAULT if value.is_floating_point() else value.flip(0)


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


@pytest.mark.parametrize(
    ("check", "field", "method"), [(name, *each) for name in OPERATIONS for each in OPERATIONS[name]]
)
def test_small_error_of_an_operation_is_detected(check: str, field: str, method: str | None) -> None:
    right: Any = getattr(TRITON_KERNELS, field)
    if method is None:
        wrong: Any = broken(right)
    elif field.startswith("make_"):
        wrong = lambda *args: Broken(right(*args), method)  # noqa: E731
    else:
        wrong = Broken(right, method)
    table = dataclasses.replace(TRITON_KERNELS, **{field: wrong})
    assert any(ratio > 1 for _, make in small_cases(check) for _, ratio in make().ratios(table))


def test_every_operation_is_checked() -> None:
    """Fields of the table that hold other callables or objects than torch's."""
    own = {
        field.name
        for field in dataclasses.fields(Kernels)
        if getattr(TRITON_KERNELS, field.name) is not getattr(TORCH_KERNELS, field.name)
        and not isinstance(getattr(TRITON_KERNELS, field.name), (bool, str))
    }
    assert own == {field for operations in OPERATIONS.values() for field, _ in operations}


def test_every_kernel_is_checked_with_each_format() -> None:
    """Cases launch all kernels of the package, and those that read several formats with each of them."""
    operations = [(name, operation) for name in CASES if name != "graphs" for operation in CASES[name]]
    # Only many pairs are sorted by several kernels.
    shapes = [(each, (*each.small, *(each.large if name == "pairs" else ()))) for name, each in operations]
    source = untouched_source()
    launches = launches_of([make for each, own in shapes for _, make in each.cases(source, own)])
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
    row = run_check(small_cases("norms"), lambda: 0.0)
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


def one_call(call: Callable[[], object]) -> float:
    """A timer that calls once."""
    call()
    return 1e-3


def test_installed_libraries_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the same inputs as our kernels."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    library = open_library("flashinfer", torch.device("cpu"))
    monkeypatch.setattr(attention_cases, "installed_libraries", lambda device: (library,))
    check = "attention of other libraries"
    made = [make() for _, make in small_cases(check, torch.float16)]  # bfloat16 is wrong in the interpreter
    assert len([case for case in made if library.label in case.others]) == 5  # steps and block sizes
    case = next(case for case in made if case.others)
    own, beside, *_, fastest = kernels.measure("attend", case, TRITON_KERNELS, one_call, LIMITS)
    assert (own["name"], beside["name"]) == ("attend", f"attend, beside {library.label}")
    assert (fastest["fastest"], fastest["choices"]) == ("triton", case.choices)
    assert run(check, dtype=torch.float16)["status"] == "passed"
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    wrong = run(check, dtype=torch.float16)["wrong"]
    assert len(wrong) == 5
    assert all(library.label in each for each in wrong)


def test_everything_that_is_timed_runs() -> None:
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(1), torch.bfloat16)
    rows: dict[str, dict[str, Any]] = {}
    for name, make in kernels.timed_cases(source, is_small=True):
        measured = list(kernels.measure(name, make(), TRITON_KERNELS, one_call, LIMITS))
        assert measured[0]["bytes"] > 0
        assert measured[0]["lines"][0].startswith("1,000.0 us")
        rows |= {row["name"]: row for row in measured}
    left_out = {name for name, row in rows.items() if row["status"] == "left out"}
    assert left_out == {"experts, bf16, small, clamped, 4, beside torch grouped_mm"}  # needs rows of 16 bytes
    experts = rows["experts, bf16, small, 1"]
    assert "2 of 3 experts have rows" in experts["lines"]
    assert [bar["is_met"] for bar in experts["bars"]] == [False]
    assert rows["experts, bf16, small, 1, beside torch grouped_mm"]["times_as_fast"] == 1.0
    assert rows["rms_norm, 3, 40"]["bytes"] == 2 * (3 * 40 + 40 + 3 * 40)


def test_most_important_is_timed_first() -> None:
    names = [name for name, _ in kernels.timed_cases(untouched_source())]
    first = [
        f"experts, bf16, {model}, {tokens}"
        for model in ("Qwen3-30B-A3B", "Mixtral-8x7B")
        for tokens in (1, 16, 128, 4096)
    ]
    assert names[:8] == first
    assert all(name.startswith("experts, fp8") for name in names[8:16])
    assert names[16].startswith("attend, ")


@pytest.mark.parametrize("message", ["no kernel for this shape", "CUDA error: out of memory"])
def test_own_row_precedes_another_implementation_that_fails(message: str) -> None:
    def refuse() -> None:
        raise RuntimeError(message)

    others = {"other": refuse, "flashinfer 1.0": lambda: None}
    case = Case(lambda kernels: None, (), beside=others, work=Work(1.0), choices=(("a key", 3),))
    rows = kernels.measure("item", case, TRITON_KERNELS, one_call, LIMITS)
    own = next(rows)
    assert (own["name"], own["status"], own["seconds"]) == ("item", "measured", 1e-3)
    if message.startswith("CUDA error"):  # it may have lost the GPU
        with pytest.raises(RuntimeError, match="CUDA error"):
            next(rows)
    else:
        other, library, fastest = rows
        assert (other["name"], other["status"]) == ("item, beside other", "left out")
        assert message in other["reason"]
        assert library["status"] == "measured"
        assert fastest["choices"] == case.choices
