"""Chooses the shape of a grouped product's work: from what was measured on this GPU, else by rule. Imports no triton.

Measurements are in `tuned/`, one JSON file for each GPU, named after it; `moeserve.triton_kernels.tune` writes them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

TUNED_FOLDER = Path(__file__).parent / "tuned"
Kind = Literal["bf16", "fp8", "fp32"]  # any 16 bits; e4m3 blocks with scales; float32, which is not made to be fast

MAX_SHARED_BYTES = 227 * 1024  # of one program on sm_90
SM_SHARED_BYTES = 228 * 1024  # of all programs on a streaming multiprocessor, of which each takes 1 KiB more
FP8_BLOCK = 128  # inputs that share a scale


@dataclass(frozen=True)
class Config:
    """How a grouped product is cut into tiles, and how a tile's program is compiled."""

    block_m: int  # rows of a tile
    block_n: int  # weight rows of a tile: outputs, or half gates and half ups
    block_k: int  # inputs of one step
    num_warps: int
    num_stages: int  # steps whose operands are in shared memory at a time
    programs_per_sm: int  # as many as should find place at a time
    group_m: int = 32  # tiles of rows that go through all of a weight together, so that both stay in the L2 cache

    @property
    def is_swapped(self) -> bool:
        """Whether a tile is computed as weights times rows. The tensor cores' left operand has 64 rows at least; the
        right one does with 8, which fits few rows.
        """
        return self.block_m < 64

    def shared_bytes(self, element_size: int) -> int:
        """Of the operands under way: what the compiler takes, but for a few hundred bytes."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size


@dataclass(frozen=True)
class Problem:
    """What a choice depends on: nothing that only the GPU knows."""

    kind: Kind
    is_gated: bool
    num_experts: int  # of this GPU
    num_outputs: int  # of a weight: both gates and ups
    num_inputs: int
    num_rows: int  # about: all that there is room for, if no more is known

    @property
    def weights_key(self) -> str:
        """All but the rows: what a table is for."""
        gated = "gated" if self.is_gated else "plain"
        return f"{self.kind} {gated} {self.num_experts}x{self.num_outputs}x{self.num_inputs}"

    @property
    def element_size(self) -> int:
        return {"bf16": 2, "fp8": 1, "fp32": 4}[self.kind]

    @property
    def rows_per_expert(self) -> float:
        """On average: how many each really has, only the GPU knows."""
        return self.num_rows / max(self.num_experts, 1)


Table = dict[str, dict[int, Config]]  # by `weights_key` and number of rows


@functools.cache
def choose_config(problem: Problem, device_name: str) -> Config:
    """The measured one for the nearest number of rows, by ratio; or one by rule, if these weights were not measured."""
    measured = load_table(TUNED_FOLDER / file_name(device_name)).get(problem.weights_key)
    if not measured:
        return config_by_rule(problem)
    rows = max(problem.num_rows, 1)
    nearest = min(measured, key=lambda num_rows: (abs(math.log(num_rows / rows)), num_rows))
    return measured[nearest]


def config_by_rule(problem: Problem) -> Config:
    """What should be fast on H100 and H200, argued but not measured.

    Few rows: the weights' way from memory is all that counts. About 4.3 TB/s times 1 us of latency are 33 KiB under
    way for each of 132 multiprocessors, so three times as much is asked for, in two programs: one goes on while the
    other begins or ends a tile. Rows come from the L2 cache again for each tile, as block_m / block_n of the weights'
    bytes, so block_n is at least twice block_m. Tiles have up to twice the rows of an average expert, as experts
    differ, and a row too many in a tile costs less than a second tile.

    Splitting inputs over programs is not needed: with 64 weight rows, one token makes 264 tiles of gates and ups and
    192 of down in DeepSeek-V2-Lite, 192 and 256 in Qwen3-30B-A3B, 360 and 180 in gpt-oss-20b, 512 and 896 in
    DeepSeek-V3, 896 and 128 in Mixtral-8x7B: at least 128, for 132 multiprocessors. So the order of a sum over inputs
    never depends on the number of rows.

    Many rows: tiles of 128 x 256 read least from shared memory for each product, and their accumulator takes half of
    the registers of 8 warps. With scales, each step has an accumulator of its own beside the sum, so tiles are half as
    wide.
    """
    rows = problem.rows_per_expert
    if problem.kind == "fp32":
        return Config(16, 64, 32, num_warps=4, num_stages=2, programs_per_sm=2)
    if problem.kind == "fp8":
        if rows <= 8:
            return Config(16, 64, 128, num_warps=4, num_stages=6, programs_per_sm=3)
        if rows <= 16:
            return Config(32, 128, 128, num_warps=4, num_stages=5, programs_per_sm=2)
        if rows <= 48:
            return Config(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=2)
        return Config(128, 128, 128, num_warps=8, num_stages=4, programs_per_sm=1)
    if rows <= 8:
        return Config(16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=2)
    if rows <= 16:
        return Config(32, 128, 64, num_warps=4, num_stages=5, programs_per_sm=2)
    if rows <= 48:
        return Config(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2)
    return Config(128, 256, 64, num_warps=8, num_stages=4, programs_per_sm=1)


def file_name(device_name: str) -> str:
    """Of a GPU's table: "NVIDIA H200" has NVIDIA_H200.json."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device_name).strip("_") + ".json"


def load_table(path: Path) -> Table:
    """An empty one where there is no file: nothing was measured on that GPU."""
    if not path.exists():
        return {}
    return {
        weights: {int(num_rows): Config(**fields) for num_rows, fields in of_rows.items()}
        for weights, of_rows in json.loads(path.read_text()).items()
    }


def save_table(path: Path, measured: Iterable[tuple[Problem, Config]]) -> None:
    """Adds to a file, in place of what it says of the same problems. Sorted, so that a change is easy to read."""
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
