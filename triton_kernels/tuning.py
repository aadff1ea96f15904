"""Tile sizes of grouped products: measured on this GPU if possible, otherwise by rule. Importable without triton.

Measurements are in `tuned/`, one JSON file for each GPU, named after it; `moeserve.triton_kernels.tune` writes them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

TUNED_FOLDER = Path(__file__).parent / "tuned"
# Any 16 bits; E4M3 blocks with scales; weights in MXFP4 with rows in 16 bits; float32, which is not optimised.
Kind = Literal["bf16", "fp8", "mxfp4", "fp32"]

MAX_SHARED_BYTES = 227 * 1024  # shared memory of one program on sm_90
SM_SHARED_BYTES = 228 * 1024  # of all programs on a multiprocessor; each takes 1 KiB more
FP8_BLOCK = 128  # inputs that share a scale
NUM_SMS = 132  # of H100 and H200
MIN_STEPS_OF_SPLIT = 4  # iterations of a program that shares the inputs of a tile


@dataclass(frozen=True)
class Config:
    """Tile sizes and compile options of a grouped product."""

    block_m: int  # rows of a tile
    block_n: int  # weight rows of a tile: outputs, or half gates and half ups
    block_k: int  # inputs of one iteration
    num_warps: int
    num_stages: int  # iterations whose operands are in shared memory at a time
    programs_per_sm: int  # programs that should run on a multiprocessor at a time
    group_m: int = 32  # tiles of rows that share each part of a weight, so that both stay in the L2 cache
    num_splits: int = 1  # programs that share the inputs of a tile

    @property
    def is_swapped(self) -> bool:
        """True if a tile is computed as weights times rows.

        The left operand of the tensor cores has at least 64 rows, the right one at least 8, which suits few rows.
        """
        return self.block_m < 64

    def shared_bytes(self, element_size: int) -> int:
        """Return the bytes of the operands in shared memory, up to a few hundred bytes more."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size


@dataclass(frozen=True)
class Problem:
    """A grouped product as far as the host knows it."""

    kind: Kind
    is_gated: bool
    num_experts: int  # experts on this GPU
    num_outputs: int  # rows of a weight, gates and ups together
    num_inputs: int
    num_rows: int  # approximate; the capacity if nothing else is known
    can_split: bool = False  # programs may share the inputs of a tile: there is one weight, and the rows are known

    @property
    def weights_key(self) -> str:
        """Key of the measurements for these weights: everything except the number of rows."""
        gated, split = "gated" if self.is_gated else "plain", " split" if self.can_split else ""
        return f"{self.kind} {gated}{split} {self.num_experts}x{self.num_outputs}x{self.num_inputs}"

    @property
    def element_size(self) -> int:
        return {"bf16": 2, "fp8": 1, "mxfp4": 2, "fp32": 4}[self.kind]

    @property
    def rows_per_expert(self) -> float:
        """Average number of rows of an expert."""
        return self.num_rows / max(self.num_experts, 1)


Table = dict[str, dict[int, Config]]  # by `weights_key` and number of rows


@functools.cache
def choose_config(problem: Problem, device_name: str) -> Config:
    """Return the config measured for the nearest number of rows, by ratio, or without measurements the one by rule."""
    measured = load_table(TUNED_FOLDER / file_name(device_name)).get(problem.weights_key)
    if not measured:
        return config_by_rule(problem)
    rows = max(problem.num_rows, 1)
    nearest = min(measured, key=lambda num_rows: (abs(math.log(num_rows / rows)), num_rows))
    return measured[nearest]


