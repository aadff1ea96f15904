"""The choice of the fastest implementation of an operation on this GPU. Without measurements, our kernels run.

`measured/` has one JSON file for each GPU, named after the GPU, with the fastest implementation by class of shapes and
number of rows. The GPU benchmark measures, and `python -m moeserve.bench.gpu.page PATH --save` writes the file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.ops.attention.interface import AttentionShape
from moeserve.ops.products.interface import Gather, GroupedProduct, OpenWeights, Product, RowGroups
from moeserve.ops.rows.interface import Float8Rows
from moeserve.triton_kernels.tuning import file_name

MEASURED_FOLDER = Path(__file__).parent / "measured"
NAMES = ("triton", "deep_gemm", "flashinfer")  # triton: our own kernels

OfRows = Mapping[int, str]  # the fastest implementation by number of rows, for the numbers that were measured


def product_key(weights: OpenWeights) -> str:
    """Return the key under which the tables list products with weights in 8-bit blocks of the shape of `weights`."""
    sizes = "x".join(map(str, weights.weight_eOI.shape))
    return f"product {sizes}{' gated' if weights.num_parts > 1 else ''}"


def attention_key(shape: AttentionShape, kind: str) -> str:
    """Return the key under which the tables list attention of shape `shape`. `kind`: "decode" or "chunks"."""
    window = "" if shape.window is None else f" window {shape.window}"
    return f"attention {kind} {shape.num_heads}/{shape.num_kv_heads}x{shape.head_size}{window}"


def measured_on(device: torch.device) -> dict[str, dict[int, str]]:
    """Return the table of a GPU: for each key, the fastest implementation by number of rows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"  # Triton's interpreter
    return load_table(MEASURED_FOLDER / file_name(name))


def is_ever_fastest(name: str, device: torch.device) -> bool:
    return any(name in of_rows.values() for of_rows in measured_on(device).values())


def fastest_of(of_rows: OfRows, num_rows: int) -> str:
    """Return the fastest implementation at the measured number of rows that is nearest to `num_rows` by ratio."""
    rows = max(num_rows, 1)
    return of_rows[min(of_rows, key=lambda each: (abs(math.log(each / rows)), each))]


@dataclass(frozen=True)
class FastestProduct:
    """A `Product` that runs the implementation that was measured to be the fastest for a call's number of rows."""

    products: Mapping[str, Product]
    of_rows: OfRows

    def multiply(self, input_TI: Any) -> Any:
        return self.products[fastest_of(self.of_rows, len(input_TI))].multiply(input_TI)


@dataclass(frozen=True)
class FastestGroupedProduct:
    """A `GroupedProduct` that runs the implementation measured to be the fastest for a call's number of rows."""

    products: Mapping[str, GroupedProduct]
    of_rows: OfRows

    def multiply(
        self, rows_RI: Any, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Any:
        num_rows = groups.expected_rows or (len(rows_RI) if gather is None else len(gather.indices_R))
        return self.products[fastest_of(self.of_rows, num_rows)].multiply(rows_RI, groups, gather, out_RC)

    def multiply_slots(self, slots_eSI: Any, groups: RowGroups) -> Any:
        codes = slots_eSI.codes if isinstance(slots_eSI, Float8Rows) else slots_eSI
        num_rows = groups.expected_rows or math.prod(codes.shape[:2])
        return self.products[fastest_of(self.of_rows, num_rows)].multiply_slots(slots_eSI, groups)


@functools.cache
def load_table(path: Path) -> dict[str, dict[int, str]]:
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    return {key: {int(num_rows): name for num_rows, name in of_rows.items()} for key, of_rows in table.items()}


def save_table(path: Path, measured: Iterable[tuple[str, int, str]]) -> None:
    """Add measurements to a file, and sort the entries of the file.

    Args:
        measured: key, number of rows and fastest implementation of each measurement.
    """
    load_table.cache_clear()
    table = load_table(path)
    for key, num_rows, name in measured:
        table.setdefault(key, {})[num_rows] = name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: dict(sorted(table[key].items())) for key in sorted(table)}, indent=1) + "\n")
