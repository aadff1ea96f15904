"""Starts from a packed copy: the same bytes as from the checkpoint, for every rank's part, and only where it fits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams
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
    llm.shutdown()
    for thread in threading.enumerate():
        if thread.name == "packed copy":
            thread.join()
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [dict(dtype="float32"), dict(dtype="bfloat16"), dict(quantization="int4")])
def test_the_second_start_reads_no_checkpoint_and_gives_the_same(
    name: str, options: dict[str, Any], reference_named: Callable[[str], Reference], num_loads: list[int], cache: Path
) -> None:
    reference = reference_named(name)
    first = outputs(reference, **options)
    assert num_loads == [1]
    assert len(list(cache.iterdir())) == 1
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
    assert len(list(cache.iterdir())) == 4
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
    (copy,) = cache.iterdir()
    copy.write_bytes(copy.read_bytes()[:-100])
    assert outputs(reference) == first
    assert num_loads == [2]
    assert outputs(reference) == first
    assert num_loads == [2]
