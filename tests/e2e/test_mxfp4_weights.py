"""Experts that a checkpoint stores in MXFP4 are served as they are stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mxfp4_checkpoints
import pytest
import torch
from float8_checkpoints import write
from model_context import cpu_context
from packed_panels import unpacked
from reference_models import Reference, make_reference
from safetensors.torch import load_file, save_file
from test_families import logits_of, reread

from moeserve import LLM, CheckpointError, SamplingParams
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.weights import Weights
from moeserve.models import registry
from moeserve.models.checkpoint import loading as weight_loading
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.checkpoint.loading import load_weights
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.models.checkpoint.packing import Packer, weights_of
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.inspection import as_text, inspect
from moeserve.models.weight_mapping import destinations
from moeserve.ops.products.interface import PackedWeights
from moeserve.worker import loading

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    encoded: Path
    decoded: Path
    original: Reference


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("mxfp4")
    original = make_reference(folder / "original", mxfp4_checkpoints.SHAPE)
    encoded, decoded, quantization = mxfp4_checkpoints.encoded_and_decoded(original)
    write(folder / "encoded", original, encoded, quantization)
    write(folder / "decoded", original, decoded, None)
    return Checkpoints(folder / "encoded", folder / "decoded", original)


@torch.inference_mode()
def weights_of_rank(folder: Path, *, keeps_mxfp4: bool, tp: int = 1, rank: int = 0) -> dict[str, Weights]:
    """Return the weights of one rank: with experts as they are stored, or all open in float32."""
    description = registry.describe(folder)
    groups = unconnected(Mesh(tp=tp, dp=1), rank)
    dtype, quantization = (torch.bfloat16, "mxfp4") if keeps_mxfp4 else (torch.float32, None)
    context: Any = dataclasses.replace(cpu_context(dtype, groups), quantization=quantization)
    dispatchers = TorchDispatchers("local" if tp == 1 else "all_to_all", groups.ep, context)
    model = Decoder(description.model, description.model.place_experts(tp), dispatchers, context)
    weight_format = description.weight_format.with_mxfp4_kept() if keeps_mxfp4 else description.weight_format
    stored = translated(open_checkpoint(folder, weight_format), description.family, len(model.config.layers))
    packer = Packer(model)
    places = destinations(model, description.family.norm_offset, stored.shapes)
    load_weights(stored, places, on_filled=packer.on_filled if keeps_mxfp4 else lambda place: None, show_progress=False)
    return weights_of(model)


def values_in_mxfp4(weights: Weights) -> torch.Tensor:
    """Return the values of weights that were packed in MXFP4."""
    _, num_outputs, num_inputs = weights.shape
    assert weights.panels is not None, "packed as soon as codes and scales are filled"
    assert not weights.open_tensors
    return unpacked(PackedWeights("mxfp4", weights.panels, num_outputs, num_inputs, None, weights.activation))


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_the_experts_of_every_rank_keep_their_values(
    tp: int, rank: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_loading, "PIECE_VALUES", 700)
    exact = weights_of_rank(checkpoints.decoded, keeps_mxfp4=False, tp=tp, rank=rank)
    given = weights_of_rank(checkpoints.encoded, keeps_mxfp4=True, tp=tp, rank=rank)
    experts = {name for name in given if ".experts." in name}
    assert len(experts) == 2 * checkpoints.original.model.config.num_hidden_layers
    for name in experts:
        assert torch.equal(values_in_mxfp4(given[name]), exact[name].open.weight_eOI.double()), name


def test_logits_differ_from_transformers_as_those_of_the_dequantised_checkpoint(checkpoints: Checkpoints) -> None:
    """transformers runs it in float32: kept experts add no error to that of bfloat16, and requantised ones do."""
    twin = reread(checkpoints.decoded, checkpoints.original, dtype=torch.float32)
    prompt = twin.prompts(200)[0]
    expected_TV = twin.logits(prompt).double()

    def error(folder: Path, **options: Any) -> float:
        """Return the relative error of a position in the middle; where rounding changes an expert, it is large."""
        with LLM(folder, dtype="bfloat16", **options) as llm:
            error_TV = logits_of(llm, prompt, chunk=40).double() - expected_TV
            return float((error_TV.norm(dim=1) / expected_TV.norm(dim=1)).median())

    kept, dequantised = error(checkpoints.encoded), error(checkpoints.decoded)
    requantised = error(checkpoints.encoded, quantization="int4")
    assert kept < 1.5 * dequantised  # measured: 0.055, 0.056 and 0.44
    assert requantised > 3 * kept


def test_ranks_and_starts_give_the_same_bytes(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank, two that share the experts, and a start from the packed weight cache."""
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 0.0)
    prompts = checkpoints.original.prompts(1, 9, 40)

    def outputs(**options: Any) -> list[Any]:
        with LLM(checkpoints.encoded, dtype="bfloat16", **options) as llm:
            results = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, GREEDY)]
            wait_for_cache_writers()
            return results

    first = outputs()
    assert "dequantised" not in caplog.text
    assert len(list((tmp_path / "cache" / "packed").glob("*.safetensors"))) == 1
    monkeypatch.setattr(loading, "load_weights", None)
    assert outputs() == first
    monkeypatch.undo()
    assert outputs(tensor_parallel_size=2, packed_cache=0) == first


def test_dummy_weights(checkpoints: Checkpoints) -> None:
    with LLM(checkpoints.encoded, dtype="bfloat16", load_format="dummy") as llm:
        assert llm.core.config.weights.quantization == "mxfp4"  # type: ignore[attr-defined]
        (output,) = llm.generate([[3, 1, 4]], GREEDY)
    assert len(output.outputs[0].token_ids) == 24


def test_inspect_counts_experts_as_they_are_stored(checkpoints: Checkpoints) -> None:
    kept, plain = (inspect(checkpoints.encoded, dtype) for dtype in ("bfloat16", "float32"))
    assert kept.num_parameters == plain.num_parameters
    assert kept.num_active_parameters == plain.num_active_parameters
    experts = {part.dtype: part for part in kept.parts if part.name == "routed experts"}
    num_weights = experts["mxfp4"].num_parameters
    assert experts["mxfp4"].num_bytes == num_weights // 2 + num_weights // 32
    assert "mxfp4, kept in memory" in as_text(kept)
    assert "mxfp4, dequantised when loaded" in as_text(plain)


def test_a_scale_that_is_nan_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = load_file(checkpoints.encoded / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name][1, 3, 0] = 255
    write(tmp_path / "damaged", checkpoints.original, tensors, mxfp4_checkpoints.QUANTIZATION)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        LLM(tmp_path / "damaged", dtype="bfloat16")
