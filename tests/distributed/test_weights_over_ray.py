"""A trainer's update reaches ranks that are Ray's actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import ray_with_cpus
from reference_models import Reference
from safetensors.torch import load_file, save_file

from moeserve import LLM, SamplingParams
from moeserve.rl import WeightSender

SETTINGS: dict[str, Any] = dict(rl=True, max_model_len=64, kv_cache_memory="8MiB", num_threads=1, show_progress=False)
LAYOUT: dict[str, Any] = dict(tensor_parallel_size=2)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def state(llm: LLM) -> tuple[dict[str, str], list[int]]:
    (output,) = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], GREEDY, use_tqdm=False)
    return llm.weight_checksums(), output.outputs[0].token_ids


@pytest.mark.ranks
def test_updates_over_all_transports(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = reference_named("qwen3-moe")
    (tmp_path / "config.json").write_text((reference.folder / "config.json").read_text())
    old_tensors = load_file(reference.folder / "model.safetensors")
    versions = [{name: factor * each for name, each in old_tensors.items()} for factor in (-0.5, 0.7, -0.9)]
    with ray_with_cpus(2), LLM(str(reference.folder), executor="ray", **LAYOUT, **SETTINGS) as llm:
        old, found = state(llm), []
        for transport, tensors in zip(("shm", "disk", "tcp"), versions, strict=True):
            WeightSender(llm, transport).send(tensors, transport)  # type: ignore[arg-type]
            assert llm.get_weight_version() == transport
            found.append(state(llm))
        llm.reload_weights()
        assert state(llm) == old
    for each, tensors in zip(found, versions, strict=True):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with LLM(str(tmp_path), **LAYOUT, **SETTINGS) as llm:
            assert state(llm) == each
            assert each != old
