"""The checks of bench/gpu accept right kernels, in Triton's interpreter, and detect each of their kernels broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from typing import Any

import attention_stand_ins
import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

import moeserve.triton_kernels
from moeserve.bench.gpu import checks, checks_experts, costs, kernels
from moeserve.bench.gpu.check import WRONG, Case, Check, Place, compare, compare_exactly, run_check, worst
from moeserve.bench.gpu.checks import CHECKS
from moeserve.bench.gpu.costs import AttentionShape, GpuLimits, LatentShape, MoEShape
from moeserve.bench.gpu.run import row_text
from moeserve.ops.libraries.attention import open_library
from moeserve.ops.libraries.varlen import Varlen

TORCH_TYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}
# Functions of the kernels' modules that launch no kernel.
HELPERS = {
    *("tile_config", "split_config", "choose_splits", "choose_config", "block_sizes", "compile_options"),
    *(
        "sum_options",
        "launch_sizes",
        "write_blocks",
        "kernel_sizes",
        "merge_warps",
        "num_columns",
        "kind_of",
        "max_tiles",
    ),
    *("kernel_constants", "launch_attention", "launch_write"),
}
FAULT = 1 + 1 / 16  # far less than a wrong row or scale
# With small shapes the checks of 8-bit products are alike.
DIFFERENT = [check for check in CHECKS if "fp8" not in check.name or check.name.endswith("Mixtral-8x7B")]
EVERY = [(check, kernel) for check in DIFFERENT for kernel in check.kernels]


@pytest.fixture(autouse=True)
def _conversions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own conversions to 8 and 16 bits lose carries."""

    def convert(numbers: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
        from_dtype, from_bits = TORCH_TYPES[str(from_type)]
        dtype, to_bits = TORCH_TYPES[str(to_type)]
        bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
        converted = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
        return converted.view(f"uint{8 * converted.itemsize}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def place(seed: int, *dtypes: torch.dtype) -> Place:
    device = torch.device("cpu")
    return Place(device, torch.Generator(device).manual_seed(seed), dtypes or (torch.float32,), is_small=True)


@pytest.mark.parametrize("check", [check for check in DIFFERENT if check.kernels], ids=lambda check: check.name)
def test_right_kernels_pass(check: Check) -> None:
    wrong = [case for case in check.run(place(1, torch.float32, torch.float16)) if not case.error_ratio <= 1]
    assert wrong == []


def test_every_kernel_is_checked() -> None:
    found: set[str] = set()
    for module in pkgutil.iter_modules(moeserve.triton_kernels.__path__):
        if module.name in ("tune", "tuning"):
            continue
        imported = importlib.import_module(f"moeserve.triton_kernels.{module.name}")
        found |= {
            name
            for name, function in inspect.getmembers(imported, inspect.isfunction)
            if function.__module__ == imported.__name__ and not name.startswith("_")
        }
    assert {kernel for check in CHECKS for kernel in check.kernels} == found - HELPERS


def broken(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel with a small error in its results, or in the tensors that it writes."""

    def call(*args: Any, **options: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = kernel(*args, **options)
        if result is not None:
            return tuple(map(spoiled, result)) if isinstance(result, tuple) else spoiled(result)
        for tensor, old in zip(tensors, before, strict=True):
            if compare_exactly(tensor, old):
                tensor.copy_(spoiled(tensor))
        return None

    return call


def spoiled(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) ^ 4).view(tensor.dtype)
    if not tensor.is_floating_point():
        return tensor.flip(0) if len(tensor) > 1 else tensor + 1
    return tensor * FAULT


def break_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    module = checks if hasattr(checks, kernel) else checks_experts
    monkeypatch.setattr(module, kernel, broken(getattr(module, kernel)))


@pytest.mark.parametrize(("check", "kernel"), EVERY, ids=[f"{check.name}-{kernel}" for check, kernel in EVERY])
def test_small_error_of_a_kernel_is_detected(check: Check, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, kernel)
    wrong = [case.name for case in check.run(place(0)) if not case.error_ratio <= 1]
    assert wrong
    assert wrong[0].startswith(kernel), "only this kernel is broken"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for other libraries."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    found = [open_library("flashinfer", torch.device("cpu"))]
    for name in ("FA2", "FA3"):
        found.append(Varlen(attention_stand_ins.Varlen(name).varlen_attn_out, name))  # type: ignore[arg-type]
    for module in (checks, kernels):
        monkeypatch.setattr(module, "installed_libraries", lambda device: tuple(found))


def test_installed_libraries_are_checked(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "attention of other libraries")
    cases = list(check.run(place(0, torch.float16)))
    assert max(case.error_ratio for case in cases) <= 1
    version = torch.__version__
    assert [case.name.replace(version, "2") for case in cases] == [
        *(f"flashinfer 1.2.3 float16 window, {steps}, {size}" for size in (16, 64) for steps in ("decode", "prefill")),
        "flashinfer 1.2.3 float16 window, prefill, 256",
        *(f"varlen 2 FA2 float16 window, {steps}, 256" for steps in ("decode", "prefill")),
        *(f"varlen 2 FA3 float16 window, {steps}, {size}" for size in (16, 64, 256) for steps in ("decode", "prefill")),
    ]
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    assert all(case.error_ratio > 1 for case in check.run(place(0, torch.float16)))


def test_check_without_an_installed_library_is_left_out() -> None:
    check = next(check for check in CHECKS if check.name == "attention of other libraries")
    row = run_check(check, place(0), lambda: 1.0)
    assert row["status"] == "left out"
    assert row["reason"] in row_text(row)


def test_libraries_are_timed_on_the_same_caches(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    drawn = kernels._random
    monkeypatch.setattr(kernels, "_random", lambda *shape: drawn(*shape).half())  # bf16 is wrong in the interpreter
    for chunks in ([(1, 20), (1, 20)], [(4, 20), (4, 20)]):
        calls = kernels.attention_calls(AttentionShape(4, 2, 64, window=7), chunks)
        assert [label.split()[0] for label in calls] == ["triton", "flashinfer", "varlen"]
        own, *others = (call() for call in calls.values())
        for other in others:
            torch.testing.assert_close(other, own, atol=4e-3, rtol=4e-3)
    sinks = kernels.attention_calls(AttentionShape(4, 2, 64, has_sinks=True), [(4, 20)])
    assert list(sinks) == ["triton"], "no other takes sinks in chunks"


def test_row_of_a_check_names_wrong_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "activations")
    assert run_check(check, place(0), lambda: 1.0)["status"] == "passed"
    break_kernel(monkeypatch, "silu_multiply")
    row = run_check(check, place(0), lambda: 1.0)
    assert (row["status"], row["num_cases"]) == ("failed", 4)
    assert row["wrong"] == ["silu_multiply float32 3 x 20", "silu_multiply float32 1 x 1100"]
    assert row["worst"] in row["wrong"]
    assert row["error_ratio"] > 1


@pytest.mark.parametrize("message", ["out of resources: shared memory", "CUDA error: an illegal memory access"])
def test_kernel_that_raises_fails_its_check(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "greedy choice")

    def refuse(rows_RV: Tensor) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(checks, "greedy_rows", refuse)
    if message.startswith("CUDA error"):  # the process cannot use the GPU any more
        with pytest.raises(RuntimeError, match="CUDA error"):
            run_check(check, place(0), lambda: 1.0)
        return
    row = run_check(check, place(0), lambda: 1.0)
    assert row["status"] == "failed"
    assert message in row["error"]
    assert row["num_cases"] == 2  # those before it


def test_check_stops_when_its_time_is_over() -> None:
    row = run_check(CHECKS[-1], place(0), lambda: 0.0)
    assert (row["num_cases"], row["status"]) == (1, "passed")
    assert "left_out" in row


def test_comparison_detects_nan_shapes_single_and_systematic_errors() -> None:
    exact = torch.randn(10, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = exact.bfloat16()
    assert compare(actual, exact) <= 1
    assert compare(actual[1:], exact) == WRONG
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = actual.clone()
        spoilt[3, 7] = bad
        assert not compare(spoilt, exact) <= 1
    single = actual.clone()
    single[3, 7] += 0.25
    assert compare(single, exact) > 1
    assert compare(actual * 1.02, exact) > 1
    small_row = exact * torch.logspace(0, -6, 10, dtype=torch.float64)[:, None]  # a wrong row of small numbers
    wrong = small_row.bfloat16()
    wrong[-1] = wrong[-1].flip(0)
    assert compare(wrong, small_row) > 1
    assert worst([Case("a", 3.0), Case("b", math.nan), Case("c", 0.1)]).name == "b"


def test_draws_next_to_a_border_are_right_on_either_side() -> None:
    generator = torch.Generator().manual_seed(0)
    scores_RV = 3 * torch.randn(6, 151936, generator=generator)
    temperature_R = torch.full((6,), 1.8, dtype=torch.float64)
    numbers_R = torch.rand(6, generator=generator, dtype=torch.float64)

    def error(top_p: float, off: float = 0.0) -> float:
        ordered, order = (scores_RV.double() / temperature_R[:, None]).softmax(-1).sort(descending=True, stable=True)
        cumulative = ordered.cumsum(-1)
        last_R1 = torch.searchsorted(cumulative, top_p * cumulative[:, -1:]).clamp(max=len(scores_RV[0]) - 1)
        totals_R1 = cumulative.gather(1, last_R1)
        indices_R1 = torch.searchsorted(cumulative, ((numbers_R[:, None] + off) % 1) * totals_R1, right=True)
        tokens_R = order.gather(1, indices_R1)[:, 0]
        return checks.draw_error(scores_RV, temperature_R, 0, 0.9, 0.0, numbers_R, tokens_R)

    near = 0.9 * checks.SAMPLING_SLACK
    assert error(0.9) <= 1e-3
    assert max(error(0.9 + near), error(0.9 - near)) <= 1
    assert min(error(0.8), error(1.0), error(0.9, off=0.02)) > 1


class OneCall:
    """A timer that calls once."""

    def __init__(self) -> None:
        self.num_calls = 0

    def seconds(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return 1e-3

    seconds_without_graph = seconds


def test_everything_that_is_timed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = dict(
        DEVICE="cpu", NUM_TOKENS=(1,), DECODE_BATCHES=((2, 20),), PREFILL_ROWS=20, LATENT_ROWS=3, ROW_COUNTS=(2,),
        WIDTH=64, EXPERT_WIDTH=48, LARGE_WIDTH=130,
    )  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)
    shapes: dict[str, Any] = dict(
        MOE_SHAPES={"a": MoEShape(3, 32, 16, 2), "b": MoEShape(3, 160, 48, 2, "clamped_swiglu", has_bias=True)},
        ATTENTION_SHAPES={
            "Mixtral-8x7B": AttentionShape(4, 2, 16),
            "c": AttentionShape(4, 2, 16, window=7, has_sinks=True),
        },
        LATENT_SHAPES={"d": LatentShape(3, 16, 8)},
        VOCAB_SIZES={"e": 40},
    )
    for name, value in shapes.items():
        monkeypatch.setattr(costs, name, value)
    timer: Any = OneCall()
    torch.manual_seed(0)
    rows = [kernels.measure(item, timer, GpuLimits(1e12, 1e14, None)) for item in kernels.items()]
    assert timer.num_calls == len(rows) + sum(len(row["others"]) for row in rows)
    assert not [(row["name"], other) for row in rows for other in row["others"].values() if "error" in other]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert row["bytes"] > 0
        assert f"{row['name']}: 1,000.0 us" in row_text(row)
    experts = by_name["experts bf16 a, 1 tokens"]
    assert experts["notes"] == ["2 of 3 experts have rows"]
    assert [bar["is_met"] for bar in experts["bars"]] == [False]
    assert set(experts["others"]) == {"transformers"}


def test_other_implementation_that_fails_is_recorded() -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel for this shape")

    timed = kernels.Timed(lambda: None, costs.Work(1.0), others={"other": refuse})
    timer: Any = OneCall()
    row = kernels.measure(kernels.Item("x", lambda: timed), timer, GpuLimits(1.0, 1.0, None))
    assert "no kernel for this shape" in row["others"]["other"]["error"]


def test_timed_experts_compute_the_same_as_torch_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    torch.manual_seed(0)
    layer = kernels.ExpertWeights(MoEShape(5, 32, 16, 2))
    for name in ("gate_up_EOI", "down_EOI"):  # the interpreter's products in bf16 are wrong
        setattr(layer, name, (getattr(layer, name) * 10).float())
    monkeypatch.setattr(kernels, "_random", lambda *shape, scale=1.0: torch.randn(shape))
    products = kernels._products(lambda: layer, 6)
    torch.testing.assert_close(products.call(), products.others["torch grouped_mm"](), atol=1e-5, rtol=1e-4)
    experts = kernels._experts(lambda: layer, 6)
    own, other = experts.call(), experts.eager_others["transformers"]()
    torch.testing.assert_close(own.float(), other.float(), atol=2e-2, rtol=2e-2)  # type: ignore[attr-defined]
