"""The checks and timed calls of bench/gpu, in Triton's interpreter: the checks detect each operation that is broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable
from typing import Any

import attention_stand_ins
import pytest
import torch
from planted_operations import plant
from torch import Tensor

from moeserve import ops
from moeserve import triton_kernels as package
from moeserve.bench.gpu import attention_cases, kernels
from moeserve.bench.gpu.cases import CASES, cases_of_check
from moeserve.bench.gpu.check import FLOAT32_SLACK, WRONG, NamedCases, compare, run_check
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.launches import launches_of, untouched_source
from moeserve.bench.gpu.limits import GpuLimits
from moeserve.bench.limits import Work
from moeserve.ops.attention.flashinfer import open_flashinfer
from moeserve.ops.backend import REFERENCE, TRITON, Backend
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.rows.interface import Float8Rows

pytestmark = pytest.mark.usefixtures("torch_conversions")

FAULT = 1 + 1 / 16  # far less than a wrong row or scale
LIMITS = GpuLimits(1e12, 1e14, 2e14)
# With small shapes the checks of most models' products are alike.
DIFFERENT = [name for name in CASES if "products, " not in name or name.endswith(("Mixtral-8x7B", "gpt-oss-20b"))]
# The operations that are not torch's, with their methods, by the check that covers them.
OPERATIONS = {
    "norms": "rows.rms_norm rows.rms_norm_in_place rows.add_rms_norm rows.quantize rows.quantize_rms_norm",
    "pairs": "pairs.sort pairs.order pairs.gather pairs.scatter pairs.weighted_sum pairs.weigh",
    "routing": "routing",
    "tokens": "sampling.row_maximum sampling.choose_tokens",
    "attention": "attention.attend",
    "rotary embedding and cache writes": "rows.apply_rope attention.rotate_and_write",
    "latent attention": "latent_attention.attend",
    "expanded attention": "latent_attention.attend_expanded",
    "chosen positions": "latent_attention.write latent_attention.attend_chosen indexer",
    "compressed attention": " ".join(f"compressed_attention.{method}" for method in ("pool", "write", "attend")),
    "hyper-connections": "streams.collapse streams.expand",
    "linear attention": "linear_attention",
    "short convolutions": "convolution",
    "products of one weight": "products.SINGLE.multiply",
    "products, bf16, gpt-oss-20b": "products.GROUPED.multiply products.GROUPED.multiply_slots",
    "products, fp8, Mixtral-8x7B": "products.GROUPED.multiply products.GROUPED.multiply_slots",
    "products, mxfp4, gpt-oss-20b": "products.GROUPED.multiply products.GROUPED.multiply_slots",
}


def small_cases(name: str, dtype: torch.dtype = torch.float32) -> NamedCases:
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(1), dtype)
    return cases_of_check(name, source, is_small=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_right_kernels_pass(name: str, dtype: torch.dtype) -> None:
    row = run_check(small_cases(name, dtype), lambda: 1.0)
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
        given = [each for arg in args for each in (vars(arg).values() if dataclasses.is_dataclass(arg) else [arg])]
        before = [(each, each.clone()) for each in given if isinstance(each, Tensor) and each.is_floating_point()]
        result = operation(*args, **options)
        if result is not None:
            return spoiled(result)
        for tensor, old in before:
            tensor.mul_(1.0 if torch.equal(tensor, old) else FAULT)

    return call


@pytest.mark.slow_but("norms", "pairs")
@pytest.mark.parametrize(
    ("check", "name"), [(check, name) for check in OPERATIONS for name in OPERATIONS[check].split()]
)
def test_small_error_of_an_operation_is_detected(check: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, *kind, method = name.split(".") if "." in name else (name, "")
    module = getattr(ops, folder)
    table = getattr(module, kind[0]).table if kind else module.TABLE

    def faulty(right: Any) -> Any:
        if not method:
            return broken(right)
        if isinstance(right, tuple):
            return right._replace(**{method: broken(getattr(right, method))})
        wrong = copy.copy(right)
        setattr(wrong, method, broken(getattr(right, method)))
        return wrong

    plant(monkeypatch, table, "triton", faulty)
    assert any(ratio > 1 for _, make in small_cases(check) for _, ratio in make().ratios(TRITON))


def test_every_operation_is_checked() -> None:
    """Operations whose implementation in Triton is not torch's, alone or in a group."""
    own = set()
    for folder in ("rows", "sampling"):
        operations, reference = (getattr(ops, folder).make(backend)._asdict() for backend in (TRITON, REFERENCE))
        own |= {f"{folder}.{name}" for name in operations if operations[name] is not reference[name]}
    for each in pkgutil.iter_modules(ops.__path__):
        if not each.ispkg or each.name in ("rows", "sampling"):
            continue
        if each.name == "products" or "triton" in getattr(ops, each.name).TABLE:  # test_backends lists what is missing
            own.add(each.name)
    names = {name for names in OPERATIONS.values() for name in names.split()}
    assert own == {name if name.startswith(("rows.", "sampling.")) else name.split(".")[0] for name in names}


