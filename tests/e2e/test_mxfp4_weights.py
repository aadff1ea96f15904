"""Experts that a checkpoint stores in MXFP4 are served as they are stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mxfp4_checkpoints
import pytest
import torch
from build_contexts import cpu_context
from float8_checkpoints import write
from gguf_families import write_family
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
from moeserve.worker.weight_sources import checkpoint_tensors, packed_entry

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


@pytest.fixture(scope="module")
def forms(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoints]:
    """The checkpoints in each form, by the last part of its name."""
    folder = tmp_path_factory.mktemp("forms")
    original = make_reference(folder / "mixtral", mxfp4_checkpoints.OF_COMPRESSED_TENSORS)
    plain = load_file(original.folder / "model.safetensors")
    encoded, decoded = mxfp4_checkpoints.encoded_like_compressed_tensors(plain)
    write(folder / "encoded", original, encoded, mxfp4_checkpoints.COMPRESSED_TENSORS)
    write(folder / "decoded", original, decoded, None)
    of_gguf = make_reference(folder / "gpt-oss", mxfp4_checkpoints.OF_GGUF)
    _, decoded, _ = mxfp4_checkpoints.encoded_and_decoded(of_gguf)
    write(folder / "of-gguf", of_gguf, decoded, None)
    path = write_family(folder / "of-gguf", folder / "model.gguf", of_experts="MXFP4")
    return {
        "gpt-oss": checkpoints,
        "compressed-tensors": Checkpoints(folder / "encoded", folder / "decoded", original),
        "gguf": Checkpoints(path, folder / "of-gguf", of_gguf),
    }


FORMS = ("gpt-oss", "compressed-tensors", "gguf")


@torch.inference_mode()
def weights_of_rank(folder: Path, *, keeps_mxfp4: bool, tp: int = 1, rank: int = 0) -> dict[str, Weights]:
    """Return the weights of one rank: with experts as they are stored, or all open in float32."""
    folder = registry.folder_of(folder)
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
    on_filled = packer.on_filled if keeps_mxfp4 else lambda place: None
    load_weights(stored, places, on_filled=on_filled, show_progress=False, piece_values=700)
    return weights_of(model)


def values_in_mxfp4(weights: Weights) -> torch.Tensor:
    """Return the values of weights that were packed in MXFP4."""
    _, num_outputs, num_inputs = weights.shape
    assert weights.panels is not None, "packed as soon as codes and scales are filled"
    assert not weights.open_tensors
    return unpacked(PackedWeights("mxfp4", weights.panels, num_outputs, num_inputs, None, weights.activation))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_the_experts_of_every_rank_keep_their_values(
    tp: int, rank: int, form: str, forms: dict[str, Checkpoints]
) -> None:
    checkpoints = forms[form]
    exact = weights_of_rank(checkpoints.decoded, keeps_mxfp4=False, tp=tp, rank=rank)
    given = weights_of_rank(checkpoints.encoded, keeps_mxfp4=True, tp=tp, rank=rank)
    dequantised = weights_of_rank(checkpoints.encoded, keeps_mxfp4=False, tp=tp, rank=rank)
    experts = {name for name in given if ".experts." in name}
    assert len(experts) == 2 * checkpoints.original.model.config.num_hidden_layers
    for name in experts:
        expected_eOI = exact[name].open.weight_eOI
        assert torch.equal(values_in_mxfp4(given[name]), expected_eOI.double()), name
        assert torch.equal(dequantised[name].open.weight_eOI, expected_eOI), name


def test_logits_differ_from_transformers_as_those_of_the_dequantised_checkpoint(checkpoints: Checkpoints) -> None:
    """transformers runs it in float32: kept experts add no error to that of bfloat16, and requantised ones do."""
    twin = reread(checkpoints.decoded, checkpoints.original, dtype=torch.float32)
    prompt = twin.prompts(200)[0]
    expected_TV = twin.logits(prompt).double()

    def error(folder: Path, **options: Any) -> float:
        """Return the relative error of a position in the middle; where rounding changes an expert, it is large."""
        with LLM(folder, dtype="bfloat16", **options) as llm:
            error_TV = logits_of(llm, prompt, 40).double() - expected_TV
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
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)
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
    monkeypatch.setattr(checkpoint_tensors, "load_weights", None)
    assert outputs() == first
    monkeypatch.undo()
    assert outputs(tensor_parallel_size=2, packed_cache=0) == first


def test_dummy_weights(checkpoints: Checkpoints) -> None:
    with LLM(checkpoints.encoded, dtype="bfloat16", load_format="dummy") as llm:
        assert llm.core.config.weights.quantization == "mxfp4"  # type: ignore[attr-defined]
        (output,) = llm.generate([[3, 1, 4]], GREEDY)
    assert len(output.outputs[0].token_ids) == 24


@pytest.mark.parametrize("form", FORMS[1:])
def test_other_forms_are_kept_without_a_setting(
    form: str, forms: dict[str, Checkpoints], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(forms[form].encoded, dtype="bfloat16") as llm:
        assert llm.core.config.weights.quantization == "mxfp4"  # type: ignore[attr-defined]
        (output,) = llm.generate([[3, 1, 4]], GREEDY)
    assert len(output.outputs[0].token_ids) == 24
    num_experts = forms[form].original.model.config.num_local_experts
    num_layers = forms[form].original.model.config.num_hidden_layers
    num_matrices = 3 * num_layers * (num_experts if form == "compressed-tensors" else 1)
    assert f"{num_matrices} stay in mxfp4" in caplog.text


@pytest.mark.parametrize("without", ["experts.2.w2", "experts"])
def test_experts_that_are_not_all_in_mxfp4_are_dequantised(
    without: str, forms: dict[str, Checkpoints], tmp_path: Path
) -> None:
    original = forms["compressed-tensors"].original
    plain = load_file(original.folder / "model.safetensors")
    encoded, _ = mxfp4_checkpoints.encoded_like_compressed_tensors(plain, without=without)
    write(tmp_path / "encoded", original, encoded, mxfp4_checkpoints.COMPRESSED_TENSORS)
    with LLM(tmp_path / "encoded", dtype="bfloat16") as llm:
        assert llm.core.config.weights.quantization is None  # type: ignore[attr-defined]
        (output,) = llm.generate([[3, 1, 4]], GREEDY)
    assert len(output.outputs[0].token_ids) == 24


@pytest.mark.parametrize("form", FORMS)
def test_inspect_counts_experts_as_they_are_stored(form: str, forms: dict[str, Checkpoints]) -> None:
    checkpoints = forms[form]
    kept, plain = (inspect(checkpoints.encoded, dtype) for dtype in ("bfloat16", "float32"))
    assert kept.num_parameters == plain.num_parameters
    assert kept.num_active_parameters == plain.num_active_parameters
    experts = {part.dtype: part for part in kept.parts if part.name == "routed experts"}
    num_weights = experts["mxfp4"].num_parameters
    assert experts["mxfp4"].num_bytes == num_weights // 2 + num_weights // 32
    assert ("mxfp4, kept in memory" if form == "gpt-oss" else "experts kept in mxfp4, others") in as_text(kept)
    assert "dequantised when loaded" in as_text(plain)
    assert "kept in m" not in as_text(plain)


def test_a_scale_that_is_nan_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = load_file(checkpoints.encoded / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name][1, 3, 0] = 255
    write(tmp_path / "damaged", checkpoints.original, tensors, mxfp4_checkpoints.QUANTIZATION)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        LLM(tmp_path / "damaged", dtype="bfloat16")
