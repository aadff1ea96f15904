"""Writes checkpoints of tests as GGUF files, with names, keys and orders of rows as llama.cpp's converter has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

# O outputs, I inputs, E experts

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

OF_ALL = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.sliding_window": "sliding_window",
}
DEEPSEEK = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
INDEXED = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
LATENT = {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"}
GRANITE = {
    "expert_count": "num_local_experts",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
DELTA = {
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
# By model_type: GGUF's name, and more keys
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "mixtral": ("llama", {"expert_count": "num_local_experts"}),
    "qwen3_moe": ("qwen3moe", {"expert_count": "num_local_experts"}),
    "gpt_oss": ("gpt-oss", {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}),
    "glm4_moe": ("glm4moe", DEEPSEEK),
    "dots1": ("dots1", DEEPSEEK),
    "mistral4": ("mistral4", DEEPSEEK | LATENT),
    "minimax_m2": (
        "minimax-m2",
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
    ),
    "olmoe": ("olmoe", {"expert_count": "num_experts", "attention.clamp_kqv": "clip_qkv"}),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    "granitemoe": ("granitemoe", GRANITE),
    "granitemoeshared": ("granitemoe", GRANITE),
    "granitemoehybrid": (
        "granitehybrid",
        GRANITE
        | {
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
    ),
    "llama4_text": (
        "llama4",
        {
            "expert_count": "num_local_experts",
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "lfm2_moe": (
        "lfm2moe",
        {
            "expert_count": "num_experts",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
            "attention.layer_norm_rms_epsilon": "norm_eps",
        },
    ),
    "hunyuan_v1_moe": (
        "hunyuan-moe",
        {
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    "kimi_linear": (
        "kimi-linear",
        LATENT
        | {
            "context_length": "model_max_length",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_token",
            "expert_shared_count": "num_shared_experts",
            "expert_group_count": "num_expert_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "moe_renormalize",
            "leading_dense_block_count": "first_k_dense_replace",
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
    ),
    "glm_moe_dsa": (
        "glm-dsa",
        DEEPSEEK | LATENT | INDEXED,
    ),
    "phimoe": ("phimoe", {"expert_count": "num_local_experts"}),
    "exaone_moe": (
        "exaone-moe",
        DEEPSEEK | {"expert_count": "num_experts", "expert_shared_count": "num_shared_experts"},
    ),
    "afmoe": (
        "afmoe",
        {
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "route_scale",
            "expert_weights_norm": "route_norm",
        },
    ),
    "laguna": (
        "laguna",
        {
            "expert_count": "num_experts",
            "attention.head_count": "num_attention_heads_per_layer",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_scale": "moe_routed_scaling_factor",
        },
    ),
    "mellum": ("mellum", {"expert_count": "num_local_experts"}),
    "mimo_v2_flash": ("mimo2", DEEPSEEK | {"attention.value_scale": "attention_value_scale"}),
    "step3p5": (
        "step35",
        {
            "expert_count": "n_routed_experts",
            "expert_shared_feed_forward_length": "share_expert_dim",
            "expert_weights_scale": "moe_router_scaling_factor",
            "swiglu_clamp_exp": "swiglu_limits",
            "swiglu_clamp_shexp": "swiglu_limits_shared",
        },
    ),
    "jamba": (
        "jamba",
        {
            "expert_count": "num_experts",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "block_count": "n_layers",
            "embedding_length": "d_model",
            "context_length": "max_seq_len",
            "attention.head_count": "n_heads",
            "attention.head_count_kv": "kv_n_heads",
            "attention.clamp_kqv": "clip_qkv",
            "feed_forward_length": "ffn_hidden_size",
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_top_k",
        },
    ),
    "nemotron_h": (
        "nemotron_h_moe",
        DEEPSEEK
        | {
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
        },
    ),
    "hy_v3": ("hy_v3", {"expert_count": "num_experts", "expert_weights_scale": "router_scaling_factor"}),
    "solar_open": ("glm4moe", DEEPSEEK),
    "glm4_moe_lite": ("deepseek2", DEEPSEEK | LATENT),
    "deepseek_v32": ("deepseek32", DEEPSEEK | LATENT | INDEXED),
    "deepseek_ocr2_text": ("deepseek2-ocr", DEEPSEEK),
    "gemma4_text": (
        "gemma4",
        {
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
    ),
    "cohere2_moe": (
        "cohere2moe",
        {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "logit_scale": "logit_scale",
        },
    ),
    "minimax_m3_vl_text": (
        "minimax-m3",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "attention.indexer.head_count": "index_n_heads",
            "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk_blocks",
            "attention.indexer.block_size": "index_block_size",
            "attention.indexer.local_blocks": "index_local_blocks",
        },
    ),
    "minimax": ("minimax-01", {"expert_count": "num_local_experts", "residual_scale": "full_attn_alpha_factor"}),
    "qwen3_next": ("qwen3next", DELTA),
    "qwen3_5_moe_text": ("qwen35moe", DELTA),
}
SIGMOID = ("glm4moe", "glm-dsa", "dots1", "minimax-m2", "lfm2moe", "kimi-linear", "exaone-moe", "afmoe", "laguna")
SIGMOID += ("mimo2", "step35", "hy_v3", "deepseek2", "deepseek32", "cohere2moe", "minimax-m3")
WINDOWED = ("exaone-moe", "laguna", "mellum", "mimo2", "step35", "gemma4", "cohere2moe")  # list layers with windows
OF_IMAGES = ("model.visual.", "vision_model.", "vit_", "model.vision", "model.multi_modal", "model.embed_vision.")
OF_IMAGES += ("model.projector.", "model.qwen2_model.", "model.sam_model.", "model.view_seperator")
# Architectures that the gguf package does not know yet: one with the same names of tensors
ALIKE = {
    "laguna": "step35",
    "mellum": "exaone-moe",
    "hy_v3": "afmoe",
    "deepseek32": "glm-dsa",
    "cohere2moe": "dots1",
    "minimax-m3": "glm4moe",
    "minimax-01": "minimax-m2",
}

# Names that the gguf package does not know yet, or that the converter writes without its table
OWN_NAMES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **{f"self_attn.indexer.{x}_{end}.weight": f"indexer.{x}_{end}.weight" for x in "qk" for end in ("proj", "norm")},
    "self_attn.norm.weight": "attn_norm_2.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.output_gate.weight": "attn_gate.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
}


Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType] | None]


def write_family(
    folder: Path, path: Path, kind: str = "F32", of_experts: str | None = None, encode: Encode | None = None
) -> Path:
    """Write a checkpoint of tests as a GGUF file, with the matrices of layers, and of experts, in a type of GGUF.

    `encode` returns other values and their type for a tensor, or None.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config", {})
    config = {**config.pop("attn_config", {}), **config.pop("ffn_config", {}), **config}  # of DBRX
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    if config["model_type"] == "dbrx":
        config |= dict(num_hidden_layers=config["n_layers"], num_attention_heads=config["n_heads"])
        config["hidden_size"] = config["d_model"]
    architecture, more = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata_of(config, architecture, OF_ALL | more):
        add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    enum = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[ALIKE.get(architecture, architecture)]
    names = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    written = {}
    for name, values in converted(tensors, config, architecture):
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match and match[2] in OWN_NAMES:
            own = f"blk.{match[1]}.{OWN_NAMES[match[2]]}"
        else:
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        written[own] = np.ascontiguousarray(values)
    if architecture == "gemma4":
        size = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        num_rotated = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        written["rope_freqs.weight"] = np.float32([1.0] * num_rotated + [1e30] * (size - num_rotated))
    for length in ("short", "long") if architecture == "phimoe" else ():
        written[f"rope_factors_{length}.weight"] = np.float32(config["rope_parameters"][f"{length}_factor"])
    for own, values in written.items():
        is_matrix = values.ndim > 1 and own.startswith("blk.") and "gate_inp" not in own
        is_expert = own.endswith("_exps.weight")
        of_tensor = gguf.GGMLQuantizationType[(of_experts if is_expert else None) or (kind if is_matrix else "F32")]
        data, of_tensor = (encode and encode(own, values)) or (gguf.quantize(values, of_tensor), of_tensor)
        writer.add_tensor(own, data, raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def metadata_of(config: Config, architecture: str, keys: dict[str, str]) -> Iterator[tuple[str, Any]]:
    own = {key: config[name] for key, name in keys.items() if config.get(name) is not None}
    rope = config.get("rope_parameters") or {}
    rope_in_windows = rope.get("sliding_attention", rope)
    rope = rope.get("full_attention", rope)
    own["rope.freq_base"] = float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own |= dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    fraction = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    own["rope.dimension_count"] = int(head_dim * fraction)
    if architecture == "kimi-linear":
        own.setdefault("leading_dense_block_count", 1)
    if architecture in SIGMOID:
        own["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    if rope.get("rope_type") == "yarn":
        own["rope.scaling.type"] = "yarn"
        own["rope.scaling.factor"] = float(rope["factor"])
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if (alpha := rope.get("alpha")) is not None:  # Hunyuan's scaling of the base
        own["rope.freq_base"] *= alpha ** (head_dim / (head_dim - 2))
    if architecture in ("glm-dsa", "deepseek32", "deepseek2-ocr", "deepseek2"):
        own["leading_dense_block_count"] = config["mlp_layer_types"].index("sparse")
    if architecture in ("mistral4", "kimi-linear", "glm-dsa", "deepseek32", "deepseek2"):
        latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        own |= {
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotary,
            "attention.value_length": latent,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotary,
        }
    if architecture == "hy_v3":
        own["expert_shared_feed_forward_length"] = config["moe_intermediate_size"] * config["num_shared_experts"]
    if architecture == "deepseek2-ocr":
        own["rope.dimension_count"] = 0  # that of latent attention, which the model has not
    if architecture == "minimax-01":
        own["rope.dimension_count"] = head_dim
    if architecture == "ernie4_5-moe":
        own["expert_shared_feed_forward_length"] = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    if architecture == "mistral4":
        own["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        own["attention.temperature_length"] = rope["original_max_position_embeddings"]
    if architecture in ("qwen3next", "qwen35moe"):
        own["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        own["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
        own.pop("feed_forward_length", None)
    if architecture == "qwen35moe":
        own["rope.dimension_sections"] = [int(head_dim * fraction) // 2, 0, 0, 0]
    if architecture == "granitehybrid":
        own["ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
        own["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    if architecture in WINDOWED:
        has_window = [kind == "sliding_attention" for kind in config["layer_types"]]
        own["attention.sliding_window_pattern"] = has_window
        own["rope.freq_base_swa"] = float(rope_in_windows["rope_theta"])
    if architecture == "gemma4":
        own |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), head_dim)
        full = next(iter(config["per_layer_config"].values()))
        size = full["head_dim"]
        own |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
        own["rope.dimension_count_swa"] = head_dim
        if (heads := full.get("num_key_value_heads")) is not None:
            own["attention.head_count_kv"] = [own["attention.head_count_kv"] if has else heads for has in has_window]
    if architecture == "laguna":
        own["rope.dimension_count_swa"] = int(head_dim * rope_in_windows["partial_rotary_factor"])
    if architecture == "mimo2":
        of_types = (
            config["num_key_value_heads"],
            config.get("swa_num_key_value_heads") or 2 * config["num_key_value_heads"],
        )
        own["attention.head_count_kv"] = [of_types[has] for has in has_window]
        own["attention.value_length"] = config["v_head_dim"]
    if architecture == "step35":
        own["attention.head_count"] = [
            config["num_sliding_attention_heads"] if has else config["num_attention_heads"] for has in has_window
        ]
    if architecture == "jamba":
        own["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        rank = config["mamba_dt_rank"]
        own["ssm.time_step_rank"] = -(-config["hidden_size"] // 16) if rank == "auto" else rank
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        own["attention.head_count_kv"] = [
            config["num_key_value_heads"] if index % period == offset else 0
            for index in range(config["num_hidden_layers"])
        ]
    if architecture == "dbrx":
        own["attention.layer_norm_epsilon"] = 1e-5
        del own["rope.dimension_count"]
    if architecture == "phimoe":
        own["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        own["rope.scaling.attn_factor"] = float(rope["short_mscale"])
    if architecture == "nemotron_h_moe":
        own["ssm.inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
        width = config["moe_intermediate_size"]
        own["feed_forward_length"] = [width if kind == "moe" else 0 for kind in config["layers_block_type"]]
    has_states = architecture in ("granitehybrid", "lfm2moe", "kimi-linear", "nemotron_h_moe")
    if has_states:
        num = own["attention.head_count_kv"]
        types = ("attention", "full_attention")
        kinds = config.get("layer_types") or config["layers_block_type"]
        own["attention.head_count_kv"] = [num if kind in types else 0 for kind in kinds]
    yield from own.items()


def converted(tensors: Tensors, config: Config, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names, as the gguf package knows them, and values as the file stores them."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name.startswith(OF_IMAGES) or re.search(r"_decay$|slope_rate$", name):
            continue
        name = renamed(name)
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        else:
            for own, part in divided(name, values, config):
                yield own, reordered(own, part, config, architecture)
    for name, parts in stacks.items():
        yield name, np.stack([parts[expert] for expert in sorted(parts)])


def renamed(name: str) -> str:
    for old, new in (
        ("model.language_model.", "model."),
        (".dt_bias", ".dt_proj.bias"),
        (".sinks", ".sinks.weight"),
        (".attention_sink_bias", ".attention_sink_bias.weight"),
        ("correction_bias", "correction.bias"),
        (".expert_bias", ".expert_bias.bias"),
        (".mlp.experts.e_score_correction", ".mlp.e_score_correction"),
        (".mlp.gate.e_score_correction", ".mlp.e_score_correction"),
        (".layer_scalar", ".layer_scalar.weight"),
        ("feed_forward.experts", "mlp.experts"),
        ("block_sparse_moe.experts", "mlp.experts"),
    ):
        name = name.replace(old, new)
    name = re.sub(r"^(?:model|backbone)(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name)
    if ".experts." in name:
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{old}.", f".{new}.")
    return name


def divided(name: str, values: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that the file has for one of the checkpoint."""
    stem = name.rpartition(".")[0]
    model_type = config["model_type"]
    match name.rpartition(".")[2]:
        case "w1" | "v1" | "w2" as part:  # DBRX, experts one below the other
            of_experts = values.reshape(config["moe_num_experts"], -1, values.shape[1])
            yield f"{name}.weight", of_experts.swapaxes(1, 2) if part == "w2" else of_experts
        case "gate_up_proj" if model_type == "gpt_oss":  # [E, I, O], gates and ups in turn
            yield f"{stem}.gate_proj.weight", values[:, :, ::2].swapaxes(1, 2)
            yield f"{stem}.up_proj.weight", values[:, :, 1::2].swapaxes(1, 2)
        case "gate_up_proj_bias":
            yield f"{stem}.gate_proj.bias", values[:, ::2]
            yield f"{stem}.up_proj.bias", values[:, 1::2]
        case "down_proj_bias":
            yield f"{stem}.down_proj.bias", values
        case "gate_up_proj" if model_type == "llama4_text":  # [E, I, O]
            for part, own in zip(np.split(values.swapaxes(1, 2), 2, axis=1), ("gate", "up"), strict=True):
                yield f"{stem}.{own}_proj.weight", part
        case "gate_up_proj" if model_type == "gemma4_text":
            yield f"{name}.weight", values
        case _ if name.endswith("gate_up_proj.weight"):
            for part, own in zip(np.split(values, 2), ("gate", "up"), strict=True):
                yield name.replace("gate_up", own), part
        case "gate_up_proj":
            for part, own in zip(np.split(values, 2, axis=1), ("gate", "up"), strict=True):
                yield f"{stem}.{own}_proj.weight", part
        case "down_proj":
            is_transposed = model_type in ("gpt_oss", "llama4_text")
            yield f"{stem}.down_proj.weight", values.swapaxes(1, 2) if is_transposed else values
        case _ if "block_sparse_moe.input_linear" in name:
            for part, own in zip(np.split(values, 2, axis=1), ("gate", "up"), strict=True):
                yield name.replace("block_sparse_moe.input_linear", f"mlp.experts.{own}_proj"), part
        case _ if "block_sparse_moe.output_linear" in name:
            yield name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj"), values
        case _ if "shared_mlp.input_linear" in name:
            for part, own in zip(np.split(values, 2, axis=0), ("gate", "up"), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.shared_experts.{own}_proj"), part
        case _ if "shared_mlp.output_linear" in name:
            yield name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj"), values
        case _ if "in_proj_qkvz" in name:
            yield from by_kind(name, values, config)
        case _ if "kv_b_proj" in name:
            parts_HPD = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            key_size = config["qk_nope_head_dim"]
            yield name.replace("kv_b", "k_b"), parts_HPD[:, :key_size].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), parts_HPD[:, key_size:]
        case _:
            yield name, values


def by_kind(name: str, values: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Yield queries, keys and values of Qwen3-Next, then gates, which its checkpoints have for each key head."""
    heads, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    ends = np.cumsum([key_size, key_size, of_values])
    *parts, gates = np.split(values.reshape(heads, -1, values.shape[1]), ends, axis=1)
    flat = [part.reshape(-1, values.shape[1]) for part in parts]
    yield name.replace("qkvz", "qkv"), np.concatenate(flat)
    yield name.replace("qkvz", "z"), gates.reshape(-1, values.shape[1])


def reordered(name: str, values: np.ndarray, config: Config, architecture: str) -> np.ndarray:
    """Return what the file has for a tensor, in its order and shape."""
    if architecture in ("qwen3next", "qwen35moe") and name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + 1
    if architecture in ("step35", "minimax-m3") and name.endswith("norm.weight"):
        values = values + 1
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        values = values.squeeze(1)
    if "shared_expert_gate" in name or name.endswith("correction.bias"):
        values = values.squeeze()
    if architecture in ("llama", "granitemoe", "granitehybrid") and (match := re.search(r"\.([qk])_proj\.", name)):
        num_heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        values = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture in ("granitehybrid", "nemotron_h_moe"):
        if name.endswith(("A_log", ".D")):
            values = values.reshape(-1, 1)
        if re.search(r"\.(mamba|mixer)\.norm\.", name):
            values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if architecture == "kimi-linear":
        if name.endswith("A_log"):
            values = values.reshape(1, 1, -1, 1)
        if "conv1d" in name:
            values = values.reshape(1, len(values), 1, -1)
    if architecture == "qwen35moe":
        values = with_values_in_turn(name, values, config)
    return values


def with_values_in_turn(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Return value heads in another order: the first of every key head, then the second, and so on."""
    heads, ratio = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]

    def in_turn(part: np.ndarray) -> np.ndarray:
        return part.reshape(heads, ratio, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    num_keys = 2 * heads * config["linear_key_head_dim"]
    reorder: Callable[[np.ndarray], np.ndarray] | None = None
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[:num_keys], in_turn(values[num_keys:])])
    if re.search(r"linear_attn\.(in_proj_[zab]|A_log|dt_proj)", name):
        reorder = in_turn
    if "linear_attn.out_proj" in name:
        return in_turn(values.T).T
    return values if reorder is None else reorder(values)
