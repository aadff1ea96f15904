"""Where a step loses time outside of its kernels' work: launches, empty programs, draws, and steps with prompts.

The model is Qwen3-30B-A3B with few layers and random weights. A step's *device time* is that of a CUDA graph of it; the
engine runs steps with prompts without a graph, so their time is that of the host's launches if these take longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moeserve.bench.gpu.attention_cases import MAX_MODEL_LEN, attend
from moeserve.bench.gpu.cases import choose_greedily, choose_tokens, rms_norm
from moeserve.bench.gpu.check import crossed
from moeserve.bench.gpu.inputs import Chunks, Source, num_cache_blocks, source_of
from moeserve.bench.gpu.kernels import timed_items
from moeserve.bench.gpu.limits import eager_seconds, replay_seconds
from moeserve.bench.gpu.models import BLOCK_SIZE, capture_step, make_model, published
from moeserve.bench.gpu.parts import Item, Job, Row, bar
from moeserve.bench.gpu.rehearsal import SMALL_MODEL
from moeserve.config.settings import QuantizationName
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.models.decoder import Decoder
from moeserve.ops.backend import Backend
from moeserve.ops.select import select_backend
from moeserve.step_inputs import StepInputs

LAYERS, SMALL_LAYERS = (2, 8), (1, 2)  # the difference is the time of layers without embedding and head
MIXED_BAR = "fraction_of_device_time", 1 / 1.3
LONG_GRAPHS = crossed(["Qwen3-30B-A3B"], ["decode 1 x 4096", "decode 64 x 512"], ["plain"], [16], [0, MAX_MODEL_LEN])
# A launch; attention in graphs with programs for longer contexts; draws.
LOST_TIME = [
    rms_norm,
    dataclasses.replace(attend, small=[("small", "short decode", "plain", 16, 64)], timed=LONG_GRAPHS),
    choose_greedily,
    choose_tokens,
]


def items(job: Job) -> Iterator[Item]:
    """Yield the measurements, the most important first."""
    source = source_of(job)
    probe = Probe(source, select_backend(source.device))
    decodes: list[Chunks] = [[(1, 512)] * batch for batch in (1, 8, 64, 256)]
    mixed: Chunks = [*([(1, 512)] * 64), (200, 200)]
    prompts: list[Chunks] = [[(tokens, tokens)] for tokens in (64, 512, 2048, 8192)]
    if job.on_cpu:
        decodes, mixed, prompts = [[(1, 20)] * 2], [*([(1, 20)] * 2), (3, 3)], [[(5, 5)]]
    yield "a step of 64 decodes and a prompt of 200 tokens", partial(probe.eager_steps, [mixed])
    yield "decode steps", partial(probe.decode_steps, decodes, None)
    yield "steps of prompts", partial(probe.eager_steps, prompts)
    yield from timed_items(source, LOST_TIME)
    if not job.on_cpu:
        yield "decode steps, fp8", partial(probe.decode_steps, decodes, "fp8")


@dataclasses.dataclass(frozen=True)
class Probe:
    """The measurements of steps on one device."""

    source: Source
    backend: Backend

    @property
    def on_cpu(self) -> bool:
        return self.source.device.type == "cpu"

    @torch.inference_mode()
    def decode_steps(self, steps: Sequence[Chunks], quantization: QuantizationName | None) -> Iterator[Row]:
        """Measure a layer and the rest of captured decode steps, with the copies of their inputs."""
        few, many = SMALL_LAYERS if self.on_cpu else LAYERS
        seconds: list[list[float]] = []
        for num_layers in (few, many):
            model = self._model(num_layers, quantization)
            seconds.append([])
            for chunks in steps:
                step, caches = self._step(model, chunks)
                max_blocks = MAX_MODEL_LEN // BLOCK_SIZE
                replay = capture_step(model, caches, self.backend, self.source, len(chunks), max_blocks)
                seconds[-1].append(eager_seconds(partial(replay, step)))
        for chunks, of_few, of_many in zip(steps, *seconds, strict=True):
            layer = (of_many - of_few) / (many - few)
            name = f"a layer of a decode step, {len(chunks)} x {chunks[0][1]}, {quantization or 'bf16'}"
            line = f"{1e6 * layer:,.1f} us, {1e6 * (of_few - few * layer):.1f} us for the rest of the step"
            yield {"name": name, "status": "measured", "seconds": layer, "lines": [line]}

    @torch.inference_mode()
    def eager_steps(self, steps: Sequence[Chunks]) -> Iterator[Row]:
        """Measure steps with prompts: as the engine runs them, and in a graph."""
        num_layers = (SMALL_LAYERS if self.on_cpu else LAYERS)[1]
        model = self._model(num_layers, None)
        for chunks in steps:
            run = partial(model, *self._step(model, chunks))
            seconds, device = eager_seconds(run), replay_seconds(run)
            num_tokens = sum(num_rows for num_rows, _ in chunks)
            figures = {"seconds": seconds, "device_seconds": device, "fraction_of_device_time": device / seconds}
            row = {"name": f"a step of {len(chunks)} chunks, {num_tokens} tokens, {num_layers} layers", **figures}
            row |= {"status": "measured", "lines": [f"{1e3 * seconds:.2f} ms, {1e3 * device:.2f} ms of the device"]}
            yield row | (bar(figures, *MIXED_BAR) if len(chunks) > 1 else {})

    def _model(self, num_layers: int, quantization: QuantizationName | None) -> Decoder:
        config = published("Qwen3-30B-A3B", num_layers, SMALL_MODEL if self.on_cpu else None)
        return make_model(config, self.backend, self.source, quantization)

    def _step(self, model: Decoder, chunks: Chunks) -> tuple[StepInputs, list[Any]]:
        step = self.source.step(chunks, BLOCK_SIZE)
        token_ids = self.source.integers(0, model.config.vocab_size, len(step.token_ids))
        caches = model.make_caches(Places.equal(CacheRules(), num_cache_blocks(step), BLOCK_SIZE))
        for cache in caches:
            cache.clear()
        return dataclasses.replace(step, token_ids=token_ids), caches
