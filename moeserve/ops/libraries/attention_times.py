"""Measured times of attention on a GPU, of each library and by the shape of a layer.

`attention_times/` has one JSON file for each GPU, named after it. `moeserve.bench.gpu.tune_attention` writes them.
Times are filed under a library's name and version, so those of another version do not count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from moeserve.ops.interfaces import AttentionShape
from moeserve.triton_kernels.tuning import file_name

TIMES_FOLDER = Path(__file__).parent / "attention_times"
OWN = "triton"  # our kernels
MAX_RELATIVE_TIME = 0.95  # another library must take less than this part of our time, or the difference may be noise
StepKind = Literal["decode", "chunks"]  # one row in each chunk; anything else
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)

Seconds = Mapping[str, float]  # by label: `OWN`, or a library and its version
Times = dict[str, dict[str, dict[str, float]]]  # by problem key, kind of step and label


@dataclass(frozen=True)
class AttentionProblem:
    """The facts on which the choice of a library depends."""

    shape: AttentionShape
    block_size: int  # of the KV cache

    @property
    def key(self) -> str:
        """The name of all problems that take the same time."""
        shape = self.shape
        window = f", window {shape.window}" if shape.window else ""
        sinks = ", sinks" if shape.has_sinks else ""
        heads = f"{shape.num_heads} heads and {shape.num_kv_heads} of keys x {shape.head_size}"
        return f"{str(shape.dtype).removeprefix('torch.')} {heads}, blocks of {self.block_size}{window}{sinks}"


def fastest(seconds: Seconds, usable: Collection[str]) -> str:
    """Return the label to use: `OWN` if our kernels were not measured, or no other library is clearly faster."""
    measured = {label: seconds[label] for label in usable if label in seconds}
    if OWN not in seconds or not measured:
        return OWN
    best = min(measured, key=lambda label: (measured[label], label))
    return best if measured[best] < MAX_RELATIVE_TIME * seconds[OWN] else OWN


def times_path(device: torch.device) -> Path:
    """Return the file with the times of this GPU."""
    return TIMES_FOLDER / file_name(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def load_times(path: Path) -> Times:
    """Return the times in a file; none if it does not exist."""
    if not path.exists():
        return {}
    times: Times = json.loads(path.read_text())
    return times


def save_times(path: Path, problem: AttentionProblem, measured: Mapping[StepKind, Seconds]) -> None:
    """Add times to a file, in place of earlier ones of the same problem. Sorted, so that differences are readable."""
    times = load_times(path)
    times[problem.key] = {kind: dict(sorted(seconds.items())) for kind, seconds in measured.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(times.items())), indent=1) + "\n")
    temporary.replace(path)
