"""Launches of a decode step on a GPU, counted without one: few, the same for any batch, none waits for the device."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from moeserve.bench.gpu.launches import decode, prefill, record_step
from moeserve.step_inputs import ChunkSpan

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def launches(config: dict[str, Any], spans: list[ChunkSpan], quantization: Any = None) -> list[Counter[str]]:
    """Return the number of launches by name: for each layer, and then outside of layers."""
    return [Counter(launch.name for launch in part) for part in record_step(config, spans, quantization)]


@pytest.mark.parametrize(
    ("name", "quantization", "batches", "most_in_a_layer"),
    [
        ("Mixtral-8x7B", None, (2, 64), 13),
        ("Mixtral-8x7B", "fp8", (2, 64), 14),
        ("Qwen3-30B-A3B", None, (2, 32), 15),
        ("DeepSeek-V3", None, (2, 4), 28),
        ("DeepSeek-V3", "fp8", (5, 33), 30),  # logits of the router are a product of torch
        ("gpt-oss-20b", None, (2, 64), 13),
        ("Qwen3-Next-80B-A3B", None, (2, 8), 24),
    ],
)
def test_launches_of_a_layer(name: str, quantization: Any, batches: tuple[int, int], most_in_a_layer: int) -> None:
    config = PUBLISHED[name] | {"num_hidden_layers": 4}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    few, many = (launches(config, decode(num_requests, 300), quantization) for num_requests in batches)
    assert few == many
    assert max(sum(layer.values()) for layer in many[:-1]) <= most_in_a_layer
    assert sum(many[-1].values()) <= 10


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_attention_launches_only_kernels_with_chunks(name: str) -> None:
    """Chunks of one row have other kernels than longer ones. Those of DeepSeek-V3 expand long prompts."""
    config = PUBLISHED[name] | {"num_hidden_layers": 1}
    single, several = {"attend_split_kernel", "merge_splits_kernel"}, {"attend_tile_kernel"}
    expanded = {"attend_expanded_kernel", "gather_vectors_kernel"}
    long = several if name == "Qwen3-30B-A3B" else expanded
    prompts, short = [ChunkSpan(0, 500, 500), ChunkSpan(500, 700, 900)], [ChunkSpan(0, 5, 300), ChunkSpan(5, 2, 2)]
    mixed = [*decode(2, 300), ChunkSpan(2, 500, 500)]
    for spans, expected in ((decode(2, 300), single), (prompts, long), (short, several), (mixed, single | long)):
        layer, _ = launches(config, spans)
        assert {kernel: layer[kernel] for kernel in single | several | expanded if layer[kernel]} == dict.fromkeys(
            expected, 1
        )
        assert not layer["torch new_zeros"] or spans is mixed, "every row is written"


def test_linear_attention_computes_prompts_in_tiles_and_single_tokens_one_by_one() -> None:
    config = PUBLISHED["Qwen3-Next-80B-A3B"] | {"num_hidden_layers": 4}
    tiles, single = {"prepare_tiles_kernel", "attend_tiles_kernel"}, {"recurrence_kernel"}
    mixed = [*decode(2, 300), ChunkSpan(2, 500, 500)]
    for spans, expected in ((prefill(500, 500), tiles), (decode(2, 300), single), (mixed, tiles | single)):
        layer = launches(config, spans)[0]
        assert {name: layer[name] for name in tiles | single if layer[name]} == dict.fromkeys(expected, 1)
        assert layer["convolve_kernel"] == layer["gate_kernel"] == 1
        assert layer["store_states_kernel"] == (spans != decode(2, 300))


def test_compressed_entries_take_the_same_launches_in_any_decode_step() -> None:
    config = PUBLISHED["DeepSeek-V4-Flash"] | {"num_hidden_layers": 4}
    few, many = (launches(config, decode(num_requests, 300)) for num_requests in (2, 8))
    assert few == many
    hashed, routed = many[2:4]  # a layer with an indexer and experts by token id, and one with all entries
    assert sum(hashed.values()) <= 63
    assert sum(routed.values()) <= 43