def test_every_kernel_is_checked_with_each_format() -> None:
    """Cases launch all kernels of the package, and those that read several formats with each of them."""
    untouched = untouched_source()
    makes = [
        make
        for check, operations in CASES.items()
        for operation in operations
        # Only many pairs are sorted by several kernels.
        for _, make in operation.cases(untouched, [*operation.small, *(operation.large if check == "pairs" else ())])
    ]
    launches = launches_of(makes)
    names = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    all_kernels = {name for each in names for name in vars(importlib.import_module(each)) if name.endswith("_kernel")}
    assert {launch.name for launch in launches} == all_kernels

    def dtypes(kernel: str, argument: str) -> set[torch.dtype]:
        return {each.arguments[argument].dtype for each in launches if each.name == kernel}

    assert dtypes("grouped_matmul_kernel", "weight_ptr") == {torch.bfloat16, torch.float8_e4m3fn, torch.uint8}
    for kernel in ("attend_tile_kernel", "attend_split_kernel", "rotary_with_cache_write_kernel"):
        assert dtypes(kernel, "key_cache_ptr") == {torch.bfloat16, torch.uint8}
    assert dtypes("chunked_matmul_kernel", "weight_ptr") == {torch.bfloat16, torch.float32}


def test_kernel_that_raises_fails_its_check_and_no_case_begins_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(message: str) -> Backend:
        def fail(*args: Any) -> None:
            raise RuntimeError(message)

        plant(monkeypatch, ops.sampling.TABLE, "triton", lambda right: right._replace(row_maximum=fail))
        return TRITON

    row = run_check(small_cases("tokens"), lambda: 1.0, failing("out of resources: shared memory"))
    assert row["status"] == "failed"
    assert "out of resources" in row["error"]
    with pytest.raises(RuntimeError, match="CUDA error"):  # the process cannot use the GPU any more
        run_check(small_cases("tokens"), lambda: 1.0, failing("CUDA error: misaligned address"))
    row = run_check(small_cases("norms"), lambda: 0.0)
    assert row["status"] == "passed"
    assert row["lines"][0].startswith("1 cases")
    assert "left_out" in row


def test_comparison_detects_nan_shapes_single_and_systematic_errors() -> None:
    exact = torch.randn(10, 100, generator=torch.Generator().manual_seed(0))
    actual = exact.bfloat16()
    assert compare(actual, exact) <= 1
    assert compare(actual[1:], exact) == WRONG
    for bad in (math.nan, math.inf, -math.inf, 5.0):
        assert compare(actual.index_fill(0, torch.tensor(3), bad), exact) > 1
    assert compare(actual * (1 + FLOAT32_SLACK + 3 * torch.finfo(torch.bfloat16).eps), exact) > 1
    small_row = exact * torch.logspace(0, -6, 10)[:, None]  # a wrong row of small numbers
    wrong = small_row.bfloat16()
    wrong[-1] = wrong[-1].flip(0)
    assert compare(wrong, small_row) > 1
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])) == WRONG


