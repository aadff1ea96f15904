"""Where each tensor of a published checkpoint belongs in one rank's part of the model. Knows names, no numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

from torch import Tensor, nn

from moeserve.layers.attention import Attention
from moeserve.layers.linear import Linear
from moeserve.layers.mla import CompressedQuery, LatentAttention
from moeserve.layers.mlp import GatedMLP
from moeserve.layers.weights import Weights
from moeserve.models.decoder import Decoder, DenseFeedForward
from moeserve.models.family import Family, MoENames
from moeserve.models.model_config import MLPConfig
from moeserve.models.packing import weights_of
from moeserve.models.weights import Destination, Destinations, columns, rows, whole
from moeserve.moe.experts import Experts
from moeserve.moe.layer import MoEConfig, MoELayer

_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed, not loaded


def destinations(model: Decoder, family: Family, published: Collection[str]) -> Destinations:
    """Where each tensor of a checkpoint belongs, given the names that it publishes."""
    places = _Places(weights_of(model).values())
    vocab_size = model.config.vocab_size
    places.add("model.embed_tokens.weight", rows(model.embedding.weight, model.embedding.share, vocab_size))
    places.add("model.norm.weight", whole(model.norm.weight))
    if not model.config.tie_word_embeddings:
        places.add("lm_head.weight", rows(model.head.weight, model.head.share, vocab_size))
    for index, (layer, config) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        prefix = f"model.layers.{index}"
        places.add(f"{prefix}.input_layernorm.weight", whole(layer.attention_norm.weight))
        places.add(f"{prefix}.post_attention_layernorm.weight", whole(layer.feed_forward_norm.weight))
        match layer.attention:
            case Attention() as attention:
                _add_attention(places, f"{prefix}.self_attn", attention)
            case LatentAttention() as attention:
                _add_latent_attention(places, f"{prefix}.self_attn", attention)
        match layer.feed_forward, config.feed_forward:
            case DenseFeedForward(mlp=mlp), MLPConfig(width=width):
                _add_mlp(places, f"{prefix}.mlp", mlp, width)
            case MoELayer() as moe, MoEConfig() as moe_config:
                names = next((n for n in family.names if f"{prefix}.{n.router}.weight" in published), family.names[0])
                _add_moe(places, prefix, moe, moe_config, names, published)
    num_layers, num_skipped = len(model.layers), model.config.num_skipped_layers
    skipped = tuple(f"model.layers.{index}." for index in range(num_layers, num_layers + num_skipped))

    def is_ignored(name: str) -> bool:
        return name in places.elsewhere or name.startswith(skipped) or bool(_FREQUENCIES.fullmatch(name))

    embedding = rows(model.embedding.weight, model.embedding.share, vocab_size)
    copies = {"lm_head.weight": embedding} if model.config.tie_word_embeddings else {}
    return Destinations(places.into, is_ignored, copies)


class _Places:
    """Destinations by name, and the names of what other ranks need and this one does not."""

    def __init__(self, every: Iterable[Weights]) -> None:
        self.into: dict[str, list[Destination]] = {}
        self.elsewhere: set[str] = set()
        self._codes_at = {
            weights.open.weight_eOI.untyped_storage().data_ptr(): weights.open
            for weights in every
            if weights.scales is not None
        }

    def add(self, name: str, place: Destination) -> None:
        codes_of = self._codes_at.get(place.memory.untyped_storage().data_ptr())
        self.into.setdefault(name, []).append(dataclasses.replace(place, codes_of=codes_of))

    def add_bias(self, name: str, bias: Tensor | None, share: slice, size: int) -> None:
        if bias is not None:
            self.add(name, rows(bias, share, size))

    def add_linear(self, prefix: str, linear: Linear) -> None:
        """A projection that is whole on every rank."""
        self.add(f"{prefix}.weight", whole(linear.weight))
        if linear.bias is not None:
            self.add(f"{prefix}.bias", whole(linear.bias))

    def add_output(self, prefix: str, linear: Linear, share: slice, size: int, *, has_bias: bool) -> None:
        """A projection of which this rank has some columns; a bias is on one rank only."""
        self.add(f"{prefix}.weight", columns(linear.weight, share, size))
        if linear.bias is not None:
            self.add(f"{prefix}.bias", whole(linear.bias))
        elif has_bias:
            self.elsewhere.add(f"{prefix}.bias")


def _times(share: slice, size: int) -> slice:
    return slice(share.start * size, share.stop * size)


def _add_attention(places: _Places, prefix: str, attention: Attention) -> None:
    config, size = attention.config, attention.config.head_dim
    fused = attention.query_key_value
    biases = (None, None, None) if fused.bias is None else fused.bias.split(attention.projected_sizes)
    weights = fused.weight.split(attention.projected_sizes)
    heads = [(attention.heads, config.num_heads), *2 * [(attention.kv_heads, config.num_kv_heads)]]
    for which, weight, bias, (share, num_heads) in zip("qkv", weights, biases, heads, strict=True):
        places.add(f"{prefix}.{which}_proj.weight", rows(weight, _times(share, size), num_heads * size))
        places.add_bias(f"{prefix}.{which}_proj.bias", bias, _times(share, size), num_heads * size)
    if attention.sinks is not None:
        places.add(f"{prefix}.sinks", rows(attention.sinks, attention.heads, config.num_heads))
    norms = (("q_norm", attention.query_norm, heads[0]), ("k_norm", attention.key_norm, heads[1]))
    for name, norm, (share, num_heads) in norms:
        if config.normalized == "token" and not isinstance(norm, nn.Identity):
            places.add(f"{prefix}.{name}.weight", rows(norm.weight, _times(share, size), num_heads * size))
        elif not isinstance(norm, nn.Identity):
            places.add(f"{prefix}.{name}.weight", whole(norm.weight))
    share, width = _times(attention.heads, size), config.num_heads * size
    places.add_output(f"{prefix}.o_proj", attention.output, share, width, has_bias=config.has_output_bias)


def _add_latent_attention(places: _Places, prefix: str, attention: LatentAttention) -> None:
    config, heads = attention.config, attention.heads
    places.add(f"{prefix}.kv_a_layernorm.weight", whole(attention.latent_norm.weight))
    places.add_linear(f"{prefix}.kv_a_proj_with_mqa", attention.compress)
    _add_head_maps(places, f"{prefix}.kv_b_proj.weight", attention)
    share, width = _times(heads, config.value_dim), config.num_heads * config.value_dim
    places.add_output(f"{prefix}.o_proj", attention.output, share, width, has_bias=config.has_bias)
    match attention.query:
        case Linear() as up:
            name = "q_proj"
        case CompressedQuery(down=down, norm=norm, up=up):
            name = "q_b_proj"
            places.add(f"{prefix}.q_a_layernorm.weight", whole(norm.weight))
            places.add_linear(f"{prefix}.q_a_proj", down)
    size = config.query_dim
    places.add(f"{prefix}.{name}.weight", rows(up.weight, _times(heads, size), config.num_heads * size))


def _add_head_maps(places: _Places, name: str, attention: LatentAttention) -> None:
    """Published head after head: the map [K, L] of its key, and below it that [V, L] of its value."""
    config = attention.config
    size = config.key_dim + config.value_dim
    shape = (config.num_heads * size, config.latent_size)
    keys_NLK = attention.head_maps.keys.open.weight_eOI
    values_NVL = attention.head_maps.values.open.weight_eOI
    for here, head in enumerate(range(attention.heads.start, attention.heads.stop)):
        first, border, last = head * size, head * size + config.key_dim, (head + 1) * size
        places.add(name, Destination(keys_NLK[here].T, shape, (slice(first, border),)))
        places.add(name, Destination(values_NVL[here], shape, (slice(border, last),)))


def _add_mlp(places: _Places, prefix: str, mlp: GatedMLP, width: int) -> None:
    gate, up = mlp.gate_up.open.weight_eOI[0].chunk(2)
    places.add(f"{prefix}.gate_proj.weight", rows(gate, mlp.width, width))
    places.add(f"{prefix}.up_proj.weight", rows(up, mlp.width, width))
    places.add(f"{prefix}.down_proj.weight", columns(mlp.down.weight, mlp.width, width))


def _add_moe(
    places: _Places, prefix: str, moe: MoELayer, config: MoEConfig, names: MoENames, published: Collection[str]
) -> None:
    router = f"{prefix}.{names.router}"
    places.add(f"{router}.weight", whole(moe.router.weight))
    if moe.router.bias is not None:
        places.add(f"{router}.bias", whole(moe.router.bias))
    if moe.router.correction is not None:
        places.add(f"{router}.e_score_correction_bias", whole(moe.router.correction))
    if moe.shared_experts is not None and config.shared is not None:
        _add_mlp(places, f"{prefix}.{names.shared}", moe.shared_experts.mlp, config.shared.width)
        if moe.shared_experts.gate is not None:
            places.add_linear(f"{prefix}.{names.shared_gate}", moe.shared_experts.gate)
    experts = f"{prefix}.{names.experts}"
    gate_up_eFD, down_eDI = moe.experts.gate_up.open.weight_eOI, moe.experts.down.open.weight_eOI
    num_experts = config.router.num_experts
    if names.is_interleaved:
        _add_interleaved_experts(places, experts, moe.experts, moe.local_experts, num_experts)
    elif f"{experts}.gate_up_proj" in published:
        for slot, expert in enumerate(moe.local_experts):
            share = slice(expert, expert + 1)
            places.add(f"{experts}.gate_up_proj", rows(gate_up_eFD[slot : slot + 1], share, num_experts))
            places.add(f"{experts}.down_proj", rows(down_eDI[slot : slot + 1], share, num_experts))
        places.elsewhere |= {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    else:
        for slot, expert in enumerate(moe.local_experts):
            gate, up = gate_up_eFD[slot].chunk(2)
            places.add(f"{experts}.{expert}.{names.gate}.weight", whole(gate))
            places.add(f"{experts}.{expert}.{names.up}.weight", whole(up))
            places.add(f"{experts}.{expert}.{names.down}.weight", whole(down_eDI[slot]))
        for expert in set(range(num_experts)) - set(moe.local_experts):
            places.elsewhere |= {f"{experts}.{expert}.{name}.weight" for name in (names.gate, names.up, names.down)}


def _add_interleaved_experts(
    places: _Places, prefix: str, experts: Experts, local_experts: Collection[int], num_experts: int
) -> None:
    """All experts in one tensor, as [experts, inputs, outputs], with gate and up alternating among the outputs."""
    gate_up, down = experts.gate_up.open, experts.down.open
    _, width_twice, hidden_size = gate_up.weight_eOI.shape
    # ours: gate's rows above those of up; published: a row of gate, one of up, and so on
    gate_up_eDI2 = gate_up.weight_eOI.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
    places_of: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "gate_up_proj": (gate_up_eDI2, (num_experts, hidden_size, width_twice)),
        "down_proj": (down.weight_eOI.transpose(1, 2), (num_experts, width_twice // 2, hidden_size)),
    }
    if gate_up.bias_eO is not None and down.bias_eO is not None:
        bias_eI2 = gate_up.bias_eO.unflatten(1, (2, -1)).transpose(1, 2)
        places_of["gate_up_proj_bias"] = bias_eI2, (num_experts, width_twice)
        places_of["down_proj_bias"] = down.bias_eO, (num_experts, hidden_size)
    for name, (memory, shape) in places_of.items():
        places.elsewhere.add(f"{prefix}.{name}")
        for slot, expert in enumerate(local_experts):
            places.add(f"{prefix}.{name}", Destination(memory[slot : slot + 1], shape, (slice(expert, expert + 1),)))
