"""Published models on one rank without an engine, and CUDA graphs of their decode steps."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.rehearsal import RepeatedCapture
from moeserve.config.settings import QuantizationName
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.models.checkpoint.loading import fill_randomly
from moeserve.models.decoder import Decoder
from moeserve.models.registry import Description, describe
from moeserve.ops.backend import Backend
from moeserve.step_inputs import StepInputs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture
from moeserve.worker.rank_context import RankContext
from moeserve.worker.step_runner import StepOutputs

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
BLOCK_SIZE = 16


def published(name: str, num_layers: int, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json of a model with fewer layers, and other values of keys that it has."""
    config = PUBLISHED[name] | {"num_hidden_layers": num_layers, "bos_token_id": None, "eos_token_id": None}
    return config | {key: value for key, value in (changes or {}).items() if key in config}


def write_config(folder: str | Path, config: Mapping[str, Any]) -> None:
    (Path(folder) / "config.json").write_text(json.dumps(config))


def described(config: Mapping[str, Any]) -> Description:
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, config)
        return describe(folder)


def make_model(
    config: Mapping[str, Any], backend: Backend, source: Source, quantization: QuantizationName | None = None
) -> Decoder:
    """Return the model of a config.json for a single rank, with random weights unless it is on the meta device."""
    groups, facts = groups_of_one_rank(), described(config).model
    context = BuildContext(backend, groups, source.dtype, source.device, quantization=quantization)
    model = Decoder(facts, facts.place_experts(1), TorchDispatchers("local", groups.ep, context), context)
    if source.device.type != "meta":
        fill_randomly(model, 1)
    return model


def capture_step(
    model: Decoder, caches: list[Any], backend: Backend, source: Source, num_rows: int, max_blocks: int
) -> Callable[[StepInputs], StepOutputs]:
    """Capture a decode step. The function that is returned replays it for another step, whose inputs it copies."""
    sizes: Any = dict(tp_rank=0, max_blocks=max_blocks)
    context = RankContext(mesh=Mesh(tp=1, dp=1), device=source.device, **sizes)
    capture = TorchCapture(torch.cuda.Stream()) if backend.supports_cuda_graphs else RepeatedCapture()
    graphs = CudaGraphs(model, caches, context, (num_rows,), capture)
    settings, padding = source.settings(num_rows)[0], torch.zeros(num_rows, dtype=torch.bool, device=source.device)
    return lambda step: graphs(dataclasses.replace(step, settings=settings, padding=padding))
