"""Translates names of tensors in GGUF files, which are the same for every family, to the model's names."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from moeserve.models.family import Family, Names

_GATE_UP_DOWN = ("gate", "up", "down")
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # the name in files of LFM2
    "output": "lm_head",
}
# Names of tensors in a layer, without the ending `.weight` or `.bias`.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_output_norm": "post_attention_layernorm",  # in files of DBRX, which has no ffn_norm
    "attn_output_norm_of_stream": "self_attn_output_norm",
    "post_ffw_norm": "mlp_output_norm",
    # norms of Gemma 4's experts, and of the dense network beside the experts
    "pre_ffw_norm_2": "post_attention_layernorm.experts",
    "post_ffw_norm_1": "mlp.dense_output_norm",
    "post_ffw_norm_2": "mlp.experts_output_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    # latent attention
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **{f"indexer.{each}": f"self_attn.indexer.{each}" for each in ("q_proj", "k_proj", "q_norm")},
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    # linear attention and convolutions
    "attn_norm_2": "self_attn.norm",
    "attn_qkv": "self_attn.in_proj_qkv",
    "attn_gate": "self_attn.in_proj_z",
    "ssm_in": "self_attn.in_proj",
    "ssm_conv1d": "self_attn.conv1d",
    **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
    **{f"ssm_{name}_a": f"self_attn.{name}_a_proj" for name in "fg"},
    **{f"ssm_{name}_b": f"self_attn.{name}_proj" for name in "fg"},
    "ssm_alpha": "self_attn.in_proj_a",
    "ssm_beta": "self_attn.in_proj_b",
    "ssm_norm": "self_attn.norm",
    "ssm_out": "self_attn.o_proj",
    "ssm_out_proj": "self_attn.out_proj",  # in layers that are stored like attention (Jamba)
    "ssm_x": "self_attn.x_proj",
    "ssm_dt": "self_attn.dt_proj",
    **{f"ssm_{name}_norm": f"self_attn.{name}_layernorm" for name in ("dt", "b", "c")},
    "shortconv.in_proj": "self_attn.in_proj",
    "shortconv.conv": "self_attn.conv",
    "shortconv.out_proj": "self_attn.out_proj",
    # feed-forward networks
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in _GATE_UP_DOWN},
    **{f"ffn_{name}_exps": f"mlp.experts.{name}_proj" for name in _GATE_UP_DOWN},
    "ffn_latent_down": "mlp.to_latent",
    "ffn_latent_up": "mlp.from_latent",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in _GATE_UP_DOWN},
    # multi-token prediction
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
# Names with their endings. Their translations have no ending.
_WHOLE_NAMES = {
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "post_attention_layernorm.router.weight",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "ssm_a": "self_attn.A_log",
    "ssm_d": "self_attn.D",
    "ssm_dt.bias": "self_attn.dt_bias",
}
_HEAD_GATES = ((r"\.in_proj_z\.", ".g_proj."),)
_RENAMED: dict[str, Names] = {
    "KimiLinearForCausalLM": ((r"\.in_proj_b\.", ".b_proj."),),
    "JambaForCausalLM": ((r"\.dt_bias$", ".dt_proj.bias"),),
    "DbrxForCausalLM": ((r"\.in_proj_qkv\.", ".qkv_proj."),),
    "AfmoeForCausalLM": ((r"\.in_proj_z\.", ".gate_proj."),),
    "LagunaForCausalLM": _HEAD_GATES,
    "MiniMaxForCausalLM": ((r"\.in_proj_qkv\.", ".qkv_proj."), (r"\.in_proj_z\.", ".output_gate.")),
    "Step3p7ForConditionalGeneration": _HEAD_GATES,
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?")
_OF_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # files from 2023 store each expert as a separate tensor


@dataclass(frozen=True)
class GgufName:
    """The name of a tensor in a GGUF file, such as blk.3.attn_q.weight, in three parts."""

    prefix: str  # start of the model's name: "model.layers.3.", or "" for tensors outside layers
    kind: str  # "attn_q"
    end: str  # ".weight", ".bias" or ""

    @classmethod
    def parse(cls, name: str) -> GgufName:
        match = _IN_LAYER.fullmatch(name)
        if match is not None:
            return cls(f"model.layers.{match[1]}.", match[2], match[3] or "")
        stem, dot, end = name.rpartition(".")
        return cls("", stem, dot + end)

    def translated(self) -> str | None:
        """Return the model's name for this tensor, or None if the model has no such tensor."""
        if self.prefix and (whole := _WHOLE_NAMES.get(self.kind + self.end)) is not None:
            return self.prefix + whole
        if self.prefix and (match := _OF_EXPERT.fullmatch(self.kind)) is not None:
            return f"{self.prefix}mlp.experts.{match[2]}.{match[1]}_proj{self.end}"
        stem = (_LAYER_NAMES if self.prefix else _MODEL_NAMES).get(self.kind)
        return None if stem is None else f"{self.prefix}{stem}{self.end}"


def with_gguf_names(family: Family) -> Family:
    """Return a family for GGUF files, with their tensor names. Their tensors are used without changes of values."""
    names = _RENAMED.get(family.architecture, ())
    return dataclasses.replace(family, names=names, wrapped=(), left_out=(), norm_offset=0.0)
