"""Several GPUs beside one: the engine's tokens on two ranks, by each dispatcher, are judged as those of one rank are.

So NCCL, one-shot sums in symmetric memory, graphs with collectives in them and DeepEP run, with their answers compared.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

from moeserve.bench.gpu.engine import Comparison, Device, compare

MIN_GPUS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": dict(tensor_parallel_size=2),
    "dp=2": dict(data_parallel_size=2),
}
DISPATCHERS = ("allgather", "all_to_all")
FAMILIES = ("Mixtral", "DeepseekV3")

COMPARISONS = (
    *(
        Comparison(family, "float32", f"{layout}, {dispatcher}", LAYOUTS[layout] | dict(dispatcher=dispatcher))
        for layout, dispatcher, family in itertools.product(LAYOUTS, DISPATCHERS, FAMILIES)
    ),
    *(
        Comparison("Mixtral", "bfloat16", f"{layout}, deepep", settings | dict(dispatcher="deepep"), is_wide=True)
        for layout, settings in LAYOUTS.items()
    ),
)


def compare_ranks(comparison: Comparison, device: Device, seed: int) -> dict[str, Any]:
    """The row of a comparison; it is left out if it needs DeepEP and that is not installed.

    Raises:
        Exception: whatever keeps the engine from running.
    """
    if comparison.settings["dispatcher"] == "deepep" and importlib.util.find_spec("deep_ep") is None:
        return {"name": comparison.name, "status": "left out", "reason": "the package deep_ep is not installed"}
    return compare(comparison, device, seed)
