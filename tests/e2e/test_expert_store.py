"""Models whose experts are read from disk give the same outputs as in memory, and what cannot be read is named."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rank_processes import living_ranks
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.config import resolve_schedule
from moeserve.config.devices import DEVICES
from moeserve.errors import CheckpointError, EngineError, SettingsError
from moeserve.models.expert_store.budget import AUTO_SHARE, choose_budget, expert_sizes, moe_layers
from moeserve.models.expert_store.served import LEAST_FREE_BYTES
from moeserve.models.registry import describe
from moeserve.models.summary import cpu_model, loading_memory
from moeserve.protocol import StepPlan
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.turns import Turns
from moeserve.worker import chunk_size
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.request_table import Chunk

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 40]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "experts"


def start(reference: Reference, **options: Any) -> LLM:
    return LLM(model=str(reference.folder), packed_cache=0, num_threads=1, **options)


def given(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def outputs_of(reference: Reference, **options: Any) -> list[Any]:
    with start(reference, **options) as llm:
        return given(llm)


def least_memory(reference: Reference, **options: Any) -> int:
    """Return the smallest expert_memory, which the error names."""
    with pytest.raises(SettingsError, match="is too small: one expert of each layer takes") as error:
        start(reference, expert_memory=1, **options)
    return int(re.findall(r"at least (\d+)", str(error.value))[0])


def file_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    assert path.suffix == ".safetensors"
    return path


@contextmanager
def damaged(path: Path, tensor: str, row: int, num_rows: int) -> Iterator[None]:
    """Change a byte in one row of a tensor."""
    with path.open("r+b", buffering=0) as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[tensor]["data_offsets"]
        place = 8 + size + begin + row * ((end - begin) // num_rows) + 5
        file.seek(place)
        before = file.read(1)
        file.seek(place)
        file.write(bytes([before[0] ^ 1]))
        yield
        file.seek(place)
        file.write(before)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral-odd", dict(dtype="float32")),
        ("mixtral-odd", dict(quantization="int8")),
        ("deepseek-v3", dict(dtype="bfloat16", enforce_eager=True)),
        ("deepseek-v3", dict(quantization="int4")),
        ("gpt-oss", dict(dtype="bfloat16")),
        ("gpt-oss", dict(dtype="bfloat16", data_parallel_size=2)),
    ],
)
def test_outputs_are_those_of_a_model_in_memory(
    name: str, options: dict[str, Any], reference_named: Callable[[str], Reference], folder: Path, num_loads: list[int]
) -> None:
    """With one expert of each layer in memory, with some of them, and from the file that an earlier start wrote."""
    reference = reference_named(name)
    expected = outputs_of(reference, **options)
    least = least_memory(reference, **options)
    loads = [*num_loads]
    assert outputs_of(reference, expert_memory=least, **options) == expected
    assert len([*folder.iterdir()]) == options.get("data_parallel_size", 1)
    if "data_parallel_size" not in options:
        assert num_loads[0] == loads[0] + 1
    assert outputs_of(reference, expert_memory=2 * least, **options) == expected
    if "data_parallel_size" not in options:
        assert num_loads[0] == loads[0] + 1
    assert outputs_of(reference, expert_memory="1TB", **options) == expected  # all experts fit


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(tensor_parallel_size=2),
        dict(tensor_parallel_size=2, expert_parallel=False),
        dict(pipeline_parallel_size=2, num_redundant_experts=0),
        dict(data_parallel_size=2, num_redundant_experts=2),
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
        dict(max_num_batched_tokens=64, max_num_seqs=2),
    ],
)
def test_layouts(options: dict[str, Any], reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named("qwen3-moe-wide")
    expected = outputs_of(reference, dtype="bfloat16")
    least = int(1.1 * least_memory(reference, dtype="bfloat16", **options))  # of the rank with the smallest experts
    assert outputs_of(reference, dtype="bfloat16", expert_memory=least, **options) == expected


@pytest.mark.slow
def test_the_default_model_with_a_quarter_of_its_experts(folder: Path) -> None:
    prompts = ["The capital of France is", "Count to ten: one, two,"]

    def texts(**options: Any) -> list[str]:
        with LLM(packed_cache=0, **options) as llm:
            return [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(temperature=0))]

    assert texts(expert_memory="25%") == texts()


@pytest.mark.parametrize("share", [0.4, 0.9, 2.0])
def test_auto_takes_what_is_free(share: float, reference_named: Callable[[str], Reference]) -> None:
    """Less the KV cache and a share for everything else."""
    model = cpu_model(describe(reference_named("mixtral-odd").folder), "bfloat16", None)
    all_bytes = sum(size.num_experts * size.slot_bytes for size in expert_sizes(moe_layers(model)).values())
    others = loading_memory(model).kept - sum(
        weights.num_packed_bytes
        for layer in moe_layers(model).values()
        for weights in (layer.experts.gate_up, layer.experts.down)
    )
    (num_experts,) = {size.num_experts for size in expert_sizes(moe_layers(model)).values()}
    kv_cache_memory = 12345
    free = int((others + kv_cache_memory + share * all_bytes) / (1 - AUTO_SHARE)) + 1
    budget = choose_budget(model, "auto", free, kv_cache_memory)
    is_on_disk = {layer.experts.down.is_on_disk for layer in moe_layers(model).values()}
    if share > 1:
        assert budget is None
        assert is_on_disk == {False}
    else:
        assert budget is not None
        assert {*budget.slots.values()} == {int(share * num_experts)}
        assert is_on_disk == {True}
        assert budget.stored_bytes == all_bytes


@pytest.mark.parametrize(
    ("kv_cache_memory", "beside"), [(None, 2 * LEAST_FREE_BYTES), (12345, LEAST_FREE_BYTES + 12345)]
)
def test_memory_that_would_shrink_at_once_is_refused(
    kv_cache_memory: int | None, beside: int, reference_named: Callable[[str], Reference]
) -> None:
    model = cpu_model(describe(reference_named("mixtral-odd").folder), "bfloat16", None)
    wanted = sum(2 * size.slot_bytes for size in expert_sizes(moe_layers(model)).values())
    budget = choose_budget(model, wanted, 2**30, kv_cache_memory)
    assert budget is not None
    others = loading_memory(model).kept  # without experts, which are on disk now
    assert choose_budget(model, wanted, others + wanted + beside, kv_cache_memory) == budget
    with pytest.raises(SettingsError, match=r"does not fit in memory: .* must stay free"):
        choose_budget(model, wanted, others + wanted + beside - 1, kv_cache_memory)


def test_requests_that_need_an_unreadable_expert_fail_alone(
    reference_named: Callable[[str], Reference], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And only while it cannot be read."""
    reference = reference_named("mixtral-odd")
    prompts = [[token] for token in range(20)]
    options = dict(dtype="float32", enable_prefix_caching=False)
    with start(reference, expert_memory=least_memory(reference, **options), **options) as llm:
        expected = given(llm, prompts, ONE_TOKEN)
        path = file_in(folder)
        with damaged(path, "registered_layers.0.1.network.experts.down.panels", 1, 3):
            errors = []
            for prompt, right in zip(prompts, expected, strict=True):
                try:
                    assert given(llm, [prompt], ONE_TOKEN) == [right]
                except EngineError as error:
                    errors.append(str(error))
        assert 0 < len(errors) < len(prompts)
        says = rf"expert 1 of layer 0 with experts, from byte \d+ of {path} on, cannot be read: its checksum differs"
        assert all(re.search(says, error) for error in errors)
        assert "expert 1 of layer 0" in caplog.text
        assert given(llm, prompts, ONE_TOKEN) == expected


