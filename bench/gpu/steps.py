"""Steps of Qwen3-30B-A3B with few layers and random weights: as the host launches them, and in CUDA graphs.

A step's *device time* is that of a graph of it; the host's launches add the rest. The engine runs decode steps in
graphs, whose time includes the copies of their inputs, and steps with prompts without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from moeserve.bench.gpu.attention_cases import MAX_MODEL_LEN
from moeserve.bench.gpu.inputs import Chunks, Source, num_cache_blocks, source_of
from moeserve.bench.gpu.limits import eager_seconds, replay_seconds
from moeserve.bench.gpu.models import BLOCK_SIZE, capture_step, make_model, published
from moeserve.bench.gpu.parts import Item, Job, Row, bar
from moeserve.bench.gpu.rehearsal import SMALL_MODEL
from moeserve.config.settings import QuantizationName
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.ops.select import select_backend

LAYERS, SMALL_LAYERS = 8, 2
MIXED_BAR = "fraction_of_device_time", 1 / 1.3


def items(job: Job) -> Iterator[Item]:
    """Yield the measurements, the most important first."""
    source = source_of(job)
    mixed: Chunks = [*([(1, 512)] * 64), (200, 200)]
    decodes: list[Chunks] = [[(1, 512)] * batch for batch in (1, 8, 64, 256)]
    prompts: list[Chunks] = [[(tokens, tokens)] for tokens in (64, 512, 2048, 8192)]
    if job.on_cpu:
        decodes, mixed, prompts = [[(1, 20)] * 2], [*([(1, 20)] * 2), (3, 3)], [[(5, 5)]]
    yield "a step of 64 decodes and a prompt of 200 tokens", partial(measure, source, [mixed])
    yield "decode steps", partial(measure, source, decodes)
    yield "steps of prompts", partial(measure, source, prompts)
    if not job.on_cpu:
        yield "decode steps, fp8", partial(measure, source, decodes, "fp8")


@torch.inference_mode()
def measure(source: Source, steps: Sequence[Chunks], quantization: QuantizationName | None = None) -> Iterator[Row]:
    on_cpu, backend = source.device.type == "cpu", select_backend(source.device)
    num_layers = SMALL_LAYERS if on_cpu else LAYERS
    config = published("Qwen3-30B-A3B", num_layers, SMALL_MODEL if on_cpu else None)
    model = make_model(config, backend, source, quantization)
    for chunks in steps:
        step = source.step(chunks, BLOCK_SIZE)
        step = dataclasses.replace(step, token_ids=source.integers(0, config["vocab_size"], len(step.token_ids)))
        caches = model.make_caches(Places.equal(CacheRules(), num_cache_blocks(step)))
        for cache in caches:
            cache.clear()
        run = partial(model, step, caches)
        figures = {"seconds": eager_seconds(run), "device_seconds": replay_seconds(run)}
        if all(num_rows == 1 for num_rows, _ in chunks):
            replay = capture_step(model, caches, backend, source, len(chunks), MAX_MODEL_LEN // BLOCK_SIZE)
            figures["graph_seconds"] = eager_seconds(partial(replay, step))
        figures["fraction_of_device_time"] = figures["device_seconds"] / figures["seconds"]
        num_tokens = sum(num_rows for num_rows, _ in chunks)
        name = f"a step of {len(chunks)} chunks, {num_tokens} tokens, {num_layers} layers, {quantization or 'bf16'}"
        lines = [f"{key.replace('_', ' ')} {1e3 * value:.3f} ms" for key, value in figures.items() if "sec" in key]
        row = {"name": name, "status": "measured", "lines": [", ".join(lines)], **figures}
        yield row | (bar(figures, *MIXED_BAR) if 1 < len(chunks) < num_tokens else {})
