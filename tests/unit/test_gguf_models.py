"""GGUF files give the tokens of the checkpoints from which they were made.

The files are written as llama.cpp's converter writes them: the benchmarks run llama.cpp on the same writer's files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import add_value
from reference_models import (
    Reference,
    grouped_experts,
    heads,
    latent,
    local_experts,
    make_reference,
    rope,
    shape,
    sizes,
)
from reference_models import experts as own_experts
from safetensors.torch import load_file, save_file

from moeserve import LLM, CheckpointError, SamplingParams
from moeserve.bench.peers.adapters.write_gguf import write
from moeserve.models import registry
from moeserve.models.gguf.checkpoint import checkpoint_folder, tensors_of
from moeserve.models.gguf.reader import open_gguf
from moeserve.models.gguf.tensors import GgufTensor
from moeserve.models.gguf.tokenizer import write_tokenizer

THETA = 500.0
SHAPES = {
    "mixtral": shape("Mixtral", sizes(), local_experts(4, 2), heads(4, 2), rope(rope_theta=THETA), seed=5),
    "qwen2-moe": shape(
        "Qwen2Moe",
        sizes(),
        heads(4, 2),
        own_experts(6, 2, 21),
        rope(rope_theta=THETA),
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
        qkv_bias=True,
        tie_word_embeddings=False,
        seed=8,
    ),
    "qwen3-moe": shape(
        "Qwen3Moe",
        sizes(hidden=40),
        heads(6, 2, 10),
        own_experts(9, 4, 17),
        rope(rope_theta=THETA),
        norm_topk_prob=True,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "deepseek-v3": shape(
        "DeepseekV3",
        sizes(hidden=40, layers=3),
        latent(5, query=18, kv=28, key=12, rotary=8, value=10),
        grouped_experts(12, 5, shared=1, width=19, dense=1, groups=(4, 2), scale=2.5),
        rope(rope_theta=THETA),
        norm_topk_prob=True,
        seed=1,
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))


def checkpoint_and_gguf(folder: Path, name: str) -> tuple[Reference, Path]:
    """Make a checkpoint whose weights bfloat16 holds exactly, and the same as a GGUF file."""
    reference = make_reference(folder / name, SHAPES[name])
    shard = reference.folder / "model.safetensors"
    rounded = {key: tensor.bfloat16() for key, tensor in load_file(shard).items()}
    save_file(rounded, shard, metadata={"format": "pt"})
    config = reference.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": THETA}))
    path = folder / f"{name}-BF16.gguf"
    (write_qwen2_moe if name == "qwen2-moe" else write)(reference.folder, path)
    return reference, path


def write_qwen2_moe(folder: Path, path: Path, **of_tokenizer: Any) -> None:
    """Write a Qwen2-MoE checkpoint as a GGUF file, by the gguf package's names of tensors and keys."""
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2MOE, config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        stacks.setdefault(re.sub(r"experts\.\d\.", "experts.", name), []).append(tensor.float().numpy())
    tensors = {}
    for name, parts in stacks.items():
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        tensors[own_name] = np.stack(parts) if len(parts) > 1 else parts[0].squeeze()
    keys = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    metadata = {f"qwen2moe.{key}": config[name] for key, name in keys.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in of_tokenizer.items()}
    written(path, {"general.architecture": "qwen2moe"} | metadata, tensors)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    reference, path = checkpoint_and_gguf(tmp_path, name)
    prompts = [{"prompt_token_ids": [3, 5, 7, 11]}, {"prompt_token_ids": list(range(2, 40))}]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    found = []
    for model in (str(path), str(reference.folder)):
        with LLM(model, dtype="float32", tensor_parallel_size=1) as llm:
            found.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
    for from_gguf, from_folder in zip(*found, strict=True):
        assert from_gguf.token_ids == from_folder.token_ids
        assert from_gguf.logprobs == from_folder.logprobs


