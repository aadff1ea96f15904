"""An engine in the placement group of another program changes its size within the bundles that nobody uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray_clusters import ray_with_cpus
from reference_models import Reference

pytest.importorskip("ray")
import ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = dict(
    executor="ray", dtype="float32", max_model_len=64, kv_cache_memory="4MiB", max_num_seqs=4, num_threads=1
)


def test_a_change_uses_free_bundles_alone(reference_named: Callable[[str], Reference]) -> None:
    """The program itself has one of 4 bundles, and the first replica another one."""
    reference = reference_named("mixtral")
    prompts = reference.prompts(3, 17, 9)

    def change_size(folder: str) -> dict[str, Any]:
        from moeserve import LLM, SamplingParams
        from moeserve.errors import ScaleError, SettingsError
        from moeserve.executor.ray import placement

        placement.SECONDS_TO_RESERVE = 1.0
        found: dict[str, Any] = {"tokens": [], "errors": []}
        with LLM(folder, data_parallel_size=1, **SETTINGS) as llm:
            for size in (2, 3, 4, 1):
                try:
                    llm.scale(size)
                except (ScaleError, SettingsError) as error:
                    found["errors"].append(f"{type(error).__name__}: {error}")
                outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
                found["tokens"].append([output.outputs[0].token_ids for output in outputs])
            found["size"] = llm.config.parallel.data_parallel_size
        return found

    with ray_with_cpus(5):
        group = placement_group([{"CPU": 1}] * 4)
        placed = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        task = ray.remote(num_cpus=1)(change_size).options(scheduling_strategy=placed)
        found = ray.get(task.remote(reference.folder))
        free = ray.available_resources()["CPU"]
    assert free == 1  # outside of the group nothing was reserved
    assert found["tokens"] == [reference.continuations(prompts, 8)] * 4
    assert found["size"] == 1
    too_few_free, too_small = found["errors"]
    for part in ("ScaleError", "4 bundles", "of which 1 are free", "3 ranks"):
        assert part in too_few_free
    for part in ("ScaleError", "4 bundles", "of which 1 are free", "4 ranks"):
        assert part in too_small
