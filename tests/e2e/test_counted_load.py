"""What experts were given, told by an engine: the counts that follow from the routers of transformers."""

from __future__ import annotations

import math
import socket
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams, cli
from moeserve.errors import EngineError, SettingsError
from moeserve.telemetry.expert_load import LoadWindow, read_windows, summed
from moeserve.telemetry.heat import NO_LOAD, colours
from moeserve.telemetry.load_image import Map

SETTINGS: dict[str, Any] = dict(
    dtype="float32", kv_cache_memory="8MiB", max_model_len=256, max_num_batched_tokens=32, enable_prefix_caching=False
)
NUM_TOKENS = 12


def recount(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """By layer, by expert. Of a request all tokens but the last one go through the model."""
    return reference.expert_counts([prompt + reference.greedy(prompt, NUM_TOKENS)[:-1] for prompt in prompts])


def generate(llm: LLM, prompts: list[list[int]]) -> None:
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-odd", {}),
        ("deepseek-v3", {"enforce_eager": True}),
        ("mixtral-odd", {"data_parallel_size": 2, "num_redundant_experts": 3}),
        ("deepseek-v3-four-heads", {"tensor_parallel_size": 2, "dispatcher": "allgather", "debug_collectives": True}),
    ],
)
def test_counts_are_those_of_the_routers(
    name: str, settings: dict[str, Any], reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(3, 40, 17, 24, 9, 31)
    expected = recount(reference, prompts)
    num_ranks = settings.get("tensor_parallel_size", 1) * settings.get("data_parallel_size", 1)
    num_computed = sum(map(len, prompts)) + len(prompts) * (NUM_TOKENS - 1)
    with LLM(reference.folder, show_progress=False, **SETTINGS, **settings) as llm:
        assert sum(map(sum, llm.expert_load().tokens_of_expert)) == 0  # the run that measures memory is not told of
        for _ in range(2):  # the second time from graphs
            generate(llm, prompts)
            window = llm.expert_load()
            assert [list(counts) for counts in window.tokens_of_expert] == expected
            assert [sum(counts) for counts in window.tokens_of_rank] == [sum(counts) for counts in expected]
            assert {len(counts) for counts in window.tokens_of_rank} == {num_ranks}
            assert window.num_tokens == num_computed
            assert window.num_padding_tokens == 0
            assert 0 < window.seconds < 60
            assert (window.bytes_dispatched > 0) == (num_ranks > 1)
            assert (window.straggler_seconds > 0) == (num_ranks > 1)
    with pytest.raises(EngineError, match="shut down"):
        llm.expert_load()


@pytest.mark.ranks
@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_file_and_metrics_are_told_every_window(
    data_parallel_size: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named("mixtral-odd")
    prompts = reference.prompts(3, 40, 17, 24)
    expected = recount(reference, prompts)
    path, port = tmp_path / "loads.jsonl", free_port()
    settings = dict(expert_load_window=3, expert_load_file=str(path), metrics_port=port)
    with LLM(
        reference.folder, show_progress=False, data_parallel_size=data_parallel_size, **SETTINGS, **settings
    ) as llm:
        generate(llm, prompts)
        told = llm.expert_load()
        windows = read_windows(path)
        llm.save_placement(tmp_path / "placement.json")  # ends a window of no steps, of which nobody is told
        assert llm.expert_load().num_steps == 0
        assert read_windows(path) == windows
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            metrics = dict(
                line.decode().rsplit(" ", 1) for line in answer.read().splitlines() if not line.startswith(b"#")
            )
        generate(llm, prompts)
    total = summed(windows)
    # All since the last call, whatever went to the file meanwhile.
    assert (told.num_steps, told.tokens_of_expert) == (total.num_steps, total.tokens_of_expert)
    assert {window.num_steps for window in windows[:-1]} == {3}
    assert [window.first_step for window in windows] == [3 * number for number in range(len(windows))]
    assert [list(counts) for counts in total.tokens_of_expert] == expected
    assert float(metrics["moeserve_tokens_total"]) == total.num_tokens
    assert float(metrics["moeserve_steps_total"]) == total.num_steps
    last: LoadWindow = windows[-1]
    for layer, counts in zip(last.layers, last.tokens_of_expert, strict=True):
        shown = float(metrics[f'moeserve_expert_load_max_over_mean{{layer="{layer}"}}'])
        assert shown == pytest.approx(max(counts) * len(counts) / max(1, sum(counts)) if sum(counts) else 1.0)
    assert summed(read_windows(path)).num_tokens == 2 * total.num_tokens  # the end of the engine told the last of it
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_the_picture_of_an_engines_records_has_the_colours_of_a_recount(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Counts that follow from transformers' routers, the colours that follow from them, and the pixels of the file."""
    reference = reference_named("mixtral-odd")
    prompts = reference.prompts(3, 40, 17, 24)
    counts = recount(reference, prompts)
    records, picture = tmp_path / "loads.jsonl", tmp_path / "loads.png"
    with LLM(
        reference.folder, show_progress=False, expert_load_window=4, expert_load_file=str(records), **SETTINGS
    ) as llm:
        generate(llm, prompts)
    assert cli.main(["viz", str(records), "--png", str(picture)]) == 0
    pixels = decoded(picture.read_bytes())
    cells = Map.of(len(counts), len(counts[0]))
    shown, expected = [], []
    for layer, of_layer in enumerate(counts):
        for expert, count in enumerate(of_layer):
            left, top = cells.left + expert * cells.cell_width, cells.top + layer * cells.cell_height
            cell = pixels[top : top + cells.cell_height - cells.gap, left : left + cells.cell_width - cells.gap]
            (colour,) = {tuple(pixel) for pixel in cell.reshape(-1, 3).tolist()}
            shown.append(colour)
            expected.append(colour_of(count * len(of_layer) / sum(of_layer)))
    assert shown == expected
    assert len(set(expected)) > 3


def colour_of(ratio: float) -> tuple[int, int, int]:
    """Of a load over the mean: 64 shades from 1/8 to 8."""
    if not ratio:
        return NO_LOAD
    return colours()[min(63, max(0, math.floor((math.log2(ratio) + 3) / 6 * 64)))]


def decoded(content: bytes) -> npt.NDArray[np.uint8]:
    """[height, width, 3] of a PNG file with a palette and without filters."""
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        chunks[content[at + 4 : at + 8]] = content[at + 8 : at + 8 + size]
        at += 12 + size
    width, height = (int.from_bytes(chunks[b"IHDR"][start : start + 4], "big") for start in (0, 4))
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], dtype=np.uint8).reshape(-1, 3)[lines[:, 1:]]


def test_a_file_that_cannot_be_written_is_named(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expert_load_file='.*/loads.jsonl' cannot be written: No such file"):
        LLM(reference_named("mixtral").folder, expert_load_file=str(tmp_path / "no" / "loads.jsonl"), **SETTINGS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