def test_a_folder_with_one_model_in_gguf_files_is_that_model(tmp_path: Path) -> None:
    reference, path = checkpoint_and_gguf(tmp_path, "mixtral")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = path.rename(folder / path.name)
    (folder / "mmproj-BF16.gguf").write_bytes(b"")  # an encoder of images
    with LLM(str(folder), dtype="float32", tensor_parallel_size=1) as llm:
        (output,) = llm.generate([[3, 5, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.outputs[0].token_ids == reference.greedy([3, 5, 7], 8)
    (folder / "other-Q8_0.gguf").hardlink_to(path)
    with pytest.raises(CheckpointError, match=f"several models: {path.name}, other-Q8_0.gguf"):
        LLM(str(folder))


def test_an_unknown_tokenizer_matters_only_where_it_is_used(tmp_path: Path) -> None:
    reference, path = checkpoint_and_gguf(tmp_path, "qwen2-moe")
    write_qwen2_moe(reference.folder, path, model="gpt2", pre="viking", tokens=["a", "b"], merges=["a b"])
    for _ in range(2):  # also from the cache
        with pytest.raises(CheckpointError, match=r"pre='viking' is not supported.*; tokenizer='FOLDER'"):
            LLM(str(path))
    write_tokenizer(path, {"ggml.model": "gpt2", "ggml.tokens": ["a", "b"], "ggml.merges": []}, tmp_path, max_length=9)
    with LLM(str(path), tokenizer=str(tmp_path)) as llm:
        (result,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert result.prompt_token_ids == [0, 1]


def test_shares_of_a_rank_are_read_alone(tmp_path: Path) -> None:
    """Rows that start and end inside a head, in any piece, are those of the whole tensor."""
    for name in ("mixtral", "deepseek-v3"):
        reference, path = checkpoint_and_gguf(tmp_path, name)
        stored = load_file(reference.folder / "model.safetensors")
        kind = "q_proj" if name == "mixtral" else "kv_b_proj"
        tensor = tensors_of(checkpoint_folder(path))[f"model.layers.0.self_attn.{kind}.weight"]
        exact = stored[f"model.layers.0.self_attn.{kind}.weight"].float()
        assert tensor.shape == tuple(exact.shape)
        for start, stop in ((0, len(exact)), (3, 4), (5, 31), (len(exact) - 1, len(exact))):
            assert torch.equal(tensor.read(None, start, stop), exact[start:stop])  # type: ignore[arg-type]


def written(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a GGUF file. Tensors are arrays, or a type and the bytes of each row."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, tensor in tensors.items():
        kind, values = tensor if isinstance(tensor, tuple) else (None, tensor)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PLAIN = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
ENCODED = sorted({kind.name for kind in gguf.GGMLQuantizationType} - PLAIN.keys() - {"Q8_1", "Q8_K", "Q1_0"})


@pytest.mark.parametrize("kind", [*PLAIN, *ENCODED])
def test_rows_of_each_type_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    dice = np.random.default_rng(1)
    values = 50 * dice.normal(size=(3, 10, 512)).astype(np.float32)
    of_kind = gguf.GGMLQuantizationType[kind]
    if kind in PLAIN:
        data = values.astype(PLAIN[kind])
        exact = torch.from_numpy(data.astype(np.float32))
    else:
        try:
            data = gguf.quantize(values, of_kind)
        except NotImplementedError:  # the package only reads this type, so codes are random, and scales are made finite
            size, num_bytes = gguf.GGML_QUANT_SIZES[of_kind]
            data = dice.integers(0, 60, size=(3, 10, 512 // size * num_bytes)).astype(np.uint8)
        exact = torch.from_numpy(gguf.dequantize(data, of_kind).astype(np.float32))
    path = written(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"a.weight": (of_kind, data)})
    tensor = GgufTensor(path, open_gguf(path)[1]["a.weight"])
    assert tensor.shape == (3, 10, 512)
    assert exact.isfinite().all()
    for start, stop in ((0, 3), (1, 2), (2, 3)):
        assert torch.equal(tensor.read(None, start, stop), exact[start:stop])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_types_of_intermediate_results_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[of_kind]
    data = np.zeros((4, 512 // size * num_bytes), np.uint8)
    path = written(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"a.weight": (of_kind, data)})
    with pytest.raises(CheckpointError, match=f"'a.weight' of type {kind}"):
        GgufTensor(path, open_gguf(path)[1]["a.weight"]).check()


DEEPSEEK = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 27,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 2048,
    "deepseek2.feed_forward_length": 10944,
    "deepseek2.attention.head_count": 16,
    "deepseek2.attention.head_count_kv": 16,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.expert_count": 64,
    "deepseek2.expert_used_count": 6,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_feed_forward_length": 1408,
    "deepseek2.expert_weights_scale": 1.0,
}


def test_metadata_of_deepseek_v2_lite_describe_the_published_model(tmp_path: Path) -> None:
    """The values of a file of 2024, with the older keys, and those of the published config.json."""
    published = json.loads((Path(__file__).with_name("published_configs.json")).read_text())
    (name,) = [name for name in published if "V2-Lite" in name]
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published[name]))
    embedding = np.zeros((102400, 1), np.float16)
    path = written(tmp_path / "lite.gguf", DEEPSEEK, {"token_embd.weight": embedding, "output.weight": embedding[:1]})
    assert registry.describe(path).model == registry.describe(folder).model


def test_a_file_in_parts(tmp_path: Path) -> None:
    _, path = checkpoint_and_gguf(tmp_path, "mixtral")
    first = path.rename(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf"):
        registry.read_facts(first)
    second = written(tmp_path / "model-00002-of-00002.gguf", {"general.architecture": "llama"}, {"more": np.ones(4)})
    folder = registry.read_facts(second).path
    assert folder == registry.read_facts(first).path
    tensors = tensors_of(Path(folder))
    assert tensors["more"].shape == (4,)
    assert "model.layers.1.mlp.experts.up_proj.weight" in tensors


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.architecture": "mamba"}, "mamba is a dense model.*is not llama"),
        ({"general.architecture": "llama"}, r"moeserve upcycle \S+/other\.gguf other-moe"),
        ({"general.architecture": "qwen9moe", "qwen9moe.expert_count": 8}, "'qwen9moe' is not supported.*qwen3moe"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    path = written(tmp_path / "other.gguf", metadata, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=says):
        registry.describe(path)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf is not a file"):
        registry.describe(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"bad\.gguf is damaged"):
        registry.describe(tmp_path / "bad.gguf")