def config_by_rule(problem: Problem) -> Config:
    """Return a config that should be fast on H100 and H200, by estimate, not by measurement.

    Few rows: reading the weights bounds the time. 4.3 TB/s times 1 us of latency are 33 KiB in flight for each of 132
    multiprocessors. Configs request three times as much, in two programs: one continues while the other starts or ends
    a tile. Each tile reads its rows from the L2 cache again, block_m / block_n of the bytes of the weights, so block_n
    is at least twice block_m. Tiles have up to twice the rows of an average expert, because experts differ and unused
    rows of a tile cost less than a second tile.

    Inputs of experts are not split over programs, so the order of a sum never depends on the number of rows; those of a
    single 8-bit weight are, where it has few tiles: see `num_splits`.

    Many rows: tiles of 128 x 256 read least from shared memory for each product, and their accumulator takes half of
    the registers of 8 warps. With scales, each iteration has a second accumulator, so tiles are half as wide.

    In between, tiles of 64 rows compute about r + 32 rows for r used ones, and tiles of 128 rows r + 64, but smaller
    tiles read the weights from the L2 cache more often. In 16 bits, where wide tiles read half as much, tuned kernels
    of others on H100 and H200 change to 128 rows between 64 and 96 rows for an expert. With scales, both read about as
    much up to 190 rows.

    With scales, tiles of few gates and ups are as wide as a block of results, which the kernel then quantises without
    another launch. With many rows, such tiles would have half as many rows, and read a quarter more for each product.
    """
    rows = problem.rows_per_expert
    if problem.kind == "fp32":
        return Config(16, 64, 32, num_warps=4, num_stages=2, programs_per_sm=2)
    if problem.kind == "fp8":
        config = fp8_config_by_rule(problem)
        return replace(config, num_splits=num_splits(config, problem)) if problem.can_split else config
    if rows <= 8:
        return Config(16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=2)
    if rows <= 16:
        return Config(32, 128, 64, num_warps=4, num_stages=5, programs_per_sm=2)
    if rows <= (48 if problem.kind == "mxfp4" else 80):  # each tile decodes its weights
        return Config(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2)
    return Config(128, 256, 64, num_warps=8, num_stages=4, programs_per_sm=1)


def fp8_config_by_rule(problem: Problem) -> Config:
    rows = problem.rows_per_expert
    if problem.is_gated:
        if rows <= 8:
            return Config(16, 256, 128, num_warps=8, num_stages=5, programs_per_sm=1)
        if rows <= 16:
            return Config(32, 256, 128, num_warps=8, num_stages=5, programs_per_sm=1)
        if rows <= 190:
            return Config(64, 256, 128, num_warps=8, num_stages=4, programs_per_sm=1)
    else:
        if rows <= 8:
            return Config(16, 64, 128, num_warps=4, num_stages=6, programs_per_sm=3)
        if rows <= 16:
            return Config(32, 128, 128, num_warps=4, num_stages=5, programs_per_sm=2)
        if rows <= 190:
            return Config(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=2)
    return Config(128, 128, 128, num_warps=8, num_stages=4, programs_per_sm=1)


def num_splits(config: Config, problem: Problem) -> int:
    """Return the number of programs that share the inputs of a tile.

    There are enough to fill all multiprocessors, provided that each has a few iterations and that their float32 partial
    sums take no more bytes than the weight.
    """
    rows = max(problem.num_rows, 1)
    num_tiles = -(-rows // config.block_m) * -(-problem.num_outputs // config.block_n)
    num_steps = -(-problem.num_inputs // config.block_k)
    num_programs = NUM_SMS * min(config.programs_per_sm, 2)
    return max(1, min(num_programs // num_tiles, num_steps // MIN_STEPS_OF_SPLIT, problem.num_inputs // (8 * rows)))


def file_name(device_name: str) -> str:
    """Return the name of a GPU's file: NVIDIA_H200.json for "NVIDIA H200"."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device_name).strip("_") + ".json"


def load_table(path: Path) -> Table:
    """Read the measurements of a GPU; empty if there is no file."""
    if not path.exists():
        return {}
    return {
        weights: {int(num_rows): Config(**fields) for num_rows, fields in of_rows.items()}
        for weights, of_rows in json.loads(path.read_text()).items()
    }


def save_table(path: Path, measured: Iterable[tuple[Problem, Config]]) -> None:
    """Add measurements to a file, replacing those of the same problems. Entries are sorted, for readable diffs."""
    table = load_table(path)
    for problem, config in measured:
        table.setdefault(problem.weights_key, {})[problem.num_rows] = config
    text = {
        weights: {str(num_rows): asdict(config) for num_rows, config in sorted(of_rows.items())}
        for weights, of_rows in sorted(table.items())
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(text, indent=1) + "\n")
    temporary.replace(path)