def test_a_file_that_ends_early(reference_named: Callable[[str], Reference], folder: Path) -> None:
    reference = reference_named("mixtral-odd")
    with start(reference, expert_memory=least_memory(reference)) as llm:
        expected = given(llm)
        path = file_in(folder)
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(EngineError, match="cannot be read: the file ends before"):
            given(llm)
        path.write_bytes(content)
        assert given(llm) == expected


def test_a_damaged_file_is_written_again(
    reference_named: Callable[[str], Reference], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = reference_named("mixtral-odd")
    least = least_memory(reference)
    expected = outputs_of(reference, expert_memory=least)
    header = file_in(folder).read_bytes()[8:200_000]
    tensor = next(name for name in re.findall(rb'"([^"]+)"', header) if b"experts" not in name).decode()
    with damaged(file_in(folder), tensor, 0, 1):
        assert outputs_of(reference, expert_memory=least) == expected
        assert f"is damaged (the checksum of {tensor} differs); it is written again" in caplog.text


def test_a_full_disk(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    reference = reference_named("mixtral-odd")
    least = least_memory(reference)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"expert_store='.*' has too little room: .* and 1000 bytes are free"):
        start(reference, expert_memory=least)
    assert not [*folder.iterdir()]


def test_another_folder(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    """Which only this user may write to."""
    reference = reference_named("mixtral-odd")
    with start(reference, expert_memory=least_memory(reference), expert_store=str(tmp_path / "fast")) as llm:
        given(llm)
    assert file_in(tmp_path / "fast").stat().st_mode & 0o077 == 0
    (tmp_path / "fast").chmod(0o777)
    with pytest.raises(SettingsError, match=r"expert_store='.*/fast' must belong to this user"):
        start(reference, expert_memory=least_memory(reference), expert_store=str(tmp_path / "fast"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(expert_store="fast"), "expert_store='fast' has no effect without expert_memory"),
        (dict(expert_memory="4 apples"), "expert_memory='4 apples' is not an amount of memory"),
        (dict(expert_memory="1GB", load_format="dummy"), "expert_memory='1GB' does not work with load_format='dummy'"),
        (dict(expert_memory="1GB", rebalance="auto"), "expert_memory='1GB' does not work with rebalance='auto'"),
        (dict(expert_memory=1, dtype="float16"), "needs C\\+\\+ kernels for the experts of .*dtype='bfloat16'"),
    ],
)
def test_settings_that_exclude_it(
    options: dict[str, Any], message: str, reference_named: Callable[[str], Reference]
) -> None:
    with pytest.raises(SettingsError, match=message):
        start(reference_named("mixtral-odd"), **options)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({}, [20, 20, 20]),
        (dict(expert_memory="50%"), [60]),
        (dict(expert_memory="50%", max_num_batched_tokens=30), [30, 30]),
        (dict(expert_memory="1TB"), [20, 20, 20]),
        (dict(expert_memory="50%", kv_cache_memory="1MiB", is_scarce=True), [20, 20, 20]),
    ],
)
def test_prompts_are_computed_in_large_chunks(
    options: dict[str, Any],
    chunks: list[int],
    reference_named: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With experts on disk, if there is memory, unless the user says otherwise: a chunk reads each expert once."""
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], max_num_batched_tokens=20))
    monkeypatch.setattr(resolve_schedule, "TOKENS_WITH_EXPERTS_ON_DISK", 80)
    options = {**options}
    if options.pop("is_scarce", False):
        monkeypatch.setattr(chunk_size, "free_bytes", lambda config: 0)
    sizes = []
    schedule = Scheduler.schedule

    def spy(scheduler: Scheduler, *arguments: Any) -> StepPlan | None:
        plan = schedule(scheduler, *arguments)
        sizes.append(0 if plan is None else plan.num_tokens)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", spy)
    with start(reference_named("mixtral-odd"), dtype="float32", enable_prefix_caching=False, **options) as llm:
        given(llm, [[5] * 60], ONE_TOKEN)
    assert [size for size in sizes if size] == chunks


def test_chunks_double_while_the_next_step_has_room(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what only looks free. A step that has no room is not tried."""
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], max_num_batched_tokens=20))
    kv_cache_memory, reserved_bytes, bytes_per_token = 2**20, 12345, 1000
    tried: list[int] = []

    def step_memory(run: Callable[[], None], device: str) -> int:
        run()
        return bytes_per_token * tried[-1]

    def note(probe: ModelRunner, chunks: list[Chunk]) -> None:
        tried.append(sum(len(chunk.token_ids) for chunk in chunks))

    monkeypatch.setattr(chunk_size, "measure_step_memory", step_memory)
    monkeypatch.setattr(chunk_size, "run_for_memory", note)
    options = dict(expert_memory="50%", kv_cache_memory=kv_cache_memory, max_num_batched_tokens=100)
    with start(reference_named("mixtral-odd"), dtype="float32", **options) as llm:
        worker = llm.core.replicas[0].executor.worker  # type: ignore[attr-defined]
        config = llm.config.changed(schedule={"max_num_batched_tokens_may_shrink": True})
        for room, expected in ((39, 20), (40, 40), (79, 40), (80, 80), (100, 100)):
            free = chunk_size.MOST_SHARE * room * bytes_per_token + kv_cache_memory + reserved_bytes
            monkeypatch.setattr(chunk_size, "free_bytes", lambda config, free=free: free)
            chosen = chunk_size.choose_chunk_size(config, worker._loaded, worker._context, reserved_bytes)
            assert chosen == expected
            assert tried == [size for size in (20, 40, 80) if size <= min(chosen, 80)]
            tried.clear()


