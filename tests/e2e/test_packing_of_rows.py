"""Weights whose rows are packed as they are read have the bytes of weights that are packed once all rows are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build_contexts import cpu_context
from reference_models import Reference

from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.weights import allocate_parameters
from moeserve.models import registry
from moeserve.models.checkpoint.loading import load_weights
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packing import Packer, fill_panels, packed_state, weights_of
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.weight_mapping import destinations
from moeserve.ops.native import native_kernels

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")


@torch.inference_mode()
def load(reference: Reference, dtype: torch.dtype, quantization: Any, tp: int, *, as_read: bool) -> Decoder:
    """Load the second rank of two, or the only one, in pieces of few rows."""
    description = registry.describe(reference.folder)
    groups = unconnected(Mesh(tp=tp, dp=1), tp - 1)
    context = dataclasses.replace(cpu_context(dtype, groups), quantization=quantization)
    dispatchers = TorchDispatchers("local" if tp == 1 else "all_to_all", groups.ep, context)
    model = Decoder(description.model, description.model.place_experts(tp), dispatchers, context.without_memory())
    checkpoint = open_checkpoint(reference.folder, description.weight_format)
    checkpoint = translated(checkpoint, description.family, description.model.num_decoder_layers)
    if as_read:
        places = destinations(model, description.family.norm_offset, checkpoint.shapes)
        fill_panels(place for each in places.into.values() for place in each)
    allocate_parameters(model, context)
    packer = Packer(model)
    into = destinations(model, description.family.norm_offset, checkpoint.shapes)
    load_weights(checkpoint, into, on_filled=packer.on_filled, show_progress=False, piece_values=1500)
    packer.finish()
    return model


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "tp", "opened"),
    [
        ("mixtral-odd", 1, {"head.weights", "query_key_value.weights"}),  # tied; heads of 6 rows
        ("deepseek-v3", 2, {"head_maps.keys"}),  # stored transposed
        ("gpt-oss", 1, {"query_key_value.weights", "experts.gate_up", "experts.down"}),  # experts stored transposed
        ("qwen3-next", 1, {"query_key_value.weights", "input.weights", "rates.weights"}),
    ],
)
def test_the_bytes_are_those_of_whole_weights(
    name: str, tp: int, opened: set[str], quantization: Any, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    dtype = torch.float32 if name == "mixtral-odd" else torch.bfloat16
    whole, given = (load(reference, dtype, quantization, tp, as_read=as_read) for as_read in (False, True))
    as_read = {key for key, weights in weights_of(given).items() if weights.fills_panels}
    assert {key.rpartition("network.")[2] for key in weights_of(given).keys() - as_read} == opened
    expected, found = packed_state(whole), packed_state(given)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
