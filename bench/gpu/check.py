"""Cases of kernels, and the comparison of their results with those of torch in float32.

A case is a call on random inputs. It runs with the table of kernels to check, and on the same inputs in float32 with
torch's table. One rule holds for all floating-point results: the root mean square of all errors may be at most the
tolerance times that of the results, and each error at most `PEAK` times the tolerance times the largest result of its
row. The tolerance is `ROUNDINGS` roundings to the result's dtype, plus `FLOAT32_SLACK` for float32 arithmetic. Integers
must be equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.parts import Row, is_cuda_error
from moeserve.bench.limits import Work
from moeserve.ops.backend import REFERENCE, TRITON, Backend, in_order
from moeserve.ops.rows.interface import Float8Rows, plain_rows

WRONG = 1e9  # the error ratio of a wrong integer, of NaN, or of another shape: JSON has no infinity
ROUNDINGS = 4
FLOAT32_SLACK = 2.0**-12  # relative: sums of up to 16384 products on tensor cores, and approximated functions
CODES_SLACK = 2.0**-5  # for 8-bit results: rounding to 4 significant bits is 2.4% on average
PEAK = 8.0  # the errors of a row are about normally distributed; 8 standard deviations of them never occur

NamedCases = Iterable[tuple[str, Callable[[], "Case"]]]  # each with a function that draws its inputs
Shapes = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """An operation on one set of inputs, which is checked or timed."""

    operation: Callable[[Backend], Callable[..., Any]]  # of a table; takes the inputs, which it may change
    inputs: tuple[Any, ...]
    defined: Callable[..., Any] = lambda results, *inputs: results  # returns what is compared
    slack: float = FLOAT32_SLACK
    is_ordered: bool = False  # runs the kernels of `batch_invariant`
    libraries: Mapping[str, Backend] = field(default_factory=dict)  # other tables to check and time, by label
    work: Work | None = None  # None: moves each input and each result once
    is_fp8: bool = False  # multiplies 8-bit floats
    bar: tuple[str, float] | None = None  # figure of the row, and its minimum
    choices: tuple[tuple[str, int], ...] = ()  # keys of `measured.py` for which the fastest table is chosen

    def bind(self, backend: Backend) -> Callable[[], Any]:
        backend = in_order(backend) if self.is_ordered and "triton" in backend.names else backend
        return partial(self.operation(backend), *self.inputs)

    def ratios(self, backend: Backend) -> Iterator[tuple[str, float]]:
        """Yield the error ratio of each result, with a name if there are several. A result is wrong above 1."""
        inputs, compared = tuple(map(in_float32, self.inputs)), partial(tensors_of, dequantizes=True)
        expected = list(compared(self.defined(self.operation(REFERENCE)(*inputs), *inputs)))
        for label, each in {"": backend, **self.libraries}.items():
            for place, actual in enumerate(compared(self.defined(self.bind(each)(), *self.inputs))):
                name = label if len(expected) == 1 else f"{label} result {place}"
                yield name.strip(), compare(actual, expected[place], self.slack)


@dataclass(frozen=True)
class Operation:
    """Cases of one kind."""

    make: Callable[..., Case]  # (source, *shape)
    check: str  # name of the check that they belong to
    small: Shapes  # fast enough for the interpreter
    large: Shapes = ()
    timed: Shapes = ()

    def cases(self, source: Any, shapes: Shapes) -> NamedCases:
        for shape in shapes:
            yield ", ".join(map(str, (self.make.__name__, *shape))), partial(self.make, source, *shape)


def cases_of(check: str, small: Shapes, *others: Shapes) -> Callable[[Callable[..., Case]], Operation]:
    """Decorate a function that makes a case of a shape. `others`: the fields `large` and `timed`."""
    return lambda make: Operation(make, check, small, *others)


def crossed(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*choices))


def run_check(cases: NamedCases, seconds_left: Callable[[], float], backend: Backend = TRITON) -> Row:
    """Return the row of a check.

    Raises:
        Exception: a CUDA error. Other errors fail the check only.
    """
    ratios: dict[str, float] = {}
    row: Row = {}
    try:
        for name, make in cases:
            ratios |= {f"{name} {result}".strip(): ratio for result, ratio in make().ratios(backend)}
            if seconds_left() <= 0:
                row["left_out"] = f"everything after {name!r}: no time was left"
                break
    except Exception as error:
        if is_cuda_error(error):
            raise
        row |= {"error": f"{type(error).__name__}: {error}"[:2000], "log": traceback.format_exc(limit=-4)}
    wrong, worst = [name for name in ratios if ratios[name] > 1], max(ratios, key=ratios.__getitem__, default="")
    row |= {"status": "passed" if ratios and not wrong and "error" not in row else "failed", "wrong": wrong[:20]}
    return row | {"lines": [f"{len(ratios)} cases, worst {ratios.get(worst, 0.0):.3g} of the tolerance ({worst})"]}


def in_float32(value: Any) -> Any:
    """Return an input with its tensors in float32, and NaN replaced with zeros. Integers and float64 are unchanged."""
    if isinstance(value, Float8Rows):
        return plain_rows(value).float()
    if isinstance(value, Tensor) and value.is_floating_point():
        return (value.float() if value.element_size() < 4 else value).nan_to_num(0.0)
    if type(value) in (tuple, list):
        return type(value)(map(in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: in_float32(each) for name, each in fields_of(value).items()})
    return value


def tensors_of(value: Any, *, dequantizes: bool = False) -> Iterator[Tensor]:
    """Yield all tensors in a result or an input."""
    if isinstance(value, Tensor):
        yield value
    elif dequantizes and isinstance(value, Float8Rows):
        yield plain_rows(dataclasses.replace(value, rows=None))
    elif isinstance(value, (tuple, list)) or dataclasses.is_dataclass(value):
        for each in value if isinstance(value, (tuple, list)) else fields_of(value).values():
            yield from tensors_of(each, dequantizes=dequantizes)


def bytes_of(value: Any) -> float:
    return float(sum(each.nbytes for each in tensors_of(value)))


def fields_of(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def compare(actual: Tensor, expected: Tensor, slack: float = FLOAT32_SLACK) -> float:
    """Return the error ratio of a result. NaN or another shape is wrong."""
    if actual.shape != expected.shape:
        return WRONG
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected.to(actual.dtype)) else WRONG
    if actual.numel() == 0:
        return 0.0
    tolerance, exact = slack + ROUNDINGS * torch.finfo(actual.dtype).eps / 2, expected.double()
    error, tiny = (actual.double() - exact).abs(), torch.finfo(actual.dtype).smallest_normal
    peak = error / (PEAK * tolerance * exact.abs().amax(-1, keepdim=True) + tiny)
    total = error.square().mean().sqrt() / (tolerance * exact.square().mean().sqrt() + tiny)
    ratio = max(float(peak.max()), float(total))
    return WRONG if math.isnan(float(peak.sum() + total)) else min(ratio, WRONG)
