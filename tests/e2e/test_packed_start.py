"""A start from the packed weight cache gives the same outputs as one from the checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from float8_checkpoints import write
from int4_checkpoints import encoded_and_decoded
from reference_models import SHAPES, Reference, make_reference

from moeserve import LLM, SamplingParams
from moeserve.errors import EngineError
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.checkpoint.packed_cache_writer import CacheWriter, wait_for_cache_writers
from moeserve.worker.weight_sources import packed_entry

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 0.0)
    return tmp_path / "cache" / "packed"


def outputs(reference: Reference, **options: Any) -> list[Any]:
    """Return tokens and log-probabilities of one start, whose cache entry is complete afterwards."""
    llm = LLM(model=str(reference.folder), num_threads=1, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in ([3, 1, 4, 1, 5], [9, 2, 6])]
    results = llm.generate(prompts, GREEDY)
    wait_for_cache_writers()
    llm.shutdown()
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def entries_in(cache: Path) -> list[Path]:
    return list(cache.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral-odd", dict(dtype="float32")),
        ("deepseek-v3", dict(dtype="bfloat16")),
        ("deepseek-v3", dict(quantization="int4")),
        ("gpt-oss", dict(quantization="int4")),
    ],
)
def test_the_second_start_reads_no_checkpoint_and_gives_the_same_outputs(
    name: str, options: dict[str, Any], reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    reference = reference_named(name)
    first = outputs(reference, **options)
    assert num_loads == [1]
    assert len(entries_in(cache)) == 1
    assert outputs(reference, **options) == first
    assert num_loads == [1]


def test_weights_that_keep_their_int4_codes_are_mapped_too(
    num_loads: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = SHAPES["mixtral"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    wider = dataclasses.replace(shape, settings=shape.settings | sizes)
    reference = make_reference(tmp_path / "original", wider)
    encoded, _, quantization = encoded_and_decoded(reference, "gptq", 32)
    write(tmp_path / "encoded", reference, encoded, quantization)
    reference.folder = tmp_path / "encoded"
    first = outputs(reference, quantization="int4")
    assert "dequantised" not in caplog.text
    assert outputs(reference, quantization="int4") == first
    assert num_loads == [1]


def test_other_settings_and_contents_get_separate_entries(
    reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path, tmp_path: Path
) -> None:
    reference = reference_named("mixtral")
    for options in (dict(dtype="float32"), dict(quantization="int8"), dict(quantization="int4")):
        outputs(reference, **options)
    assert num_loads == [3]
    assert len(entries_in(cache)) == 3
    (shard,) = reference.folder.glob("*.safetensors")
    times = shard.stat()
    try:
        shard.touch()
        outputs(reference, dtype="float32")
    finally:
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert num_loads == [4]


def test_the_cache_can_be_switched_off(
    reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    outputs(reference_named("mixtral"), packed_cache=0)
    assert not cache.exists()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_an_entry_that_is_damaged_or_of_another_model_is_replaced(
    is_damaged: bool, reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    first = outputs(reference_named("mixtral"))
    (entry,) = entries_in(cache)
    if is_damaged:
        entry.write_bytes(entry.read_bytes()[:-100])
    else:
        outputs(reference_named("gpt-oss"))
        (other,) = set(entries_in(cache)) - {entry}
        entry.write_bytes(other.read_bytes())
    num_before = num_loads[0]
    for _ in range(2):
        assert outputs(reference_named("mixtral")) == first
        assert num_loads == [num_before + 1]


def test_flipped_bits_are_found_while_the_engine_runs(plain: Reference, cache: Path) -> None:
    """The engine fails, and the next start packs the weights again."""
    first = outputs(plain)
    (path,) = entries_in(cache)
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 64]))
    llm = LLM(plain.folder, num_threads=1)
    wait_for_cache_writers()  # and for the check
    assert not path.exists()
    says = r"was damaged \(the checksum of .* differs\) and is removed; a new start packs the weights again"
    with pytest.raises(EngineError, match=says):
        llm.generate([[3, 1, 4, 1, 5]], GREEDY)
    llm.shutdown()
    assert outputs(plain) == first


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_caching_does_not_keep_a_deleted_model_in_memory(
    is_shut_down: bool, plain: Reference, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 600.0)
    llm = LLM(plain.folder, num_threads=1)
    llm.generate([[3, 1, 4]], GREEDY)
    assert is_writing()
    assert not any(thread.daemon for thread in threading.enumerate() if isinstance(thread, CacheWriter))
    if is_shut_down:
        llm.shutdown()
        assert not is_writing()
    del llm
    wait_for_cache_writers(cancelled_only=True)  # as the next start does
    assert not is_writing()
    assert "shut down" in caplog.text
    assert entries_in(cache) == []


def is_writing() -> bool:
    return any(isinstance(thread, CacheWriter) for thread in threading.enumerate())


ONE_SHOT = """
import sys
from moeserve import LLM, SamplingParams
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.worker.weight_sources import packed_entry
packed_entry.MIN_CACHED_BYTES = 0
packed_cache_writer.DELAY_SECONDS = 600.0
llm = LLM(sys.argv[1], num_threads=1)
llm.generate([[3, 1, 4]], SamplingParams(max_tokens=2))
print("answered", flush=True)
"""


def test_a_process_exits_without_finishing_the_entry(plain: Reference, cache: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_SHOT, str(plain.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "answered\n"
    _, complaints = process.communicate(timeout=120)  # far less than the delay before the entry is written
    assert (process.returncode, complaints) == (0, "")
    assert entries_in(cache) == []
