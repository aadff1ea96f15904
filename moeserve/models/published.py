"""Where each tensor of a published checkpoint belongs in the model. Knows names, no numbers."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import Tensor, nn

from moeserve.layers.attention import Attention
from moeserve.layers.linear import Linear
from moeserve.layers.mla import CompressedQuery, LatentAttention
from moeserve.layers.mlp import GatedMLP
from moeserve.models.decoder import Decoder, DenseFeedForward
from moeserve.models.family import Family, MoENames
from moeserve.models.weights import Destination, Destinations, whole
from moeserve.moe.experts import Experts
from moeserve.moe.layer import MoELayer

Tensors = dict[str, Destination]


def destinations(model: Decoder, family: Family, published: Collection[str]) -> Destinations:
    """Where each tensor of a checkpoint belongs, given the names that it publishes."""
    into: Tensors = {
        "model.embed_tokens.weight": whole(model.embedding.weight),
        "model.norm.weight": whole(model.norm.weight),
    }
    if not model.config.tie_word_embeddings:
        into["lm_head.weight"] = whole(model.head.weight)
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        into[f"{prefix}.input_layernorm.weight"] = whole(layer.attention_norm.weight)
        into[f"{prefix}.post_attention_layernorm.weight"] = whole(layer.feed_forward_norm.weight)
        into |= _attention(f"{prefix}.self_attn", layer.attention)
        match layer.feed_forward:
            case DenseFeedForward(mlp=mlp):
                into |= _mlp(f"{prefix}.mlp", mlp)
            case MoELayer() as moe:
                names = next((n for n in family.names if f"{prefix}.{n.router}.weight" in published), family.names[0])
                into |= _moe(prefix, moe, names, published)
    num_layers, num_skipped = len(model.layers), model.config.num_skipped_layers
    skipped = tuple(f"model.layers.{index}." for index in range(num_layers, num_layers + num_skipped))
    return Destinations(
        into,
        is_ignored=lambda name: name.startswith(skipped) or bool(_FREQUENCIES.fullmatch(name)),
        copies={"lm_head.weight": whole(model.embedding.weight)} if model.config.tie_word_embeddings else {},
    )


_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed, not loaded


def _attention(prefix: str, attention: Attention | LatentAttention) -> Tensors:
    match attention:
        case Attention():
            return _grouped_query(prefix, attention)
        case LatentAttention():
            return _latent(prefix, attention)


def _grouped_query(prefix: str, attention: Attention) -> Tensors:
    fused = attention.query_key_value
    names = [f"{prefix}.{which}_proj" for which in "qkv"]
    into = {
        f"{name}.weight": whole(part)
        for name, part in zip(names, fused.weight.split(attention.projected_sizes), strict=True)
    }
    if fused.bias is not None:
        parts = fused.bias.split(attention.projected_sizes)
        into |= {f"{name}.bias": whole(part) for name, part in zip(names, parts, strict=True)}
    if attention.sinks is not None:
        into[f"{prefix}.sinks"] = whole(attention.sinks)
    for name, norm in (("q_norm", attention.query_norm), ("k_norm", attention.key_norm)):
        if not isinstance(norm, nn.Identity):
            into[f"{prefix}.{name}.weight"] = whole(norm.weight)
    return into | _linear(f"{prefix}.o_proj", attention.output)


def _latent(prefix: str, attention: LatentAttention) -> Tensors:
    into = {
        f"{prefix}.kv_a_layernorm.weight": whole(attention.latent_norm.weight),
        **_linear(f"{prefix}.kv_a_proj_with_mqa", attention.compress),
        **_linear(f"{prefix}.kv_b_proj", attention.expand),
        **_linear(f"{prefix}.o_proj", attention.output),
    }
    match attention.query:
        case Linear() as query:
            return into | _linear(f"{prefix}.q_proj", query)
        case CompressedQuery(down=down, norm=norm, up=up):
            into[f"{prefix}.q_a_layernorm.weight"] = whole(norm.weight)
            return into | _linear(f"{prefix}.q_a_proj", down) | _linear(f"{prefix}.q_b_proj", up)


def _moe(prefix: str, moe: MoELayer, names: MoENames, published: Collection[str]) -> Tensors:
    router = f"{prefix}.{names.router}"
    into = {f"{router}.weight": whole(moe.router.weight)}
    if moe.router.bias is not None:
        into[f"{router}.bias"] = whole(moe.router.bias)
    if moe.router.correction is not None:
        into[f"{router}.e_score_correction_bias"] = whole(moe.router.correction)
    if moe.shared_experts is not None:
        into |= _mlp(f"{prefix}.{names.shared}", moe.shared_experts.mlp)
        if moe.shared_experts.gate is not None:
            into |= _linear(f"{prefix}.{names.shared_gate}", moe.shared_experts.gate)
    experts = f"{prefix}.{names.experts}"
    if names.is_interleaved:
        return into | _interleaved_experts(experts, moe.experts)
    if f"{experts}.gate_up_proj" in published:
        into[f"{experts}.gate_up_proj"] = whole(moe.experts.gate_up)
        into[f"{experts}.down_proj"] = whole(moe.experts.down)
        return into
    for expert, (gate_up, down) in enumerate(zip(moe.experts.gate_up, moe.experts.down, strict=True)):
        gate, up = gate_up.chunk(2)
        into[f"{experts}.{expert}.{names.gate}.weight"] = whole(gate)
        into[f"{experts}.{expert}.{names.up}.weight"] = whole(up)
        into[f"{experts}.{expert}.{names.down}.weight"] = whole(down)
    return into


def _interleaved_experts(prefix: str, experts: Experts) -> Tensors:
    """All experts in one tensor, as [experts, inputs, outputs], with gate and up alternating among the outputs."""

    def alternating(fused: Tensor) -> Destination:
        # ours: gate's rows above those of up; published: a row of gate, one of up, and so on
        alternate = fused.unflatten(1, (2, -1)).transpose(1, 2)
        if fused.dim() == 2:
            return Destination(alternate, tuple(fused.shape))
        return Destination(alternate.movedim(-1, 1), (fused.shape[0], fused.shape[2], fused.shape[1]))

    into = {
        f"{prefix}.gate_up_proj": alternating(experts.gate_up),
        f"{prefix}.down_proj": whole(experts.down.transpose(1, 2)),
    }
    if experts.gate_up_bias is not None and experts.down_bias is not None:
        into[f"{prefix}.gate_up_proj_bias"] = alternating(experts.gate_up_bias)
        into[f"{prefix}.down_proj_bias"] = whole(experts.down_bias)
    return into


def _mlp(prefix: str, mlp: GatedMLP) -> Tensors:
    gate, up = mlp.gate_up.weight.chunk(2)
    return {
        f"{prefix}.gate_proj.weight": whole(gate),
        f"{prefix}.up_proj.weight": whole(up),
        **_linear(f"{prefix}.down_proj", mlp.down),
    }


def _linear(prefix: str, linear: Linear) -> Tensors:
    into = {f"{prefix}.weight": whole(linear.weight)}
    if linear.bias is not None:
        into[f"{prefix}.bias"] = whole(linear.bias)
    return into
