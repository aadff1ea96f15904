"""`moeserve inspect`: published figures of real models, sizes of checkpoints on disk, and its speed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moeserve import cli
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.errors import SettingsError
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.weights import allocate_weights
from moeserve.models.checkpoint.names import Translation
from moeserve.models.decoder import Decoder
from moeserve.models.expert_store.budget import AUTO_SHARE
from moeserve.models.inspection import as_text, inspect
from moeserve.models.registry import describe
from moeserve.models.weight_mapping import destinations
from moeserve.ops.select import select_backend
from moeserve.planner.layout import find_layouts

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
DEEPSEEK_V3 = PUBLISHED["DeepSeek-V3"]


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@dataclass(frozen=True)
class Figures:
    """Published figures: billions of parameters, the values that a token caches, and bytes of a request's states."""

    total: float
    active: float
    cached: int
    rounding: float = 0.07  # of the active parameters
    states: int = 0


FIGURES = {
    "DeepSeek-V2": Figures(236, 21, 60 * 576),  # arXiv 2405.04434
    "DeepSeek-V2-Lite": Figures(15.7, 2.4, 27 * 576),  # the same, appendix B
    "DeepSeek-V3": Figures(671, 37, 61 * 576),  # arXiv 2412.19437; 70.272 KB in bfloat16 (arXiv 2505.09343, table 1)
    "DeepSeek-V3.1": Figures(671, 37, 61 * 576),
    "DeepSeek-V3.2": Figures(671, 37, 61 * (576 + 128)),  # arXiv 2512.02556; with the indexer's keys
    "GLM-5": Figures(744, 40, 78 * (576 + 128)),  # arXiv 2602.15763
    "GLM-4.5": Figures(355, 32, 2 * 92 * 8 * 128),  # arXiv 2508.06471, with multi-token prediction
    "GLM-4.5-Air": Figures(106, 12, 2 * 46 * 8 * 128),
    "Kimi-K2": Figures(1040, 32.6, 61 * 576),  # arXiv 2507.20534
    "Mixtral-8x7B": Figures(47, 13, 2 * 32 * 8 * 128),  # arXiv 2401.04088
    "Mixtral-8x22B": Figures(141, 39, 2 * 56 * 8 * 128),
    "Moonlight-16B-A3B": Figures(16, 3, 27 * 576),  # arXiv 2502.16982
    "OLMoE-1B-7B": Figures(6.9, 1.3, 2 * 16 * 16 * 128),  # arXiv 2409.02060
    "Qwen1.5-MoE-A2.7B": Figures(14.3, 2.7, 2 * 24 * 16 * 128),
    "Qwen2-57B-A14B": Figures(57, 14, 2 * 28 * 4 * 128),  # arXiv 2407.10671
    "Qwen3-30B-A3B": Figures(30.5, 3.3, 2 * 48 * 4 * 128),  # arXiv 2505.09388
    "Qwen3-30B-A3B-FP8": Figures(30.5, 3.3, 2 * 48 * 4 * 128),
    "Qwen3-235B-A22B": Figures(235, 22, 2 * 94 * 4 * 128),
    "GLM-4.7-Flash": Figures(30, 3.3, 47 * 576),  # 30B-A3B
    "Kimi-K2.5": Figures(1040, 32, 61 * 576),  # arXiv 2602.02276: 1T, of which 32B; as Kimi-K2
    "MiniMax-M2": Figures(230, 10, 2 * 62 * 8 * 128),
    "ERNIE-4.5-21B-A3B": Figures(21.8, 3, 2 * 28 * 4 * 128),  # 21B in the technical report
    "dots.llm1": Figures(142, 14, 2 * 62 * 32 * 128),  # arXiv 2506.05767
    "Hunyuan-A13B": Figures(80, 13, 2 * 32 * 8 * 128),
    "Hy3": Figures(295, 21, 2 * 80 * 8 * 128),
    "granite-3.0-3b-a800m": Figures(3.3, 0.8, 2 * 32 * 8 * 64),
    "Qwen3-Next-80B-A3B": Figures(  # model card, in whole billions
        80, 3, 2 * 12 * 2 * 256, rounding=0.2, states=36 * (2 * 3 * 8192 + 4 * 32 * 128 * 128)
    ),
    "Mistral-Small-4": Figures(119, 6, 36 * 320),
    # 1T, of which 52B, by its name; every fourth layer has no rotated part
    "Mistral-Large-4": Figures(1040, 52, 72 * (512 + 128) + 54 * 64),
    "Llama-4-Scout": Figures(109, 17, 2 * 48 * 8 * 128),
    "Llama-4-Maverick": Figures(400, 17, 2 * 48 * 8 * 128),
    "Step-3.7-Flash": Figures(196, 11, 2 * 45 * 8 * 128),  # of the language model
    "Step-3.5-Flash": Figures(196, 11, 2 * 45 * 8 * 128),
    "Kimi-Linear-48B-A3B": Figures(  # arXiv 2510.26692; its tensors have 49.1 billion
        49.1, 3, 7 * 576, states=20 * (2 * 3 * 3 * 4096 + 4 * 32 * 128 * 128), rounding=0.2
    ),
    "granite-4.0-h-small": Figures(  # model card
        32.2, 9, 2 * 4 * 8 * 128, states=36 * (2 * 3 * (8192 + 256) + 4 * 128 * 128 * 64)
    ),
    "Nemotron-3-Nano-30B-A3B": Figures(  # arXiv 2512.20848
        31.6, 3.2, 2 * 6 * 2 * 128, states=23 * (2 * 3 * (4096 + 2 * 8 * 128) + 4 * 64 * 128 * 64)
    ),
    "Nemotron-3-Super-120B-A12B": Figures(  # model card, in whole billions
        120.6, 12.7, 2 * 8 * 2 * 128, states=40 * (2 * 3 * (8192 + 2 * 8 * 128) + 4 * 128 * 128 * 64)
    ),
    "Jamba-v0.1": Figures(51.6, 12, 2 * 4 * 8 * 128, states=28 * (2 * 3 * 8192 + 4 * 8192 * 16)),  # arXiv 2403.19887
    "LFM2-8B-A1B": Figures(8.3, 1.5, 2 * 6 * 8 * 64, states=18 * 2 * 2 * 2048),  # model card
    # Parameters of the model card. A token's vectors, and its share of entries and tails in blocks of 128 tokens: 32 or
    # 1 entries, keys of 128 values, and for each series of values 3 numbers in float32.
    "DeepSeek-V4-Flash": Figures(284, 13, 43 * 512 + 21 * (32 + 12) * 640 // 128 + 20 * (1 + 6) * 512 // 128),
    "DeepSeek-V4-Pro": Figures(1600, 49, 61 * 512 + 30 * (32 + 12) * 640 // 128 + 31 * (1 + 6) * 512 // 128),
    "Gemma-4-26B-A4B": Figures(25.2, 3.8, 2 * (25 * 8 * 256 + 5 * 2 * 512)),  # model card; of the language model
    "MiMo-V2-Flash": Figures(309, 15, (9 * 4 + 39 * 8) * (192 + 128)),  # model card, without MTP layers
    "Phi-3.5-MoE": Figures(41.9, 6.6, 2 * 32 * 8 * 128),  # model card
    # transformers has the configs of these seven, whose names have their sizes; all experts of LongCat are no zero ones
    "LongCat-Flash": Figures(560, 31.3, 2 * 28 * 576),  # arXiv 2509.01322
    "Solar-Open-100B": Figures(102.6, 12, 2 * 48 * 8 * 128),  # model card
    "A.X-K1": Figures(519, 33, 61 * 576),  # model card
    "Beam-1.0-501B-A23B": Figures(501, 23, 2 * 52 * 8 * 128),
    "Mellum2-12B-A2.5B": Figures(12, 2.5, 2 * 28 * 4 * 128),
    "Laguna-XS.2": Figures(33, 3, 2 * 40 * 8 * 128, rounding=0.2),  # in whole billions
    "JetMoE-8B": Figures(8.52, 2.2, 2 * 24 * 16 * 128),  # arXiv 2404.07413
    "DBRX": Figures(132, 36, 2 * 40 * 8 * 128),  # model card
    "MiniMax-M1": Figures(456, 45.9, 2 * 10 * 8 * 128, states=70 * 4 * 64 * 128 * 128),  # arXiv 2506.13585
    "K-EXAONE-236B-A23B": Figures(236, 23, 2 * 48 * 8 * 128),
    "gpt-oss-20b": Figures(20.9, 3.61, 2 * 24 * 8 * 64),  # arXiv 2508.10925
    "gpt-oss-120b": Figures(116.8, 5.13, 2 * 36 * 8 * 64),
}


@pytest.mark.slow_but("DeepSeek-V3]", "Mixtral-8x7B", "Qwen3-Next", "gpt-oss-20b", "MiniMax-M1")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str, tmp_path: Path) -> None:
    """Authors round, and count embeddings and multi-token prediction in one way or the other."""
    found = inspect(folder_of(tmp_path, PUBLISHED[name]), None)
    figures = FIGURES[name]
    assert found.num_parameters / 1e9 == pytest.approx(figures.total, rel=0.02)
    embedding = next(part.num_parameters for part in found.parts if part.name == "embedding")
    with_or_without = [(found.num_active_parameters + count * embedding) / 1e9 for count in (-1, 0, 1)]
    assert any(active == pytest.approx(figures.active, rel=figures.rounding) for active in with_or_without)
    assert found.dtype == "bfloat16"  # gpt-oss names none
    assert found.cache.bytes_per_token == 2 * figures.cached
    assert found.cache.row_bytes == figures.states
    assert found.stored is None
    assert found.weight_bytes == sum(part.num_bytes for part in found.parts)


def test_the_kv_cache_in_8_bits(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, PUBLISHED["Qwen3-30B-A3B"])
    plain = inspect(folder, None).cache.bytes_per_token
    found = inspect(folder, None, kv_cache_dtype="fp8", num_stages=2)
    assert found.cache.bytes_per_token == plain * (128 + 2) // 256
    assert sum(stage.cache.bytes_per_token for stage in found.stages) == found.cache.bytes_per_token
    (layout,) = find_layouts(folder, 2, None, 2, kv_cache_dtype="fp8").layouts
    assert layout.cache_bytes_per_token == found.cache.bytes_per_token // 2
    with pytest.raises(SettingsError, match="latent attention"):
        inspect(folder_of(tmp_path, PUBLISHED["DeepSeek-V3"]), None, kv_cache_dtype="fp8")


LATENT = "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
# Tensors of the first layer that has experts, as the published index files name them.
NAMES = {
    "DeepSeek-V3": (
        f"self_attn: {LATENT} | mlp.gate: . e_score_correction_bias | mlp.shared_experts: gate_proj up_proj down_proj"
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "GLM-5": (
        f"self_attn: {LATENT} | self_attn.indexer: wq_b wk k_norm k_norm.bias weights_proj"
        " | mlp.gate: . e_score_correction_bias | mlp.shared_experts: gate_proj up_proj down_proj"
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "DeepSeek-V2-Lite": (
        "self_attn: q_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj | mlp.gate: ."
        " | mlp.shared_experts: gate_proj up_proj down_proj | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "Mixtral-8x7B": (
        "self_attn: q_proj k_proj v_proj o_proj | block_sparse_moe.gate: . | block_sparse_moe.experts.#: w1 w2 w3"
    ),
    "Qwen1.5-MoE-A2.7B": (
        "self_attn: q_proj k_proj v_proj o_proj q_proj.bias k_proj.bias v_proj.bias | mlp.gate: ."
        " | mlp.shared_expert: gate_proj up_proj down_proj | mlp.shared_expert_gate: ."
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "Qwen3-30B-A3B": (
        "self_attn: q_proj k_proj v_proj o_proj q_norm k_norm | mlp.gate: ."
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "OLMoE-1B-7B": (
        "self_attn: q_proj k_proj v_proj o_proj q_norm k_norm | mlp.gate: ."
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "GLM-4.5": (
        "self_attn: q_proj k_proj v_proj o_proj q_norm k_norm q_proj.bias k_proj.bias v_proj.bias"
        " | mlp.gate: . e_score_correction_bias | mlp.shared_experts: gate_proj up_proj down_proj"
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "MiMo-V2-Flash": (
        "self_attn: q_proj k_proj v_proj o_proj attention_sink_bias | mlp.gate: . e_score_correction_bias"
        " | mlp.experts.#: gate_proj up_proj down_proj"
    ),
    "Jamba-v0.1": (
        "mamba: in_proj conv1d conv1d.bias x_proj dt_layernorm b_layernorm c_layernorm dt_proj dt_proj.bias A_log! D!"
        " out_proj | feed_forward.router: . | feed_forward.experts.#: gate_proj up_proj down_proj"
    ),
    "gpt-oss-20b": (
        "self_attn: q_proj k_proj v_proj o_proj q_proj.bias k_proj.bias v_proj.bias o_proj.bias sinks!"
        " | mlp.router: . bias! | mlp.experts: gate_up_proj! gate_up_proj_bias! down_proj! down_proj_bias!"
    ),
}


def spelled_out(prefix: str, names: str, num_experts: int) -> set[str]:
    """`a: x y.bias z!` is a.x.weight, a.y.bias and a.z; a dot is the weight of `a` itself, # every expert."""
    found = {f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"}
    for group in names.split(" | "):
        owner, _, members = group.partition(": ")
        for member in members.split():
            if member == ".":
                name = f"{prefix}.{owner}.weight"
            elif member.endswith(("bias", "!")):
                name = f"{prefix}.{owner}.{member.rstrip('!')}"
            else:
                name = f"{prefix}.{owner}.{member}.weight"
            found |= {name.replace("#", str(expert)) for expert in range(num_experts)}
    return found


@pytest.mark.slow_but("Mixtral", "DeepSeek-V3]")
@pytest.mark.parametrize("model", NAMES)
def test_the_weight_mapping_has_the_published_names(model: str, tmp_path: Path) -> None:
    description = describe(folder_of(tmp_path, PUBLISHED[model]))
    placements = description.model.place_experts(1)
    meta = torch.device("meta")
    context = BuildContext(select_backend(meta), groups_of_one_rank(), torch.bfloat16, meta)
    decoder = Decoder(
        description.model, placements, TorchDispatchers("local", groups_of_one_rank().ep, context), context
    )
    layers = description.model.layers
    index, moe = next((index, *layer.moes) for index, layer in enumerate(layers) if layer.moes)
    published = spelled_out(f"model.layers.{index}", NAMES[model], moe.router.num_experts)
    translation = Translation(description.family, len(layers))
    expected = set(map(translation, published))
    places = destinations(decoder, description.family.norm_offset, dict.fromkeys(expected, ()))
    assert {name for name in places.into if name.startswith(f"model.layers.{index}.")} == expected
    outside = {name for name in places.into if not name.startswith("model.layers.")}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert places.is_ignored(translation(f"model.layers.{len(layers)}.eh_proj.weight"))
    assert not places.is_ignored(f"model.layers.{len(layers) + 1}.eh_proj.weight")


@pytest.mark.parametrize("model", ["Step-3.7-Flash", "Qwen3-30B-A3B", "DeepSeek-V2-Lite", "Qwen1.5-MoE-A2.7B"])
def test_no_rank_begins_inside_a_block_of_8_bit_floats(model: str, tmp_path: Path) -> None:
    """A scale belongs to a whole block, so weights that would be divided elsewhere must not be in blocks."""
    description = describe(folder_of(tmp_path, PUBLISHED[model]))
    meta, num_ranks = torch.device("meta"), max(size for size in description.model.tensor_parallel_sizes if size <= 8)
    tp = SimpleNamespace(rank_in_group=num_ranks - 1, world_size=num_ranks)
    groups = dataclasses.replace(groups_of_one_rank(), tp=cast(Any, tp))
    context = BuildContext(select_backend(meta), groups, torch.bfloat16, meta, quantization="fp8")
    config = description.model
    decoder = Decoder(config, config.place_experts(1), TorchDispatchers("local", groups.ep, context), context)
    allocate_weights(decoder)
    places = [place for places in destinations(decoder, 0.0, {}).into.values() for place in places]
    in_blocks = [place for place in places if place.is_in_blocks]
    assert in_blocks
    assert [place.part for place in in_blocks if any(part.start % 128 for part in place.part[-2:])] == []


def test_counts_equal_those_of_a_checkpoint_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen2MoeConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=31,
        moe_intermediate_size=17,
        shared_expert_intermediate_size=23,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )
    model = Qwen2MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path, "float32")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert found.num_parameters == num_parameters
    unused_experts, unused_rows = 2 * 3 * (3 * 24 * 17), 100 * 24  # of 2 layers with 5 experts, of the embedding
    assert found.num_active_parameters == num_parameters - unused_experts - unused_rows
    assert found.weight_bytes == 4 * num_parameters
    assert found.stored is not None
    assert found.stored.bytes_of_dtype == {"F32": 4 * num_parameters}
    assert (found.num_layers, len(found.sparse_layers), found.shared_expert_width) == (3, 2, 23)

    assert cli.main(["inspect", str(tmp_path), "--json", "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    routers = 2 * 5 * 24  # these stay in float32
    assert report["weight_bytes"] == 2 * num_parameters + 2 * routers
    assert report["family"] == "Qwen2-MoE"


def test_a_wrong_config_is_reported_with_key_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, DEEPSEEK_V3 | {"num_experts_per_tok": 300})
    assert cli.main(["inspect", str(folder)]) == 1
    message = capsys.readouterr().err
    assert "num_experts_per_tok=300" in message
    assert "n_routed_experts=256" in message


def test_damaged_shards_do_not_hide_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path, DEEPSEEK_V3)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00163.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for content, says in [(None, "is missing"), (b"damaged", "damaged or incomplete")]:
        if content is not None:
            (tmp_path / "model-00001-of-00163.safetensors").write_bytes(content)
        assert cli.main(["inspect", str(tmp_path)]) == 0
        report = capsys.readouterr().out
        assert says in report
        for shown in ("671.03 B", "36.63 B", "fp8 in blocks of 128 x 128"):
            assert shown in report


def test_pipeline_stages_share_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are counted once over all stages."""
    folder = folder_of(tmp_path, DEEPSEEK_V3)
    whole, staged = inspect(folder, None), inspect(folder, None, num_stages=3, pipeline_layers=[21, 20, 20])
    assert [stage.num_layers for stage in staged.stages] == [21, 20, 20]
    assert sum(stage.weight_bytes for stage in staged.stages) == whole.weight_bytes
    assert sum(stage.cache.bytes_per_token for stage in staged.stages) == whole.cache.bytes_per_token
    first, middle, _ = staged.stages
    assert first.cache.bytes_per_token == 21 * middle.cache.bytes_per_token // 20
    assert cli.main(["inspect", str(folder), "-pp", "3", "--pipeline-layers", "21,20,20"]) == 0
    assert "stage" in capsys.readouterr().out
    assert cli.main(["inspect", str(folder), "-pp", "3", "--pipeline-layers", "21,20"]) == 1
    assert "--pipeline-layers 21,20" in capsys.readouterr().err


def test_models_that_do_not_fit_say_what_reading_from_disk_gives(tmp_path: Path) -> None:
    """Figures of Mixtral-8x7B in bfloat16: 2 of 8 experts of 32 layers, of three matrices of 4096 x 14336."""
    expert_bytes = 3 * 4096 * 14336 * 2
    found = inspect(folder_of(tmp_path, PUBLISHED["Mixtral-8x7B"]), None)
    others = found.weight_bytes - 32 * 8 * expert_bytes

    beside = next(line for line in as_text(found).splitlines() if line.startswith("with a GPU"))
    assert f"{others / 2**30:.2f} GiB are on the GPU" in beside
    assert f"{8 * expert_bytes / 2**30:.2f} GiB for each layer" in beside

    def shown(share: float) -> str | None:
        free = int((others + share * 32 * 8 * expert_bytes) / (1 - AUTO_SHARE)) + 1
        text = as_text(dataclasses.replace(found, free_bytes=free))
        return next((line for line in text.splitlines() if line.startswith("from disk")), None)

    assert shown(1.0) is None
    line = shown(0.25)
    assert line is not None
    read_bytes = 0.75 * 32 * 2 * expert_bytes
    assert "keeps 21.0 GiB of 84.0 GiB of routed experts in memory, " in line
    assert f"a token reads up to {read_bytes / 2**30:.1f} GiB: " in line
    assert f": {2e9 / read_bytes:.2g} tokens/s from a disk with 2 GB/s" in line
    assert "once for up to 8192 tokens" in line
    assert shown(-0.01) is None  # not even the other weights fit
