"""What was measured of attention on a GPU: how long each library takes, by the shape of a layer.

Measurements are in `attention_times/`, one JSON file for each GPU, named after it; `moeserve.bench.gpu.tune_attention`
writes them. Each stands under the library's name and version: what was measured of another version does not count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from moeserve.triton_kernels.tuning import file_name

TIMES_FOLDER = Path(__file__).parent / "attention_times"
OWN = "triton"  # our kernels
WORTH_IT = 0.95  # of our time: another library must take less, or it is noise
StepKind = Literal["decode", "chunks"]  # one row in each chunk; anything else
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)

Seconds = Mapping[str, float]  # by label: `OWN`, or a library and its version
Times = dict[str, dict[str, dict[str, float]]]  # by key of the problem, kind of step and label


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """What a choice depends on: one layer's part on one rank, and the blocks of its cache."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int
    scale: float
    window: int | None = None  # positions, a token's own included
    has_sinks: bool = False

    @property
    def key(self) -> str:
        """What takes the same time has the same."""
        window = f", window {self.window}" if self.window else ""
        sinks = ", sinks" if self.has_sinks else ""
        shape = f"{self.num_heads} heads and {self.num_kv_heads} of keys x {self.head_size}"
        return f"{str(self.dtype).removeprefix('torch.')} {shape}, blocks of {self.block_size}{window}{sinks}"


def fastest(seconds: Seconds, usable: Collection[str]) -> str:
    """The label of the library to use: `OWN`, if none of the others is clearly faster, or ours was not measured."""
    least = {label: seconds[label] for label in usable if label in seconds}
    if OWN not in seconds or not least:
        return OWN
    best = min(least, key=lambda label: (least[label], label))
    return best if least[best] < WORTH_IT * seconds[OWN] else OWN


def times_path(device: torch.device) -> Path:
    """Where times of this GPU are."""
    return TIMES_FOLDER / file_name(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def load_times(path: Path) -> Times:
    """Empty where there is no file: nothing was measured on that GPU."""
    if not path.exists():
        return {}
    times: Times = json.loads(path.read_text())
    return times


def save_times(path: Path, problem: AttentionProblem, measured: Mapping[StepKind, Seconds]) -> None:
    """Adds to a file, in place of what it says of the same problem. Sorted, so that a change is easy to read."""
    times = load_times(path)
    times[problem.key] = {kind: dict(sorted(seconds.items())) for kind, seconds in measured.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(times.items())), indent=1) + "\n")
    temporary.replace(path)
