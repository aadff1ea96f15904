"""Files that differ from what the converter writes today give the same tokens: older layouts, other types, parts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_families import write_family
from reference_models import SHAPES, Reference, make_reference

from moeserve import LLM, CheckpointError, SamplingParams
from moeserve.models import registry

PROMPT = [3, 5, 7, 11, 2, 9]
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))


def an_expert_a_tensor(tensors: Tensors) -> Tensors:
    """Return tensors in the layout of files from 2023, which have one tensor for each expert."""
    found = {}
    for name, values in tensors.items():
        if (match := re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight", name)) is None:
            found[name] = values
        else:
            found |= {f"{match[1]}.{expert}.weight": part for expert, part in enumerate(values)}
    return found


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def backwards(tensors: Tensors) -> Tensors:
    return dict(reversed(tensors.items()))


def as_float64(tensors: Tensors) -> Tensors:
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def gates_with_ups(tensors: Tensors) -> Tensors:
    """Return tensors in the layout that the converter's option --fuse-gate-up-exps writes."""
    found = dict(tensors)
    for name in tensors:
        if ".ffn_gate_exps." in name:
            parts = [found.pop(name), found.pop(name.replace("gate", "up"))]
            found[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    return found


def with_scales(tensors: Tensors) -> Tensors:
    """Scales apart from the weights, as files in NVFP4 have them: one for a matrix, or for each expert."""
    found = dict(tensors)
    for name, values in tensors.items():
        if name.endswith(("_exps.weight", "attn_output.weight")):
            scale = 2.0 ** np.arange(-2, -2 + (len(values) if values.ndim == 3 else 1))
            found[name] = (values / scale.reshape(-1, *[1] * (values.ndim - 1))).astype(np.float32)
            found[name.replace("weight", "scale")] = scale.astype(np.float32)
            found[name.replace("weight", "input_scale")] = scale.astype(np.float32)
    return found


def rewritten(
    source: Path,
    path: Path,
    change: Callable[[Tensors], Tensors] = unchanged,
    *,
    without: tuple[str, ...] = (),
    more: dict[str, Any] | None = None,
    architecture: str = "llama",
    alignment: int = 32,
    splitting: dict[str, Any] | None = None,
) -> Path:
    """Write a file again, as the gguf package reads it, with changes."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, architecture, **(splitting or {}))
    before = reader.fields["general.architecture"].contents()
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *without):
            writer.add_key_value(
                key.replace(f"{before}.", f"{architecture}."), field.contents(), field.types[0], *field.types[1:2]
            )
    for key, value in (more or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    writer.add_custom_alignment(alignment)
    plain = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    for name, values in change(plain).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OPTIONAL = (
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.rope.dimension_count",
    "llama.vocab_size",
    "general.name",
    "general.file_type",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "an expert a tensor": dict(change=an_expert_a_tensor, without=("llama.expert_feed_forward_length",)),
    "gates with ups": dict(change=gates_with_ups),
    "scales": dict(change=with_scales),
    "no optional entries": dict(without=OPTIONAL),
    "other order": dict(change=backwards),
    "float64": dict(change=as_float64),
    "alignment of 8": dict(alignment=8),
    "alignment of 4096": dict(alignment=4096),
    "notes of quantisation": dict(more={"quantize.imatrix.entries_count": 7, "general.tags": ["a", "b"]}),
    "a token that is not there": dict(more={"tokenizer.ggml.padding_token_id": 10**6}),
}


def tokens_of(model: Path) -> list[int]:
    with LLM(str(model), dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_transformers(plain: Reference, tmp_path: Path, name: str) -> None:
    write_family(plain.folder, tmp_path / "plain.gguf")
    path = rewritten(tmp_path / "plain.gguf", tmp_path / "variant.gguf", **VARIANTS[name])
    assert tokens_of(path) == plain.greedy(PROMPT, 12)


def test_the_text_part_of_qwen3_vl_is_qwen3_moe(tmp_path: Path) -> None:
    shape = SHAPES["qwen3-moe"]
    qwen = make_reference(
        tmp_path / "qwen", dataclasses.replace(shape, settings=shape.settings | {"mlp_only_layers": []})
    )
    write_family(qwen.folder, tmp_path / "plain.gguf")
    more = {"qwen3vlmoe.rope.dimension_sections": [2, 1, 1, 0], "qwen3vlmoe.n_deepstack_layers": 3}
    path = rewritten(tmp_path / "plain.gguf", tmp_path / "vl.gguf", more=more, architecture="qwen3vlmoe")
    assert tokens_of(path) == qwen.greedy(PROMPT, 12)


def test_tokens_of_parts_are_those_of_transformers(plain: Reference, tmp_path: Path) -> None:
    """One expert a tensor, in three parts; the first, which alone has the metadata, may be without tensors."""
    write_family(plain.folder, tmp_path / "plain.gguf")
    for is_empty in (False, True):
        folder = tmp_path / str(is_empty)
        folder.mkdir()
        splitting = dict(small_first_shard=is_empty, split_max_tensors=20)
        rewritten(tmp_path / "plain.gguf", folder / "m.gguf", an_expert_a_tensor, splitting=splitting)
        parts = sorted(folder.iterdir())
        assert len(parts) > 2
        assert tokens_of(parts[1]) == plain.greedy(PROMPT, 12)
    parts[0].rename(folder / "renamed.gguf")
    with pytest.raises(CheckpointError, match=rf"renamed\.gguf.*{len(parts)} parts"):
        registry.describe(folder / "renamed.gguf")
    (folder / parts[0].name).write_bytes((tmp_path / "plain.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="same tensors"):
        registry.describe(parts[1])
