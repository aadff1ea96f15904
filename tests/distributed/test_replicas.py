"""`LLM` with several replicas in real processes: the tokens of one rank, and clean ends."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_processes import assert_gone, free_blocks, living_ranks
from reference_models import Reference
from small_steps import MIDDLE, PlantedBorder, bytes_of_tokens

from moeserve import LLM, CheckpointError, SamplingParams

SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="8MiB", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32"
)
ALL_BLOCKS = 256 // 16 * 8  # of each replica
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def llm_with_border(reference: Reference, folder: Path, **options: Any) -> tuple[LLM, PlantedBorder]:
    """Return an engine whose steps with prompts are large, and whose steps of a few tokens are small."""
    border = PlantedBorder(folder, bytes_of_tokens(reference.folder, MIDDLE))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in border.environment.items():
            patch.setenv(name, value)
        return LLM(reference.folder, **options), border


@pytest.fixture(scope="module")
def llm_and_border(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, PlantedBorder]]:
    llm, border = llm_with_border(reference, tmp_path_factory.mktemp("border"), data_parallel_size=2, **SETTINGS)
    with llm:
        yield llm, border


@pytest.fixture(scope="module")
def llm(llm_and_border: tuple[LLM, PlantedBorder]) -> LLM:
    return llm_and_border[0]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(reference: Reference, prompts: list[list[int]], num_tokens: int = 12) -> list[list[int]]:
    return reference.continuations(prompts, num_tokens)


def test_twenty_requests_give_the_tokens_of_transformers(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(*range(3, 80, 4))
    assert len(prompts) == 20
    assert tokens(llm.generate(prompts, GREEDY)) == expected(reference, prompts)
    assert len(living_ranks()) == 2
    assert not llm.core.has_work


def test_one_busy_replica_and_one_idle(llm_and_border: tuple[LLM, PlantedBorder], reference: Reference) -> None:
    llm, border = llm_and_border
    prompts = reference.prompts(5, 9, 30, seed=3)
    for prompt in prompts:
        assert tokens(llm.generate(prompt, GREEDY)) == expected(reference, [prompt])
    assert border.ways() == {False, True}


def test_two_replicas_of_two_ranks(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    """With long prompts in chunks, copies of experts, and hits of the prefix cache the second time."""
    other = reference_named("deepseek-v3-four-heads")
    prompts = other.clear_prompts([3, 40, 17, 24, 9, 31], 12)
    settings = SETTINGS | dict(max_num_batched_tokens=16, num_redundant_experts=3)
    llm, border = llm_with_border(other, tmp_path, tensor_parallel_size=2, data_parallel_size=2, **settings)
    with llm:
        assert tokens(llm.generate(prompts, GREEDY)) == expected(other, prompts)
        again = llm.generate(prompts, GREEDY)
        assert tokens(again) == expected(other, prompts)
        assert again[1].num_cached_tokens == 32
        assert border.ways() == {False, True}


def test_all_outputs_arrive(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=2**64 - 1, logprobs=2, prompt_logprobs=1, logit_bias={5: -1.5}, n=2)
    (output,) = llm.generate([list(range(3, 40))], params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 37
    assert [len(completion.logprobs or []) for completion in output.outputs] == [4, 4]
    (again,) = llm.generate([list(range(3, 40))], params)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in again.outputs]


def test_a_prompt_is_routed_to_its_prefix(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(40, 40, 40, seed=9)
    llm.generate(prompts, GREEDY)
    for prompt in reversed(prompts):
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32


@pytest.mark.slow
def test_aborts_leave_no_block_behind(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(*[20] * 6, seed=4)
    streams = [llm.stream(prompt, ENDLESS) for prompt in prompts]
    outputs = [next(stream) for stream in streams]
    for output in outputs[:2]:
        llm.abort(output.request_id)
    for stream in streams[2:4]:
        stream.close()  # type: ignore[attr-defined]
    (rest,) = llm.generate([prompts[0]], GREEDY)  # in the same steps
    assert tokens([rest]) == expected(reference, prompts[:1])
    for stream in streams[:2]:
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
    whole = expected(reference, prompts[4:], 200)
    assert [list(stream)[-1].outputs[0].token_ids for stream in streams[4:]] == whole
    assert free_blocks(llm, ALL_BLOCKS) == [ALL_BLOCKS] * 2


def test_two_engines_at_once_in_threads(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(*[10] * 8, seed=6)
    found: dict[str, Any] = {}

    def use(name: str) -> None:
        with LLM(reference.folder, data_parallel_size=2, **SETTINGS) as other:
            found[name] = tokens(other.generate(prompts, GREEDY))

    thread = threading.Thread(target=use, args=("other",))
    thread.start()
    while thread.is_alive():
        found["shared"] = tokens(llm.generate(prompts, GREEDY))
    thread.join()
    assert found["shared"] == found["other"] == expected(reference, prompts)
    assert len(living_ranks()) == 2


def test_a_checkpoint_that_cannot_be_loaded_is_refused_as_with_one_rank(reference: Reference, tmp_path: Path) -> None:
    before = living_ranks()
    broken = tmp_path / "broken"
    shutil.copytree(reference.folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*rank \d"):
        LLM(broken, data_parallel_size=2, **SETTINGS)
    assert_gone([process for process in living_ranks() if process not in before])


def test_updates_that_arrive_before_another_request_are_returned_once(llm: LLM, reference: Reference) -> None:
    prompts = reference.prompts(9, 14, 11)
    streams = []
    for prompt in prompts:
        streams.append(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40)))
        next(streams[-1])
        time.sleep(0.1)  # more tokens arrive, and nobody reads them before the next request
    assert [list(stream)[-1].outputs[0].token_ids for stream in streams] == reference.continuations(prompts, 40)


def cores_used_by(processes: list[psutil.Process], seconds: float) -> float:
    """Return the mean number of cores that this process and others use while this one sleeps."""
    pids = [os.getpid(), *(process.pid for process in processes)]

    def seconds_used() -> float:
        files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    before, started = seconds_used(), time.monotonic()
    time.sleep(seconds)
    return (seconds_used() - before) / (time.monotonic() - started)


def test_idle_replicas_use_less_than_a_hundredth_of_a_core(llm: LLM) -> None:
    llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)
    time.sleep(0.5)
    used = [cores_used_by(living_ranks(), 1) for _ in range(3)]
    assert statistics.median(used) < 0.01, used


def seconds_to_answer(llm: LLM, pauses: list[float]) -> list[float]:
    """Return the seconds of a request of one token, after each pause."""
    found = []
    for pause in pauses:
        time.sleep(pause)
        started = time.monotonic()
        llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        found.append(time.monotonic() - started)
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pauses", [[1.0, 1.3, 0.7, 1.7, 2.2], [60.0] * 5])
def test_idle_replicas_wake_at_once(llm: LLM, pauses: list[float]) -> None:
    """A wake-up that is lost costs up to a second. The time of a request without a pause is deducted."""
    usual = statistics.median(seconds_to_answer(llm, [0.0] * 20))
    answers = seconds_to_answer(llm, pauses)
    assert statistics.median(answers) - usual < 0.05, (answers, usual)
    assert sorted(answers)[-2] - usual < 0.2, (answers, usual)
