"""Weights of GGUF files in the types that the kernels read stay as they are stored."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_blocks import KINDS, random_blocks, values_of
from gguf_families import write_family
from reference_models import SHAPES, Reference, make_reference
from test_families import logits_of

from moeserve import LLM, CheckpointError, SamplingParams
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.models.checkpoint.packing import weights_of
from moeserve.models.inspection import as_text, inspect
from moeserve.worker.weight_sources import checkpoint_tensors, packed_entry

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
# Heads of 64 values in 4 chunks of one head each, and experts of 768 inputs in two chunks, which cut a block
SIZES = dict(
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_local_experts=4,
    vocab_size=256,
)
KindOf = Callable[[str], str | None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    shape = dataclasses.replace(SHAPES["mixtral"], settings=SHAPES["mixtral"].settings | SIZES)
    return make_reference(tmp_path_factory.mktemp("gguf") / "original", shape)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(original: Reference, path: Path, kind_of: KindOf, *, is_decoded: bool = False) -> Path:
    """Write a file with random blocks in the chosen types, or with their values."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType] | None:
        kind = kind_of(name)
        if kind is None or values.ndim < 2 or "gate_inp" in name:
            return None
        if kind not in KINDS:
            of_tensor = gguf.GGMLQuantizationType[kind]
            return gguf.quantize(values, of_tensor), of_tensor
        blocks = random_blocks(kind, values.shape, float(values.std()), seed=zlib.crc32(name.encode()))
        if is_decoded:
            return values_of(kind, blocks), gguf.GGMLQuantizationType.F32
        return blocks, gguf.GGMLQuantizationType[kind]

    return write_family(original.folder, path, encode=encode)


def formats_in(llm: LLM) -> dict[str, str]:
    """Return the formats of the packed weights that stay as they are stored, by name without the layer."""
    model = llm.core.replicas[0].executor.worker.runner.model  # type: ignore[attr-defined]
    return {
        name: "+".join(dict.fromkeys(rows.format for rows in weights.stored_rows))
        for name, weights in weights_of(model).items()
        if weights.stored_rows
    }


def num_bytes_in(llm: LLM) -> int:
    model = llm.core.replicas[0].executor.worker.runner.model  # type: ignore[attr-defined]
    memories = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(memories.values())


def mixed(name: str) -> str | None:
    """The types of Q4_K_M: values, and down projections of half of the layers, have more bits."""
    if "attn_v" in name or "blk.0.ffn_down" in name or name == "output.weight":
        return "Q6_K"
    return "Q8_0" if name == "token_embd.weight" else "Q4_K"


