"""How people use Ray: tasks and bundles of one CPU, a cluster that others use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rank_processes import living_ranks
from ray_clusters import ray_with_cpus
from reference_models import Reference

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
import ray

from moeserve import LLM, EngineError, SamplingParams
from moeserve.executor.ray import placement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8)
MOST_BUSY = 1.1  # cores for each CPU that Ray has assigned
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    with ray_with_cpus(2):
        yield


@pytest.mark.usefixtures("two_cpus")
def test_an_engine_in_a_task_of_one_cpu_has_one_thread(reference: Reference) -> None:
    def busy_cores(folder: str, prompts: list[list[int]]) -> tuple[int, float]:
        """Return the engine's number of threads, and the cores that this process uses while it generates."""
        from moeserve import LLM

        with LLM(folder, **SETTINGS) as llm:
            before, began = time.process_time(), time.perf_counter()
            llm.generate(prompts, GREEDY, use_tqdm=False)
            busy = (time.process_time() - before) / (time.perf_counter() - began)
            return llm.config.compute.num_threads, busy

    task = ray.remote(num_cpus=1)(busy_cores)
    num_threads, busy = ray.get(task.remote(str(reference.folder), reference.prompts(9, 20, 3)))
    assert num_threads == 1
    assert busy <= MOST_BUSY


@pytest.mark.usefixtures("two_cpus")
def test_a_rank_in_a_bundle_of_one_cpu_uses_one_core(reference: Reference) -> None:
    with LLM(reference.folder, executor="ray", num_threads=1, **SETTINGS) as llm:
        (rank,) = living_ranks()
        before, began = sum(rank.cpu_times()[:2]), time.perf_counter()
        llm.generate(reference.prompts(9, 20, 3), GREEDY, use_tqdm=False)
        busy = (sum(rank.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    assert busy <= MOST_BUSY


@pytest.mark.usefixtures("two_cpus")
def test_a_cluster_that_others_use(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two CPUs is taken."""
    monkeypatch.setattr(placement, "SECONDS_TO_RESERVE", 5.0)

    class Busy:
        pass

    actor = ray.remote(num_cpus=1)(Busy).remote()
    ray.get(actor.__ray_ready__.remote())
    with pytest.raises(EngineError, match="no room now") as refusal:
        LLM(reference.folder, executor="ray", data_parallel_size=2, num_threads=1, **SETTINGS)
    assert "\n" not in str(refusal.value)
    prompts = reference.prompts(9, 20)
    with LLM(reference.folder, executor="ray", num_threads=1, **SETTINGS) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    ray.kill(actor)
    assert [output.outputs[0].token_ids for output in outputs] == reference.continuations(prompts, 8)
