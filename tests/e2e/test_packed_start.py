"""Starts from a packed copy: the same bytes as from the checkpoint, for every rank's part, and only where it fits."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.models.packed_copies import LOCK
from moeserve.worker import loading

FAMILIES = ("mixtral", "mixtral-odd", "deepseek-v3", "gpt-oss")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "MIN_KEPT_BYTES", 0)
    monkeypatch.setattr(loading, "SECONDS_BEFORE_KEEPING", 0.0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def num_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a checkpoint's weights are read."""
    count = [0]
    load_weights = loading.load_weights

    def counted(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        load_weights(*arguments, **options)

    monkeypatch.setattr(loading, "load_weights", counted)
    return count


def outputs(reference: Reference, **options: Any) -> list[Any]:
    """Tokens and log-probabilities of one start, after which what it keeps is kept."""
    llm = LLM(model=str(reference.folder), num_threads=1, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in ([3, 1, 4, 1, 5], [9, 2, 6])]
    results = llm.generate(prompts, GREEDY)
    loading.wait_for_copies()
    llm.shutdown()
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def copies_in(cache: Path) -> list[Path]:
    return list(cache.glob("*.safetensors"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [dict(dtype="float32"), dict(dtype="bfloat16"), dict(quantization="int4")])
def test_the_second_start_reads_no_checkpoint_and_gives_the_same(
    name: str, options: dict[str, Any], reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    reference = reference_named(name)
    first = outputs(reference, **options)
    assert num_loads == [1]
    assert len(copies_in(cache)) == 1
    assert outputs(reference, **options) == first
    assert num_loads == [1]


def test_other_settings_and_other_contents_have_copies_of_their_own(
    reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path, tmp_path: Path
) -> None:
    reference = reference_named("mixtral")
    for options in (
        dict(dtype="float32"),
        dict(dtype="bfloat16"),
        dict(quantization="int8"),
        dict(quantization="int4"),
    ):
        outputs(reference, **options)
    assert num_loads == [4]
    assert len(copies_in(cache)) == 4
    (shard,) = reference.folder.glob("*.safetensors")
    times = shard.stat()
    try:
        shard.touch()
        outputs(reference, dtype="float32")
    finally:
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert num_loads == [5]


def test_it_can_be_switched_off(reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path) -> None:
    for _ in range(2):
        outputs(reference_named("mixtral"), packed_cache=0)
    assert num_loads == [2]
    assert not cache.exists()


def test_a_damaged_copy_does_not_stop_a_start(
    reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    reference = reference_named("mixtral")
    first = outputs(reference)
    (copy,) = copies_in(cache)
    copy.write_bytes(copy.read_bytes()[:-100])
    assert outputs(reference) == first
    assert num_loads == [2]
    assert outputs(reference) == first
    assert num_loads == [2]


def test_a_copy_of_another_model_is_made_anew(
    reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    first = outputs(reference_named("mixtral"))
    (copy,) = copies_in(cache)
    outputs(reference_named("gpt-oss"))
    (other,) = set(copies_in(cache)) - {copy}
    copy.write_bytes(other.read_bytes())
    assert outputs(reference_named("mixtral")) == first
    assert num_loads == [3]
    assert outputs(reference_named("mixtral")) == first
    assert num_loads == [3]


@pytest.mark.parametrize("waits_for", ["the first requests", "another writer"])
@pytest.mark.parametrize("is_shut_down", [True, False])
def test_a_model_that_is_gone_is_not_kept_alive_to_be_written(
    waits_for: str,
    is_shut_down: bool,
    plain: Reference,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cache.mkdir(parents=True)
    with (cache / LOCK).open("ab") as lock:
        if waits_for == "another writer":
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            monkeypatch.setattr(loading, "SECONDS_BEFORE_KEEPING", 600.0)
        llm = LLM(plain.folder, num_threads=1)
        llm.generate([[3, 1, 4]], GREEDY)
        assert is_writing()
        if is_shut_down:
            llm.shutdown()
            assert not is_writing()
        del llm
        loading.wait_for_copies(only_given_up=True)  # as the next start does
        assert not is_writing()
    assert "no packed copy is kept: the model was shut down" in caplog.text
    assert copies_in(cache) == []


def is_writing() -> bool:
    return any(thread.name == "packed copy" for thread in threading.enumerate())


ONE_SHOT = """
import sys
from moeserve import LLM, SamplingParams
from moeserve.worker import loading
loading.MIN_KEPT_BYTES = 0
loading.SECONDS_BEFORE_KEEPING = 600.0
llm = LLM(sys.argv[1], num_threads=1)
llm.generate([[3, 1, 4]], SamplingParams(max_tokens=2))
print("answered", flush=True)
"""


def test_a_process_that_has_answered_ends_without_writing(plain: Reference, cache: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_SHOT, str(plain.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "answered\n"
    answered = time.monotonic()
    _, complaints = process.communicate(timeout=60)
    assert time.monotonic() - answered < 20
    assert (process.returncode, complaints) == (0, "")
    assert copies_in(cache) == []
