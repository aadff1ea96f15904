"""Where a step loses time outside of its kernels' work: launches, empty programs, draws, and steps with prompts.

The model is Qwen3-30B-A3B with few layers and random weights. A step's *device time* is that of a CUDA graph of it; the
engine runs steps with prompts without a graph, so their time is that of the host's launches if these take longer.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.costs import Bar, Chunks, attention_shape
from moeserve.bench.gpu.inputs import Source, num_cache_blocks
from moeserve.bench.gpu.launches import make_model
from moeserve.bench.gpu.limits import event_seconds, replay_seconds
from moeserve.bench.gpu.parts import Item, Row
from moeserve.bench.gpu.rehearsal import SMALL_MODEL, RepeatedCapture
from moeserve.bench.gpu.throughput import published
from moeserve.config.settings import QuantizationName
from moeserve.distributed.mesh import Mesh
from moeserve.layers.cache import CacheSize
from moeserve.models.decoder import Decoder
from moeserve.models.weight_loading import fill_randomly
from moeserve.ops.interfaces import Kernels, KeyValueCache
from moeserve.step_inputs import StepInputs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture
from moeserve.worker.step_replay import StepContext

BLOCK_SIZE = 16
NUM_LAYERS = 2, 8  # the difference is the time of layers without embedding, head and choice of tokens
MAX_MODEL_LEN = 40960
MIXED_BAR = Bar("fraction_of_device_time", 1 / 1.3)
VOCABULARY = 151936
DRAWS: dict[str, dict[str, Any]] = {
    "greedily": dict(top_p=1.0),
    "by temperature": dict(temperature=0.7, top_p=1.0),
    "with top_p": dict(temperature=0.7, top_p=0.95),
    "with top_k and top_p": dict(temperature=0.7, top_p=0.95, top_k=20),
}


def probe_items(source: Source, kernels: Kernels) -> Iterator[Item]:
    """Yield the measurements, the most important first."""
    on_cpu = source.device.type == "cpu"
    decodes: list[Chunks] = [[(1, 20)] * 2] if on_cpu else [[(1, 512)] * batch for batch in (1, 8, 64, 256)]
    mixed: Chunks = [*([(1, 20)] * 2), (3, 3)] if on_cpu else [*([(1, 512)] * 64), (200, 200)]
    prompts: list[Chunks] = [[(5, 5)]] if on_cpu else [[(tokens, tokens)] for tokens in (64, 512, 2048, 8192)]
    probe = Probe(source, kernels)
    yield "a step of 64 decodes and a prompt of 200 tokens", partial(probe.eager_steps, [mixed])
    yield "decode steps", partial(probe.decode_steps, decodes, None)
    yield "steps of prompts", partial(probe.eager_steps, prompts)
    yield "launches in a graph", probe.launch_floor
    yield "empty programs of attention", probe.empty_splits
    yield "draws", probe.draws
    if not on_cpu:
        yield "decode steps, fp8", partial(probe.decode_steps, decodes, "fp8")


@dataclasses.dataclass
class Probe:
    """The measurements on one device."""

    source: Source
    kernels: Kernels

    @property
    def on_cpu(self) -> bool:
        return self.source.device.type == "cpu"

    @property
    def num_layers(self) -> tuple[int, int]:
        return (1, 2) if self.on_cpu else NUM_LAYERS

    @torch.inference_mode()
    def launch_floor(self) -> Iterator[Row]:
        x, weight = self.source.normal(1, 64 if self.on_cpu else 2048), self.source.normal(64 if self.on_cpu else 2048)
        chains: dict[str, Callable[[], Any]] = {
            "rms_norm_kernel": lambda: self.kernels.rms_norm(x, weight, 1e-6),
            "torch's addition": lambda: x.add_(0),
        }
        for name, call in chains.items():
            yield seconds_row(f"a launch of {name} in a graph", replay_seconds(call, 200))

    @torch.inference_mode()
    def empty_splits(self) -> Iterator[Row]:
        """Decode attention in a graph, whose grid has splits for the longest context that may occur."""
        size, heads, groups = (16, 4, 2) if self.on_cpu else (128, 32, 4)
        backend = self.kernels.make_attention(
            dataclasses.replace(attention_shape(heads, groups, size), dtype=self.source.dtype)
        )
        for batch, context in [(2, 20)] if self.on_cpu else [(1, 512), (64, 512), (256, 512), (64, 4096)]:
            step = self.source.step([(1, context)] * batch, BLOCK_SIZE)
            sizes = num_cache_blocks(step), groups, BLOCK_SIZE, size
            cache = KeyValueCache(self.source.normal(*sizes), self.source.normal(*sizes))
            query = self.source.normal(batch, heads, size)
            for longest in (32, 64) if self.on_cpu else (context, MAX_MODEL_LEN):
                table = torch.zeros(batch, longest // BLOCK_SIZE, dtype=torch.int32, device=self.source.device)
                table[:, : step.block_table.shape[1]] = step.block_table
                padded = dataclasses.replace(step, block_table=table)
                seconds = replay_seconds(partial(backend.attend, query, cache, padded), 20)
                yield seconds_row(f"attention of {batch} x {context} in a graph for {longest}", seconds)

    @torch.inference_mode()
    def draws(self) -> Iterator[Row]:
        for rows in (2,) if self.on_cpu else (1, 64, 256):
            scores_RV = self.source.normal(rows, 300 if self.on_cpu else VOCABULARY, scale=3.0)
            positions = torch.zeros(rows, dtype=torch.int64, device=self.source.device)
            for name, fields in DRAWS.items():
                settings_RW, _ = self.source.settings(rows, **fields)
                draw = partial(self.kernels.choose_tokens, scores_RV, settings_RW, positions)
                yield seconds_row(f"draw {rows} tokens {name}", replay_seconds(draw, 5))

    @torch.inference_mode()
    def decode_steps(self, steps: list[Chunks], quantization: QuantizationName | None) -> Iterator[Row]:
        """Measure a layer and the rest of captured decode steps."""
        few, many = self.num_layers
        seconds = []
        for num_layers in (few, many):
            model = self._model(num_layers, quantization)
            seconds.append([self._replayed(model, chunks) for chunks in steps])
        suffix = f", {quantization}" if quantization else ""
        for chunks, of_few, of_many in zip(steps, *seconds, strict=True):
            layer = (of_many - of_few) / (many - few)
            rest = of_few - few * layer
            row = seconds_row(f"a layer of a decode step, {len(chunks)} x {chunks[0][1]}{suffix}", layer)
            yield row | {
                "rest_seconds": rest,
                "lines": [*row["lines"], f"{1e6 * rest:.1f} us for the rest of the step"],
            }

    @torch.inference_mode()
    def eager_steps(self, steps: list[Chunks]) -> Iterator[Row]:
        """Measure steps with prompts: as the engine runs them, the host's part, and the device's in a graph."""
        num_layers = self.num_layers[1]
        model = self._model(num_layers, None)
        for chunks in steps:
            step, caches = self._step(model, chunks)
            host: list[float] = []

            def run(step: StepInputs = step, caches: list[Any] = caches, host: list[float] = host) -> None:
                began = time.perf_counter()
                model(step, caches)
                host.append(time.perf_counter() - began)

            seconds, device = event_seconds(run), replay_seconds(partial(model, step, caches), 1)
            num_tokens = len(step.token_ids)
            row = seconds_row(f"a step of {len(chunks)} chunks, {num_tokens} tokens, {num_layers} layers", seconds)
            figures = {"host_seconds": statistics.median(host), "device_seconds": device}
            figures["fraction_of_device_time"] = device / seconds
            row["lines"].append(
                f"the host takes {1e3 * figures['host_seconds']:.2f} ms, the device {1e3 * device:.2f} ms"
            )
            yield row | figures | ({"bars": [MIXED_BAR.verdict(figures)]} if len(chunks) > 1 else {})

    def _model(self, num_layers: int, quantization: QuantizationName | None) -> Decoder:
        with tempfile.TemporaryDirectory() as folder:
            changes = tuple(SMALL_MODEL.items()) if self.on_cpu else ()
            published("Qwen3-30B-A3B").write(Path(folder), num_layers, changes)
            model = make_model(Path(folder), self.kernels, self.source.dtype, self.source.device, quantization)
        fill_randomly(model, 1)
        return model

    def _step(self, model: Decoder, chunks: Chunks) -> tuple[StepInputs, list[Any]]:
        step = self.source.step(chunks, BLOCK_SIZE)
        token_ids = self.source.integers(0, model.config.vocab_size, len(step.token_ids))
        caches = model.make_caches(CacheSize(num_cache_blocks(step), BLOCK_SIZE))
        for cache in caches:
            cache.clear()
        return dataclasses.replace(step, token_ids=token_ids), caches

    def _replayed(self, model: Decoder, chunks: Chunks) -> float:
        """Return the seconds of a decode step in a CUDA graph, with the copies of its inputs."""
        step, caches = self._step(model, chunks)
        context = StepContext(
            mesh=Mesh(tp=1, dp=1),
            tp_rank=0,
            block_size=BLOCK_SIZE,
            max_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
            device=self.source.device,
        )
        capture = RepeatedCapture() if self.on_cpu else TorchCapture(torch.cuda.Stream())
        graphs = CudaGraphs(model, caches, context, (len(chunks),), capture)
        settings, _ = self.source.settings(len(chunks))
        padding = torch.zeros(len(chunks), dtype=torch.bool, device=self.source.device)
        return event_seconds(partial(graphs, dataclasses.replace(step, settings=settings, padding=padding)))


def seconds_row(name: str, seconds: float) -> Row:
    return {"name": name, "status": "measured", "seconds": seconds, "lines": [f"{1e6 * seconds:,.1f} us"]}