def outputs(path: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    with LLM(path, dtype="bfloat16", packed_cache=0, **options) as llm:
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model(kind: str, original: Reference, tmp_path: Path) -> None:
    """Errors are compared with those of the dequantised model in bfloat16, because both are amplified in the same way.

    Rows rounded to 8 bits have steps of m / 127, where m is the largest magnitude of a block of values of size s. m is
    about 3 s, so the error is 3 / 127 / sqrt(12) = 0.7%. bfloat16 rounds to 8 significant bits: an error of 0.11% to
    0.23%, at inputs of products and elsewhere.
    """
    kept = write(original, tmp_path / "kept.gguf", lambda name: kind)
    decoded = write(original, tmp_path / "decoded.gguf", lambda name: kind, is_decoded=True)
    prompt = original.prompts(100)[0]

    def log_probabilities(path: Path, dtype: str, num_kept: int) -> torch.Tensor:
        with LLM(path, dtype=dtype, packed_cache=0) as llm:
            assert len(formats_in(llm)) == num_kept
            return logits_of(llm, prompt, 40).double().log_softmax(1)

    def error(given_TV: torch.Tensor) -> float:
        return float((given_TV - expected_TV).norm(dim=1).median())

    expected_TV = log_probabilities(decoded, "float32", 0)
    of_bfloat16 = error(log_probabilities(decoded, "bfloat16", 0))
    given_TV = log_probabilities(kept, "bfloat16", 2 * 4 + 1)  # two of attention, two of experts, and the head
    assert error(given_TV) < 0.007 / 0.0011 * of_bfloat16
    top = expected_TV.topk(2).values
    is_decided = top[:, 0] - top[:, 1] > 2 * (given_TV - expected_TV).abs().amax(1)
    assert is_decided.sum() > 10
    assert torch.equal(given_TV.argmax(1)[is_decided], expected_TV.argmax(1)[is_decided])


def test_mixed_types(
    original: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """One rank, two ranks, and a start from the packed weight cache give the same bytes. Memory has the file's size."""
    path = write(original, tmp_path / "mixed.gguf", mixed)
    prompts = original.prompts(1, 9, 40)
    with LLM(path, dtype="bfloat16", packed_cache=0) as llm:
        assert sorted(formats_in(llm).values()) == ["q4_k"] * 5 + ["q4_k+q6_k"] * 2 + ["q6_k"] * 2
        num_bytes = num_bytes_in(llm)
        expected = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, GREEDY)]
    embedding = 256 * 256 * 2
    assert num_bytes - embedding < 1.06 * path.stat().st_size  # panels have 4.63 to 4.75 bits of 4.5
    assert outputs(path, prompts, tensor_parallel_size=2) == expected
    assert "some weights do not stay" not in caplog.text
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 0.0)
    for is_packed in (False, True):
        if is_packed:
            assert len(list((cache / "packed").glob("*.safetensors"))) == 1
            monkeypatch.setattr(checkpoint_tensors, "load_weights", None)
        with LLM(path, dtype="bfloat16") as llm:
            results = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, GREEDY)]
            assert results == expected
            wait_for_cache_writers()


def test_weights_that_do_not_stay_are_logged(
    original: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A type without kernels, gates and ups in different types, and values in none."""

    def kind_of(name: str) -> str | None:
        if name == "blk.0.ffn_up_exps.weight":
            return "Q5_K"
        return "TQ2_0" if name == "blk.1.attn_output.weight" else "F16" if "attn_v" in name else "Q4_K"

    path = write(original, tmp_path / "mixed.gguf", kind_of)
    with LLM(path, dtype="bfloat16", packed_cache=0) as llm:
        assert len(formats_in(llm)) == 9 - 2 - 2
    (message,) = [each.getMessage() for each in caplog.records if "do not stay" in each.getMessage()]
    assert "1 in TQ2_0" in message
    assert "1 with parts in q4_k and q5_k" in message


@pytest.mark.parametrize("options", [dict(dtype="float32"), dict(dtype="bfloat16", quantization="int8")])
def test_other_settings_decode(options: dict[str, Any], original: Reference, tmp_path: Path) -> None:
    path = write(original, tmp_path / "model.gguf", lambda name: "Q4_K")
    with LLM(path, packed_cache=0, **options) as llm:
        assert not formats_in(llm)
        assert len(llm.generate([[3, 1, 4]], GREEDY)[0].outputs[0].token_ids) == 12


def test_a_scale_that_is_not_finite_is_refused(original: Reference, tmp_path: Path) -> None:
    path = write(original, tmp_path / "model.gguf", lambda name: "Q4_K")
    (tensor,) = [each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_down_exps.weight"]
    content = bytearray(path.read_bytes())
    content[int(tensor.data_offset) + 1] = 0x7C
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down_exps"):
        LLM(path, dtype="bfloat16", packed_cache=0)


def test_inspect_counts_weights_as_they_are_stored(original: Reference, tmp_path: Path) -> None:
    path = write(original, tmp_path / "mixed.gguf", mixed)
    kept, plain = (inspect(path, dtype) for dtype in ("bfloat16", "float32"))
    assert kept.num_parameters == plain.num_parameters
    assert kept.num_active_parameters == plain.num_active_parameters
    assert {part.dtype for part in kept.parts if part.name == "routed experts"} == {"q4_k", "q6_k"}
    with LLM(path, dtype="bfloat16", packed_cache=0) as llm:
        assert kept.weight_bytes == num_bytes_in(llm)
    assert "kept as stored" in as_text(kept)
    assert "dequantised when loaded" in as_text(plain)
