"""Weights that a checkpoint stores in int4 keep their values when they are packed as int4."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from build_contexts import cpu_context
from float8_checkpoints import write
from gguf_families import write_family
from int4_checkpoints import CONFIGS, encoded_and_decoded
from packed_panels import unpacked
from reference_models import SHAPES, Reference, make_reference
from safetensors.torch import load_file, save_file

from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.weights import Weights
from moeserve.models import registry
from moeserve.models.checkpoint.loading import keep_int4, load_weights
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packing import Packer, weights_of
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.gguf.checkpoint import checkpoint_folder
from moeserve.models.weight_mapping import destinations
from moeserve.ops.products.interface import PackedWeights

LARGER: dict[str, dict[str, Any]] = {
    "mixtral": dict(hidden_size=64, intermediate_size=128, head_dim=32),
    "deepseek-v3": dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=96,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=32,
    ),
}


def checkpoint(folder: Path, name: str, kind: str, group_size: int, **settings: int) -> tuple[Path, Path]:
    """Write a checkpoint in int4 and the same decoded. Return both folders."""
    shape = SHAPES[name]
    larger = dataclasses.replace(shape, settings=shape.settings | LARGER[name] | settings)
    original: Reference = make_reference(folder / "original", larger)
    encoded, decoded, quantization = encoded_and_decoded(original, kind, group_size)
    write(folder / "encoded", original, encoded, quantization)
    write(folder / "decoded", original, decoded, None)
    return folder / "encoded", folder / "decoded"


@dataclass(frozen=True)
class Rank:
    """The weights of one rank's model, by name."""

    weights: dict[str, Weights]
    kept: set[str]  # those that keep their codes

    def assert_kept(self, exact: Rank) -> None:
        """Every weight that keeps its codes has exactly the values of another model, whose weights are open."""
        for name in self.kept:
            weights = self.weights[name]
            _, num_outputs, num_inputs = weights.shape
            assert weights.panels is not None
            packed = PackedWeights("int4", weights.panels, num_outputs, num_inputs, None, weights.activation)
            assert torch.equal(unpacked(packed), exact.weights[name].open.weight_eOI.double()), name


@torch.inference_mode()
def load(folder: Path, *, is_exact: bool = False, tp: int = 1, rank: int = 0) -> Rank:
    """Load a rank's model: packed as int4, or exactly, in float32."""
    description = registry.describe(folder)
    groups = unconnected(Mesh(tp=tp, dp=1), rank)
    context = dataclasses.replace(
        cpu_context(torch.float32 if is_exact else torch.bfloat16, groups), quantization=None if is_exact else "int4"
    )
    dispatchers = TorchDispatchers("local" if tp == 1 else "all_to_all", groups.ep, context)
    model = Decoder(description.model, description.model.place_experts(tp), dispatchers, context)
    stored = open_checkpoint(folder, description.weight_format)
    stored = translated(stored, description.family, len(model.config.layers))
    places = destinations(model, description.family.norm_offset, stored.shapes)
    if is_exact:
        load_weights(stored, places, show_progress=False)
        return Rank(weights_of(model), set())
    keep_int4(stored, places)
    kept = {name for name, weights in weights_of(model).items() if weights.int4_scales is not None}
    packer = Packer(model)
    # Pieces that begin inside a word.
    load_weights(stored, places, on_filled=packer.on_filled, show_progress=False, piece_values=700)
    packer.finish()
    return Rank(weights_of(model), kept)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("kind", CONFIGS)
def test_codes_and_scales_are_kept(kind: str, group_size: int, tmp_path: Path) -> None:
    encoded, decoded = checkpoint(tmp_path, "mixtral", kind, group_size)
    exact, given = load(decoded, is_exact=True), load(encoded)
    assert given.weights.keys() - given.kept == {"head.weights"}
    given.assert_kept(exact)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_keeps_its_part(rank: int, tmp_path: Path) -> None:
    encoded, decoded = checkpoint(tmp_path, "deepseek-v3", "gptq", 32)
    exact, given = load(decoded, is_exact=True, tp=2, rank=rank), load(encoded, tp=2, rank=rank)
    given.assert_kept(exact)
    lost = {name.rpartition("network.")[2] for name in given.weights.keys() - given.kept}
    assert lost == {"head_maps.keys", "head.weights"}  # the maps of keys are stored transposed


def test_weights_cut_inside_a_group_are_quantised_anew(tmp_path: Path) -> None:
    """The inputs of a dense down projection are added in 4 chunks of 24."""
    encoded, decoded = checkpoint(tmp_path, "deepseek-v3", "awq", 32, intermediate_size=96)
    exact, given = load(decoded, is_exact=True, tp=2, rank=1), load(encoded, tp=2, rank=1)
    given.assert_kept(exact)
    assert any(name.endswith("mlp.down.weights") for name in given.weights.keys() - given.kept)


def test_groups_tell_whether_inputs_are_reordered(tmp_path: Path) -> None:
    """Whatever the config says of act-order: codes are kept where the inputs of groups are neighbours."""
    encoded, decoded = checkpoint(tmp_path, "mixtral", "gptq", 32)
    config = json.loads((encoded / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (encoded / "config.json").write_text(json.dumps(config))
    exact, given = load(decoded, is_exact=True), load(encoded)
    assert given.weights.keys() - given.kept == {"head.weights"}
    given.assert_kept(exact)
    config["quantization_config"]["desc_act"] = False
    (encoded / "config.json").write_text(json.dumps(config))
    tensors = load_file(encoded / "model.safetensors")
    reordered = {name: group_I.flip(0) if name.endswith("g_idx") else group_I for name, group_I in tensors.items()}
    save_file(reordered, encoded / "model.safetensors", metadata={"format": "pt"})
    assert not load(encoded).kept


def test_negative_scales_are_kept(tmp_path: Path) -> None:
    """auto-round writes them."""
    encoded, decoded = checkpoint(tmp_path, "mixtral", "gptq", 32)
    for folder, end in ((encoded, "q_proj.scales"), (decoded, "q_proj.weight")):
        tensors = load_file(folder / "model.safetensors")
        negated = {name: -tensor if name.endswith(end) else tensor for name, tensor in tensors.items()}
        save_file(negated, folder / "model.safetensors", metadata={"format": "pt"})
    exact, given = load(decoded, is_exact=True), load(encoded)
    assert given.weights.keys() - given.kept == {"head.weights"}
    given.assert_kept(exact)


@pytest.mark.parametrize("rank", [0, 1])
def test_q4_0_of_gguf_is_kept(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts of a layer are in one tensor, and about half of the scales are negative."""
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    sizes = dict(hidden_size=64, intermediate_size=64, head_dim=32)
    shape = dataclasses.replace(SHAPES["minimax-m2"], settings=SHAPES["minimax-m2"].settings | sizes)
    folder = make_reference(tmp_path / "original", shape).folder
    file = checkpoint_folder(write_family(folder, tmp_path / "model.gguf", "Q4_0"))
    exact, given = load(file, is_exact=True, tp=2, rank=rank), load(file, tp=2, rank=rank)
    assert given.weights.keys() - given.kept == {"head.weights"}
    given.assert_kept(exact)
