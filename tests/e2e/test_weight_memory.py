"""The memory of weights, counted before loading, equals the memory that loading takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build_contexts import cpu_context
from reference_models import SHAPES, Reference, make_reference, save_large_mixtral

from moeserve import LLM
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.errors import CheckpointError, SettingsError
from moeserve.kv.rank import cache as kv_cache
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.models import registry
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packing import fill_panels, packed_state
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.summary import LoadingMemory, loading_memory, quantised_bytes
from moeserve.models.weight_mapping import destinations
from moeserve.ops import select
from moeserve.ops.native import native_kernels
from moeserve.worker import loading

needs_kernels = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")


def counted(folder: Path, dtype: Any, quantization: Any, fills_all_first: bool = False) -> LoadingMemory:
    description = registry.describe(folder)
    context = dataclasses.replace(cpu_context(getattr(torch, dtype)), quantization=quantization, has_memory=False)
    dispatchers = TorchDispatchers("local", context.groups.ep, context)
    model = Decoder(description.model, description.model.place_experts(1), dispatchers, context)
    if not fills_all_first:
        checkpoint = open_checkpoint(folder, description.weight_format)
        checkpoint = translated(checkpoint, description.family, description.model.num_decoder_layers)
        places = destinations(model, description.family.norm_offset, checkpoint.shapes)
        fill_panels(place for each in places.into.values() for place in each)
    return loading_memory(model, fills_all_first=fills_all_first)


def loaded_bytes(folder: Path, **options: Any) -> int:
    settings = parse_settings({"packed_cache": 0, "num_threads": 1, **options})
    config = resolve(settings, registry.read_facts(str(folder)), MachineFacts(num_cores=1))
    with torch.inference_mode():
        model = loading.load_model(config, groups_of_one_rank(), show_progress=False).model
    addresses = {weight.data_ptr(): weight.nbytes for weight in packed_state(model).values()}
    return sum(addresses.values())  # an embedding that is the output head counts once


@pytest.mark.slow_but("mixtral", "deepseek-v3", "qwen3-next", "gpt-oss")
@needs_kernels
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("bfloat16", "int8"), ("float32", "int4")])
def test_bytes_counted_are_bytes_loaded(reference: Reference, dtype: Any, quantization: Any) -> None:
    memory = counted(reference.folder, dtype, quantization)
    if quantization is not None:
        assert memory.kept == quantised_bytes(registry.describe(reference.folder), dtype, quantization)
    assert memory.kept == loaded_bytes(reference.folder, dtype=dtype, quantization=quantization)
    assert memory.peak >= memory.kept


@needs_kernels
def test_experts_on_the_host_of_a_gpu_are_counted_there(reference_named: Callable[[str], Reference]) -> None:
    folder = reference_named("mixtral").folder
    description, settings = registry.describe(folder), json.loads((folder / "config.json").read_text())
    whole = dataclasses.replace(cpu_context(torch.bfloat16), has_memory=False)
    divided = dataclasses.replace(whole, device=torch.device("meta"), on_host=whole)  # in place of a GPU

    def kept(context: BuildContext, device: str) -> int:
        dispatchers = TorchDispatchers("local", context.groups.ep, context)
        model = Decoder(description.model, description.model.place_experts(1), dispatchers, context)
        memory = loading_memory(model, device=torch.device(device))
        assert memory.peak >= memory.kept
        return memory.kept

    width, inner = settings["hidden_size"], settings["intermediate_size"]
    expert_bytes = 2 * 3 * width * inner * settings["num_local_experts"] * settings["num_hidden_layers"]
    assert expert_bytes <= kept(divided, "cpu") < 1.5 * expert_bytes  # panels have whole numbers of rows
    assert kept(divided, "cpu") + kept(divided, "meta") == kept(whole, "cpu")


@pytest.mark.parametrize("is_tied", [True, False])
def test_without_kernels_weights_are_counted_by_parameters(
    tmp_path: Path, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "native_kernels", lambda: None)
    shape = SHAPES["mixtral"]
    shape = dataclasses.replace(shape, settings=shape.settings | {"tie_word_embeddings": is_tied})
    reference = make_reference(tmp_path, shape)
    memory = counted(reference.folder, "float32", None)
    assert memory.kept == memory.peak == loaded_bytes(reference.folder, dtype="float32")
    assert memory.kept == 4 * sum(weight.numel() for weight in reference.model.parameters())


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many layers, so that one layer is a small part of it."""
    shape = SHAPES["mixtral"]
    larger = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=8)
    return make_reference(
        tmp_path_factory.mktemp("deep"), dataclasses.replace(shape, settings=shape.settings | larger)
    ).folder


MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.models import registry
from moeserve.models.checkpoint.packing import Packer
from moeserve.worker.loading import load_model

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

sizes, on_filled = [], Packer.on_filled

def measured(packer, place):
    sizes.append(resident())
    on_filled(packer, place)
    sizes.append(resident())

Packer.on_filled = measured
folder, *quantization = sys.argv[1:]
options = {"packed_cache": 0, "quantization": quantization[0] if quantization else None}
config = resolve(parse_settings(options), registry.read_facts(folder), MachineFacts(num_cores=1))
torch.ones(4).bfloat16() @ torch.ones(4, 4).bfloat16()  # what torch needs once
before = resident()
with torch.inference_mode():
    load_model(config, groups_of_one_rank(), show_progress=False)
print(max(sizes) - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 100 MB in two shards, with one layer in both."""
    folder = tmp_path_factory.mktemp("large")
    save_large_mixtral(folder, hidden_size=512, expert_width=512, max_shard_size="60MB")
    return folder


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_loading_takes_no_more_memory_than_was_counted(large: Path, quantization: str | None) -> None:
    command = [sys.executable, "-c", MEASURE_PEAK, str(large), *([quantization] if quantization else [])]
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    memory = counted(large, "bfloat16", quantization)
    assert 0.8 * memory.kept < measured < memory.peak + 8 * 2**20


@needs_kernels
def test_weights_that_do_not_fit_are_refused(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, int4 = (counted(deep, "bfloat16", quantization) for quantization in (None, "int4"))
    assert int4.kept <= int4.peak < plain.kept - 2**20
    options = dict(dtype="bfloat16", num_threads=1, packed_cache=0, kv_cache_memory="512KiB")
    enough = int4.peak + 2**20  # for caches and tables of requests too

    monkeypatch.setattr(kv_cache, "free_memory", lambda num_processes: enough)
    LLM(deep, quantization="int4", **options).shutdown()
    with pytest.raises(CheckpointError, match=r"bfloat16 .*int8 or int4"):
        LLM(deep, **options)
    # All random weights are drawn before the first is packed.
    with pytest.raises(CheckpointError, match="quantised to int4"):
        LLM(deep, quantization="int4", load_format="dummy", **options)
    monkeypatch.setattr(kv_cache, "free_memory", lambda num_processes: int4.peak - 1)
    with pytest.raises(CheckpointError, match="quantised to int4"):
        LLM(deep, quantization="int4", **options)


def test_quantization_without_kernels_is_refused(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.api.startup.native_kernels", lambda: None)
    with pytest.raises(SettingsError, match=r"quantization='int8' needs the C\+\+ kernels"):
        LLM(deep, quantization="int8")