def test_windows_are_as_large_as_the_chunks(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache of layers with windows has room for the chunks that memory allows, which the engine names."""
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], max_num_batched_tokens=20))
    monkeypatch.setattr(resolve_schedule, "TOKENS_WITH_EXPERTS_ON_DISK", 80)
    options: dict[str, Any] = dict(dtype="float32", kv_cache_memory="4MiB", block_size=4, max_num_seqs=1)

    def places(**more: Any) -> list[int]:
        with start(reference_named("gpt-oss"), expert_memory="50%", **options, **more) as llm:
            worker = llm.core.replicas[0].executor.worker  # type: ignore[attr-defined]
            (windows,) = worker.facts.other_groups
            assert llm.config.schedule.max_num_batched_tokens == worker.facts.chunk_size
            return [worker.facts.chunk_size, windows.num_places]

    large = places()
    monkeypatch.setattr(chunk_size, "free_bytes", lambda config: 0)
    small = places()
    assert small == places(max_num_batched_tokens=20)
    assert large == places(max_num_batched_tokens=80)
    assert large[1] > small[1]


def test_requests_in_turns_get_the_same_tokens(
    reference_named: Callable[[str], Reference], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, params = reference_named("mixtral-odd"), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[3 + index, 1, 4] for index in range(4)]
    num_waiting = []
    choose = Turns.choose

    def spy(turns: Turns, decoding: Sequence[LiveRequest]) -> set[LiveRequest]:
        chosen = choose(turns, decoding)
        num_waiting.append(len(decoding) - len(chosen))
        return chosen

    monkeypatch.setattr(Turns, "choose", spy)
    with start(reference, dtype="float32") as llm:
        expected = given(llm, prompts, params)
    assert not num_waiting, "all experts are in memory"
    memory = least_memory(reference, dtype="float32")
    for wait, takes_turns in ((5.0, True), (0.0, False)):
        with start(reference, dtype="float32", expert_memory=memory, expert_turn_wait=wait) as llm:
            assert given(llm, prompts, params) == expected
        assert any(num_waiting) == takes_turns
        num_waiting.clear()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_replaces_another_computes_chunks_of_the_same_size(
    reference_named: Callable[[str], Reference],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    options = dict(data_parallel_size=2, max_model_len=256, kv_cache_memory="8MiB", on_failure="recover")
    with start(reference_named("mixtral-odd"), expert_memory="50%", dtype="float32", **options) as llm:
        stream = llm.stream([3, 1, 4], params)
        next(stream)
        before = living_ranks()
        before[0].kill()
        (*_, last) = stream
        assert len(last.outputs[0].token_ids) == 200
        assert {rank.pid for rank in before} & {rank.pid for rank in living_ranks()} == {before[1].pid}
        size = llm.config.schedule.max_num_batched_tokens
        assert size == resolve_schedule.TOKENS_WITH_EXPERTS_ON_DISK > DEVICES["cpu"].max_num_batched_tokens


IMPORTED = """
import sys
from moeserve import LLM
with LLM(sys.argv[1], packed_cache=0, show_progress=False, expert_memory=sys.argv[2] or None) as llm:
    llm.generate([[3, 1, 4]])
print(*sorted(name for name in sys.modules if name.startswith("moeserve.models.expert_store")))
"""


@pytest.mark.parametrize("memory", ["", "50%"])
def test_engines_with_all_experts_in_memory_import_nothing_of_the_store(
    memory: str, reference_named: Callable[[str], Reference]
) -> None:
    command = [sys.executable, "-c", IMPORTED, str(reference_named("mixtral-odd").folder), memory]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    if memory:
        assert "moeserve.models.expert_store.served" in output
    else:
        assert not output


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=[pytest.mark.soak, pytest.mark.timeout(4500)])])
def test_experts_that_are_damaged_now_and_then(
    seconds: float, reference_named: Callable[[str], Reference], folder: Path
) -> None:
    """Requests of four threads get the right tokens, or an error that names the expert; nothing grows."""
    reference, dice = reference_named("mixtral-odd"), random.Random(0)
    num_experts = json.loads((reference.folder / "config.json").read_text())["num_local_experts"]
    prompts = [[dice.randrange(3, 90) for _ in range(dice.randrange(1, 30))] for _ in range(40)]
    options = dict(dtype="float32", enable_prefix_caching=False)
    with start(reference, **options) as llm:
        expected = given(llm, prompts, ONE_TOKEN)
    end, num_right, num_errors, sizes = time.monotonic() + seconds, 0, 0, []
    with (
        start(reference, expert_memory=least_memory(reference, **options), **options) as llm,
        ThreadPoolExecutor(4) as threads,
    ):

        def run(number: int) -> str | None:
            """Return an error, or None if the tokens are right."""
            try:
                assert given(llm, [prompts[number]], ONE_TOKEN) == [expected[number]]
            except EngineError as error:
                return str(error)
            return None

        while time.monotonic() < end:
            layer, expert = dice.randrange(2), dice.randrange(num_experts)
            weights = f"registered_layers.{layer}.1.network.experts.{dice.choice(('gate_up', 'down'))}.panels"
            with damaged(file_in(folder), weights, expert, num_experts) if dice.random() < 0.5 else nullcontext():
                results = [*threads.map(run, dice.sample(range(len(prompts)), 8))]
            errors = [error for error in results if error is not None]
            assert all(f"expert {expert} of layer {layer}" in error for error in errors), errors
            num_right += len(results) - len(errors)
            num_errors += len(errors)
            sizes.append((threading.active_count(), len([*Path("/proc/self/fd").iterdir()])))
    assert num_right > num_errors > 0
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])