def timed(call: Callable[[], Any]) -> float:
    """Call once. The call takes a millisecond."""
    call()
    return 1e-3


@pytest.mark.slow
def test_installed_libraries_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the same inputs as our kernels. A library that fails to run loses no other result."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    package = open_flashinfer(torch.device("cpu"))
    monkeypatch.setattr(attention_cases, "installed_flashinfer", lambda device: package)
    made = {name: make() for name, make in small_cases("attention", torch.float16)}  # bfloat16 is wrong here
    made = {name: case for name, case in made.items() if case.libraries}
    assert len(made) == 5  # steps and block sizes
    for name, case in made.items():
        assert all(ratio <= 1 for _, ratio in case.ratios(TRITON))
        own, other, fastest = kernels.measure(name, case, TRITON, timed, LIMITS)
        assert (own["name"], other["name"]) == (name, f"{name}, beside flashinfer {package.__version__}")
        assert (fastest["fastest"], fastest["choices"]) == ("triton", case.choices)
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    for case in made.values():
        assert {name for name, ratio in case.ratios(TRITON) if ratio > 1} == {f"flashinfer {package.__version__}"}
    for message, status in (("no kernel for this shape", "left out"), ("CUDA error: out of memory", None)):

        def fail(*args: Any, message: str = message, **options: Any) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(attention_stand_ins, "attend", fail)
        rows = kernels.measure(name, case, TRITON, timed, LIMITS)
        assert next(rows)["status"] == "measured"
        if status is None:  # the library may have lost the GPU
            with pytest.raises(RuntimeError, match=message):
                next(rows)
        else:
            other = next(rows)
            assert (other["status"], message in other["reason"]) == (status, True)


@pytest.mark.slow
def test_everything_that_is_timed_runs_with_its_work() -> None:
    """The bytes and operations of some cases follow by hand."""
    drawn = Source(torch.device("cpu"), torch.Generator().manual_seed(1), torch.bfloat16)
    cases = kernels.timed_cases(drawn, is_small=True)
    rows = {name: next(kernels.measure(name, make(), TRITON, timed, LIMITS)) for name, make in cases}
    assert all(row["bytes"] > 0 for row in rows.values())
    experts = rows["experts, bf16, small, 1"]  # a token has 2 of 3 experts of 48 x 24
    assert experts["bytes"] == 2 * (2 * 3 * 48 * 24 + 2 * 48)
    assert experts["operations"] == 2 * 2 * 3 * 48 * 24
    assert not experts["bar"]["is_met"]
    assert rows["rms_norm, 3, 40"]["bytes"] == 2 * (3 * 40 + 40 + 3 * 40)
    attend = rows["attend, small, windowed, short decode, plain"]  # 1 and 11 of 40 positions, 2 of 4 heads of 16
    assert attend["bytes"] == 2 * ((1 + 11) * 2 * 2 * 16 + 2 * 2 * 4 * 16)
    assert attend["operations"] == 2 * (1 + 11) * 4 * 2 * 16
    latent = rows["latent_attend, small, latent, short prompts"]  # 9 rows of 9, 5 of 37, 1 of 20; 5 heads, 24 + 8
    assert latent["bytes"] == 2 * ((9 + 37 + 20) * 32 + 15 * 5 * (32 + 24))
    assert latent["operations"] == 2 * (45 + 33 + 34 + 35 + 36 + 37 + 20) * 5 * (32 + 24)
    assert LIMITS.seconds(Work(2e9, 4e11)) == LIMITS.seconds(Work(0, 4e11), is_fp8=True) * 2 == 4e-3
    is_expert = [name.startswith("experts, ") for name in rows]
    assert is_expert.index(False) == sum(is_expert), "the most important is timed first"
    assert list(rows)[sum(is_expert)].startswith("attend, ")
