"""The weight mapping: a table of checkpoint tensor names and their destinations in one rank's model.

Each function below yields the rows of the table for one kind of module: a tensor's name and its destination, or None
for a tensor that only other ranks need.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from moeserve.layers.compressed.attention import CompressedSparseAttention
from moeserve.layers.dense.mlp import MLP
from moeserve.layers.dense.network import DenseNetwork
from moeserve.layers.grouped_query.attention import Attention
from moeserve.layers.latent.attention import CompressedQuery, LatentAttention
from moeserve.layers.latent.indexer import Indexer
from moeserve.layers.latent.learned_temperature import LearnedTemperature
from moeserve.layers.linear import Linear
from moeserve.layers.linear_attention.attention import LinearAttention
from moeserve.layers.moe.beside import Beside, ParallelNorms
from moeserve.layers.moe.layer import MoELayer
from moeserve.layers.network import OverTP
from moeserve.layers.norm import LayerNorm
from moeserve.layers.short_convolution.convolution import GatedConvolution
from moeserve.layers.streams.hyper_connections import HyperConnection
from moeserve.layers.streams.residual import Residual, ScaledResidual
from moeserve.layers.weights import Weights
from moeserve.models.checkpoint.loading import (
    Destination,
    Destinations,
    Row,
    columns,
    mxfp4_matrix,
    rows,
    rows_of_heads,
    whole,
)
from moeserve.models.checkpoint.tensors import CheckpointTensor
from moeserve.models.compressed_attention_mapping import compressed_attention_rows, connection_rows
from moeserve.models.decoder import Decoder, DecoderBlock
from moeserve.models.draft_layer import DraftInput
from moeserve.models.family import AttentionNames, Family, LayerNames, MoENames
from moeserve.models.recurrent_mapping import convolution_rows, linear_attention_rows, summed_rows

# Tensors that only the first or the last pipeline stage needs.
OF_ENDS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
BIASES_OF_ENDS = {"model.norm.bias", "lm_head.bias"}  # where a model has them
OF_ENDS |= {f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}


def destinations(model: Decoder, family: Family, names: Collection[str]) -> Destinations:
    """Return the destinations of a checkpoint's tensors, given all their names."""
    into: dict[str, list[Destination]] = {}
    ignored: set[str] = set()
    for name, place in _rows_of(model, family, names):
        if place is None:
            ignored.add(name)
        else:
            into.setdefault(name, []).append(place)
    # Skip layers of other pipeline stages, and MTP layers, which are loaded only for speculative decoding.
    num_layers = len(model.config.layers) + model.config.num_skipped_layers
    skipped = tuple(f"model.layers.{number}." for number in range(num_layers) if number not in model.stage)
    if model.draft_input is not None:
        ignored |= {name.format(number=model.stage.stop - 1) for name in family.draft_names.copies}
    ignored |= OF_ENDS - into.keys()
    if model.last is None:
        ignored |= BIASES_OF_ENDS

    def is_ignored(name: str) -> bool:
        return name in ignored or name.startswith(skipped)

    return Destinations(into, is_ignored, tuple(model.rotaries.frequencies))


def with_stored_orientation(family: Family, tensors: Mapping[str, CheckpointTensor], hidden_size: int) -> Family:
    """Return the family with the names for the stored orientation of the experts, if it has names for both.

    One tensor of all experts of a layer is [experts, 2 * width, hidden], or transposed, [experts, hidden, 2 * width].
    """
    if len({names.is_transposed for names in family.names}) == 1:
        return family
    ends = tuple(f".{names.experts}.{names.fused[0]}" for names in family.names)
    shape = next((tensor.shape for name, tensor in tensors.items() if name.endswith(ends)), (0, 0, hidden_size))
    is_transposed = len(shape) == 3 and shape[2] != hidden_size
    return replace(family, names=tuple(names for names in family.names if names.is_transposed == is_transposed))


def _rows_of(model: Decoder, family: Family, names: Collection[str]) -> Iterator[Row]:
    embedding, head, vocab_size = model.embedding, model.head, model.config.vocab_size
    if embedding is not None:
        yield "model.embed_tokens.weight", rows(embedding.weight, embedding.share, vocab_size)
    if model.last is not None:
        yield "model.norm.weight", whole(model.last.norm.weight, offset=family.norm_offset)
        if isinstance(model.last, HyperConnection):
            yield from connection_rows("model.hc_head.hc_", model.last)
        if isinstance(model.last.norm, LayerNorm):
            yield "model.norm.bias", whole(model.last.norm.bias)
    for log_factors_F in model.rotaries.learned_factors:
        yield "model.rotary_emb.alpha", whole(log_factors_F)
    if head is not None and not head.weights.is_borrowed:
        name = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
        yield name, rows(head.weight, head.share, vocab_size, head.weights)
    if head is not None and head.bias is not None:
        yield "lm_head.bias", rows(head.bias, head.share, vocab_size)
    first_draft_layer = len(model.config.layers) - model.config.num_draft_layers
    if model.draft_input is not None:
        yield from _draft_input(model.draft_input, first_draft_layer, family)
    for block in model.blocks:
        is_draft = block.layer >= first_draft_layer
        prefix = (family.draft_names.layer if is_draft else "model.layers.{number}").format(number=block.layer)
        yield from _block(prefix, block, model.config.hidden_size, family, names)


def _block(prefix: str, block: DecoderBlock, hidden_size: int, family: Family, names: Collection[str]) -> Iterator[Row]:
    layer_names = family.layer_names
    network = block.network.network if isinstance(block.network, OverTP) else block.network
    feeds = isinstance(network, DenseNetwork | MoELayer | Beside)
    norm_name = layer_names.feed_forward_norm if feeds else layer_names.mixer_norm
    norm = block.place.norm.dense if isinstance(block.place.norm, ParallelNorms) else block.place.norm
    yield f"{prefix}.{norm_name}.weight", whole(norm.weight, offset=family.norm_offset)
    if isinstance(block.place, HyperConnection):
        yield from connection_rows(f"{prefix}.hc_{'ffn' if feeds else 'attn'}_", block.place)
    if isinstance(block.place, Residual) and block.place.output_norm is not None:
        name = layer_names.feed_forward_output_norm if feeds else layer_names.mixer_output_norm
        yield f"{prefix}.{name}.weight", whole(block.place.output_norm.weight)
    if isinstance(norm, LayerNorm):
        yield f"{prefix}.{norm_name}.bias", whole(norm.bias)
    if isinstance(block.place, ScaledResidual):
        yield f"{prefix}.{layer_names.factor}", whole(block.place.factor)
    match network:
        case Attention():
            yield from _attention(f"{prefix}.{layer_names.attention}", network, family)
        case LatentAttention():
            yield from _latent_attention(f"{prefix}.{layer_names.attention}", network, family.attention_names)
        case LinearAttention():
            of_linear = family.linear_attention_names
            assert of_linear is not None
            yield from linear_attention_rows(f"{prefix}.{layer_names.recurrent}", network, of_linear, names)
        case GatedConvolution():
            yield from convolution_rows(f"{prefix}.{layer_names.recurrent}", network)
        case CompressedSparseAttention():
            yield from compressed_attention_rows(f"{prefix}.{layer_names.attention}", network, names)
        case DenseNetwork():
            yield from _dense(f"{prefix}.{layer_names.dense}", network, layer_names)
        case MoELayer():
            yield from _moe(prefix, network, _moe_names(prefix, family, names), names, 1.0)
        case Beside():
            assert isinstance(network.dense.network, DenseNetwork)
            yield from _dense(f"{prefix}.{layer_names.dense}", network.dense.network, layer_names)
            yield f"{prefix}.{layer_names.router_norm}", whole(block.place.norm.router.weight)
            yield f"{prefix}.{layer_names.experts_norm}.weight", whole(block.place.norm.experts.weight)
            yield f"{prefix}.{layer_names.dense_output_norm}.weight", whole(network.dense_norm.weight)
            yield f"{prefix}.{layer_names.experts_output_norm}.weight", whole(network.experts_norm.weight)
            # Gemma 4 divides the inputs of its router by the root of the width.
            moe_names = _moe_names(prefix, family, names)
            yield from _moe(prefix, network.experts, moe_names, names, hidden_size**-0.5)


def _dense(prefix: str, network: DenseNetwork, names: LayerNames) -> Iterator[Row]:
    yield from _mlp(prefix, network.mlp, network.config.width, names.dense_matrices)


def _moe_names(prefix: str, family: Family, names: Collection[str]) -> MoENames:
    """Return those of the family's names of which the most are stored: the router's, its correction's, an expert's."""

    def are_stored(each: MoENames) -> tuple[bool, ...]:
        found = (f"{each.router}.weight", each.correction, f"{each.experts}.0.{each.gate}.weight")
        return tuple(f"{prefix}.{name}" in names for name in found)

    return max(family.names, key=are_stored)


def _draft_input(parts: DraftInput, number: int, family: Family) -> Iterator[Row]:
    names = family.draft_names
    norms = (
        (names.embedding_norm, parts.embedding_norm),
        (names.hidden_norm, parts.hidden_norm),
        (names.norm, parts.norm),
    )
    for name, norm in norms:
        yield f"{name.format(number=number)}.weight", whole(norm.weight, offset=family.norm_offset)
    yield from _linear(names.projection.format(number=number), parts.projection)


def _attention(prefix: str, attention: Attention, family: Family) -> Iterator[Row]:
    names = family.attention_names
    config, size, fused = attention.config, attention.config.head_dim, attention.query_key_value
    queries, num_queries = rows_of_heads(attention.heads, size), config.num_heads * size
    keys, values = (rows_of_heads(attention.kv_heads, each) for each in config.kv_sizes)
    num_keys, num_values = (config.num_kv_heads * each for each in config.kv_sizes)
    parts: list[tuple[Tensor, Weights | None, str]] = [(fused.weight, fused.weights, "weight")]
    if fused.bias is not None:
        parts.append((fused.bias, None, "bias"))
    for memory, owner, kind in parts:
        query, key, *gate = memory.split(attention.projected_sizes)
        yield f"{prefix}.k_proj.{kind}", rows(key, keys, num_keys, owner)
        if not config.values_are_keys:
            value, *gate = gate
            yield f"{prefix}.v_proj.{kind}", rows(value, values, num_values, owner)
        if not gate:
            yield f"{prefix}.q_proj.{kind}", rows(query, queries, num_queries, owner)
            continue
        # The tensor is ordered by head: the rows of the query, followed by those of the gate.
        for slot, head in enumerate(range(attention.heads.start, attention.heads.stop)):
            for number, part in enumerate((query, *gate)):
                first = (2 * head + number) * size
                own = part[slot * size : (slot + 1) * size]
                yield f"{prefix}.q_proj.{kind}", rows(own, slice(first, first + size), 2 * num_queries, owner)
    if attention.sinks is not None:
        yield f"{prefix}.{names.sinks}", rows(attention.sinks, attention.heads, config.num_heads)
    for name, norm in ((names.query_norm, attention.query_norm), (names.key_norm, attention.key_norm)):
        if not isinstance(norm, nn.Identity) and isinstance(norm.weight, nn.Parameter):
            yield f"{prefix}.{name}.weight", whole(norm.weight, offset=family.norm_offset)
    if attention.head_gates is not None:
        gates = attention.head_gates
        yield f"{prefix}.{names.gates}.weight", rows(gates.weight, attention.heads, config.num_heads, gates.weights)
    outputs, num_outputs = rows_of_heads(attention.heads, config.value_size), config.num_heads * config.value_size
    yield from summed_rows(f"{prefix}.{names.output}", attention.output, outputs, num_outputs, config.has_output_bias)


def _latent_attention(prefix: str, attention: LatentAttention, names: AttentionNames) -> Iterator[Row]:
    config, heads = attention.config, attention.heads
    yield f"{prefix}.{names.latent_norm}.weight", whole(attention.latent_norm.weight)
    yield from _linear(f"{prefix}.{names.compress}", attention.compress)
    # The tensor is ordered by head: the map [K, L] of the keys, followed by the map [V, L] of the values.
    size, maps = config.key_dim + config.value_dim, attention.head_maps
    shape = (config.num_heads * size, config.latent_size)
    for slot, head in enumerate(range(heads.start, heads.stop)):
        start, middle, stop = head * size, head * size + config.key_dim, (head + 1) * size
        keys_KL, values_VL = maps.keys.open.weight_eOI[slot].T, maps.values.open.weight_eOI[slot]
        yield f"{prefix}.{names.expand}.weight", Destination(keys_KL, shape, (slice(start, middle),), maps.keys)
        yield f"{prefix}.{names.expand}.weight", Destination(values_VL, shape, (slice(middle, stop),), maps.values)
    query_rows, num_query_rows = rows_of_heads(heads, config.query_dim), config.num_heads * config.query_dim
    match attention.query:
        case Linear() as query:
            yield f"{prefix}.{names.query}.weight", rows(query.weight, query_rows, num_query_rows, query.weights)
        case CompressedQuery(down=down, norm=norm, up=up):
            yield from _linear(f"{prefix}.q_a_proj", down)
            yield f"{prefix}.q_a_layernorm.weight", whole(norm.weight)
            yield f"{prefix}.q_b_proj.weight", rows(up.weight, query_rows, num_query_rows, up.weights)
    if attention.indexer is not None:
        yield from _indexer(f"{prefix}.indexer", attention.indexer, names)
    if attention.learned_temperature is not None:
        for kind, memory_N in _temperature(f"{prefix}.{names.temperature}", attention.learned_temperature):
            yield kind, rows(memory_N, heads, config.num_heads)
    if attention.head_gates is not None:
        gates = attention.head_gates
        yield f"{prefix}.{names.gates}.weight", rows(gates.weight, heads, config.num_heads, gates.weights)
    value_columns, num_value_columns = rows_of_heads(heads, config.value_dim), config.num_heads * config.value_dim
    output = f"{prefix}.{names.output}"
    yield from summed_rows(output, attention.output, value_columns, num_value_columns, config.has_bias)


def _temperature(prefix: str, temperature: LearnedTemperature) -> list[tuple[str, Tensor]]:
    return [(f"{prefix}.s", temperature.weight), (f"{prefix}.b", temperature.bias)]


def _indexer(prefix: str, indexer: Indexer, names: AttentionNames) -> Iterator[Row]:
    if indexer.query_norm_weight is not None:
        assert indexer.query_norm_bias is not None
        yield f"{prefix}.q_input_norm.weight", whole(indexer.query_norm_weight)
        yield f"{prefix}.q_input_norm.bias", whole(indexer.query_norm_bias)
    if indexer.learned_temperature is not None:
        for name, memory_N in _temperature(f"{prefix}.{names.temperature}", indexer.learned_temperature):
            yield name, whole(memory_N)
    yield from _linear(f"{prefix}.wq_b", indexer.query)
    yield from _linear(f"{prefix}.wk", indexer.key)
    yield f"{prefix}.k_norm.weight", whole(indexer.key_norm_weight)
    yield f"{prefix}.k_norm.bias", whole(indexer.key_norm_bias)
    yield from _linear(f"{prefix}.weights_proj", indexer.head_weights)


def _mlp(
    prefix: str, mlp: MLP, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Row]:
    *inner, down = names
    num_parts = mlp.gate_up.open.num_parts
    for name, memory in zip(inner[-num_parts:], mlp.gate_up.open.weight_eOI[0].chunk(num_parts), strict=True):
        yield f"{prefix}.{name}.weight", rows(memory, mlp.width, width, mlp.gate_up)
    yield f"{prefix}.{down}.weight", columns(mlp.down.weight, mlp.width, width, mlp.down.weights)


def _moe(
    prefix: str,
    moe: MoELayer,
    names: MoENames,
    names_in_checkpoint: Collection[str],
    router_factor: float,
) -> Iterator[Row]:
    width = moe.config.expert_width
    router = f"{prefix}.{names.router}"
    yield f"{router}.weight", whole(moe.router.weight, factor=router_factor)
    if moe.router.factors is not None:
        yield f"{prefix}.{names.factors}", whole(moe.router.factors)
    if moe.router.bias is not None:
        yield f"{router}.bias", whole(moe.router.bias)
    if moe.router.correction is not None:
        correction_E = moe.router.correction
        yield f"{prefix}.{names.correction}", whole(correction_E[None] if names.is_correction_matrix else correction_E)
    if moe.router.table is not None:
        yield f"{prefix}.{names.table}", whole(moe.router.table)
    if moe.shared_experts is not None:
        mlp, shared = moe.shared_experts.mlp, f"{prefix}.{names.shared}"
        if names.shared_fused is None:
            yield from _mlp(shared, mlp, mlp.width.stop, names.shared_parts)
        else:
            gate_up, down = names.shared_fused
            yield f"{shared}.{gate_up}.weight", whole(mlp.gate_up.open.weight_eOI[0], mlp.gate_up)
            yield from _linear(f"{shared}.{down}", mlp.down)
        if moe.shared_experts.gate is not None:
            yield from _linear(f"{prefix}.mlp.shared_expert_gate", moe.shared_experts.gate)
    for linear, name in ((moe.to_latent, names.to_latent), (moe.from_latent, names.from_latent)):
        if linear is not None:
            yield from _linear(f"{prefix}.{name}", linear)
    experts = f"{prefix}.{names.experts}"
    if f"{experts}.0.{names.up}.weight" in names_in_checkpoint:
        yield from _separate_experts(experts, moe, width, names)
    elif names.is_interleaved:
        yield from _interleaved_experts(experts, moe, width)
    elif names.is_transposed:
        yield from _transposed_experts(experts, moe, width)
    elif f"{experts}.{names.gate}.weight" in names_in_checkpoint:
        yield from _stacked_experts(experts, moe, width, names)
    elif f"{experts}.{names.fused[0]}" in names_in_checkpoint:
        yield from _fused_experts(experts, moe, width, names)
    else:
        yield from _separate_experts(experts, moe, width, names)


def _separate_experts(prefix: str, moe: MoELayer, width: int, names: MoENames) -> Iterator[Row]:
    """Yield the rows of experts stored in separate tensors."""
    gate_up, down, share = moe.experts.gate_up, moe.experts.down, moe.experts.width
    num_parts = gate_up.open.num_parts
    for slot, expert in enumerate(moe.local_experts):
        if gate_up.is_mxfp4:
            inner = list(_mxfp4_matrices(gate_up, slot, num_parts))
            (of_down,) = _mxfp4_matrices(down, slot, 1)
        else:
            parts = gate_up.open.weight_eOI[slot].chunk(num_parts)
            inner = [rows(part_ID, share, width, gate_up) for part_ID in parts]
            of_down = columns(down.open.weight_eOI[slot], share, width, down)
        for name, place in zip((names.gate, names.up)[-num_parts:], inner, strict=True):
            yield f"{prefix}.{expert}.{name}.weight", place
        yield f"{prefix}.{expert}.{names.down}.weight", of_down
        if gate_up.bias is not None:
            biases = zip((names.gate, names.up)[-num_parts:], gate_up.bias[slot].chunk(num_parts), strict=True)
            for name, bias_I in biases:
                yield f"{prefix}.{expert}.{name}.bias", rows(bias_I, share, width)
        if down.bias is not None:
            yield f"{prefix}.{expert}.{names.down}.bias", whole(down.bias[slot])
    are_elsewhere = set(range(moe.placement.num_logical)) - set(moe.local_experts)
    for expert, name in itertools.product(are_elsewhere, (names.gate, names.up, names.down)):
        yield f"{prefix}.{expert}.{name}.weight", None
        yield f"{prefix}.{expert}.{name}.bias", None
    if gate_up.bias is not None:  # only one of the ranks that share an expert has the bias of its down projection
        for expert in moe.local_experts:
            yield f"{prefix}.{expert}.{names.down}.bias", None


def _mxfp4_matrices(weights: Weights, slot: int, num_parts: int) -> Iterator[Destination]:
    """Yield the destinations of the matrices that are stacked in a weight, such as gate and up."""
    codes_eOI, scales_eOG = weights.open.weight_eOI, weights.open.scales_eGB
    assert scales_eOG is not None
    for codes_OI, scales_OG in zip(codes_eOI[slot].chunk(num_parts), scales_eOG[slot].chunk(num_parts), strict=True):
        yield mxfp4_matrix(codes_OI, scales_OG, weights)


def _fused_experts(prefix: str, moe: MoELayer, width: int, names: MoENames) -> Iterator[Row]:
    """Yield the rows of two tensors with all experts.

    Their shapes are [experts, 2 * width, hidden], or [experts, width, hidden] without gates, and [experts, hidden,
    width].
    """
    gate_up_name, down_name = names.fused
    gate_up, down, share = moe.experts.gate_up, moe.experts.down, moe.experts.width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    num_parts = gate_up.open.num_parts
    parts = [slice(0, num_parts * width)]  # gates come before ups
    if share != slice(0, width):
        parts = [slice(part * width + share.start, part * width + share.stop) for part in range(num_parts)]
    yield f"{prefix}.{gate_up_name}", None
    yield f"{prefix}.{down_name}", None
    for slot, expert in enumerate(moe.local_experts):
        one = slice(expert, expert + 1)
        memories = gate_up.open.weight_eOI[slot : slot + 1].chunk(len(parts), dim=1)
        for memory, part in zip(memories, parts, strict=True):
            place = Destination(memory, (num_experts, num_parts * width, hidden_size), (one, part), gate_up)
            yield f"{prefix}.{gate_up_name}", place
        shape = num_experts, hidden_size, width
        place = Destination(down.open.weight_eOI[slot : slot + 1], shape, (one, slice(0, hidden_size), share), down)
        yield f"{prefix}.{down_name}", place


def _stacked_experts(prefix: str, moe: MoELayer, width: int, names: MoENames) -> Iterator[Row]:
    """Yield the rows of three tensors with all experts: two [experts, width, hidden], and [experts, hidden, width]."""
    gate_up, down, share = moe.experts.gate_up, moe.experts.down, moe.experts.width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    gate_eID, up_eID = gate_up.open.weight_eOI.chunk(2, dim=1)
    for name in (names.gate, names.up, names.down):
        yield f"{prefix}.{name}.weight", None
    for slot, expert in enumerate(moe.local_experts):
        one, of_slot = slice(expert, expert + 1), slice(slot, slot + 1)
        for name, memory_eID in ((names.gate, gate_eID), (names.up, up_eID)):
            shape = num_experts, width, hidden_size
            yield f"{prefix}.{name}.weight", Destination(memory_eID[of_slot], shape, (one, share), gate_up)
        shape = num_experts, hidden_size, width
        place = Destination(down.open.weight_eOI[of_slot], shape, (one, slice(0, hidden_size), share), down)
        yield f"{prefix}.{names.down}.weight", place
        if gate_up.bias is not None:
            biases = zip((names.gate, names.up), gate_up.bias[of_slot].chunk(2, dim=1), strict=True)
            for name, memory_eI in biases:
                yield f"{prefix}.{name}.bias", Destination(memory_eI, (num_experts, width), (one, share))
            yield f"{prefix}.{names.down}.bias", None  # on one of the ranks that share an expert
        if down.bias is not None:
            yield f"{prefix}.{names.down}.bias", Destination(down.bias[of_slot], (num_experts, hidden_size), (one,))


def _transposed_experts(prefix: str, moe: MoELayer, width: int) -> Iterator[Row]:
    """Yield the rows of [experts, hidden, 2 * width], with gates before ups, and [experts, width, hidden]."""
    gate_up, down, share = moe.experts.gate_up, moe.experts.down, moe.experts.width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    gate_up_eDI2, down_eID = gate_up.open.weight_eOI.transpose(1, 2), down.open.weight_eOI.transpose(1, 2)
    yield f"{prefix}.gate_up_proj", None
    yield f"{prefix}.down_proj", None
    for slot, expert in enumerate(moe.local_experts):
        one, of_slot = slice(expert, expert + 1), slice(slot, slot + 1)
        for part, memory_eDI in enumerate(gate_up_eDI2[of_slot].chunk(2, dim=2)):
            columns_of_part = slice(part * width + share.start, part * width + share.stop)
            shape = num_experts, hidden_size, 2 * width
            place = Destination(memory_eDI, shape, (one, slice(0, hidden_size), columns_of_part), gate_up)
            yield f"{prefix}.gate_up_proj", place
        place = Destination(down_eID[of_slot], (num_experts, width, hidden_size), (one, share), down)
        yield f"{prefix}.down_proj", place


def _interleaved_experts(prefix: str, moe: MoELayer, width: int) -> Iterator[Row]:
    """Yield the rows of tensors [experts, inputs, outputs], in which outputs of gate and up alternate.

    In the model, an expert's rows of gate come before those of up.
    """
    gate_up, down, share = moe.experts.gate_up, moe.experts.down, moe.experts.width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    inputs, outputs = slice(0, hidden_size), rows_of_heads(share, 2)
    table: list[tuple[str, Tensor, tuple[int, ...], tuple[slice, ...], Weights | None]] = []
    if gate_up.is_mxfp4:
        table += _mxfp4_experts(gate_up, down)
    else:
        gate_up_eDI2 = gate_up.open.weight_eOI.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        table.append(("gate_up_proj", gate_up_eDI2, (hidden_size, 2 * width), (inputs, outputs), gate_up))
        table.append(("down_proj", down.open.weight_eOI.transpose(1, 2), (width, hidden_size), (share,), down))
    if gate_up.bias is not None:
        bias_eI2 = gate_up.bias.unflatten(1, (2, -1)).transpose(1, 2)
        table.append(("gate_up_proj_bias", bias_eI2, (2 * width,), (outputs,), None))
        yield f"{prefix}.down_proj_bias", None  # only one of the ranks that share an expert has the bias
    if down.bias is not None:
        table.append(("down_proj_bias", down.bias, (hidden_size,), (), None))
    for name, memory, shape, part, owner in table:
        yield f"{prefix}.{name}", None
        for slot, expert in enumerate(moe.local_experts):
            one = slice(expert, expert + 1)
            yield f"{prefix}.{name}", Destination(memory[slot : slot + 1], (num_experts, *shape), (one, *part), owner)


def _mxfp4_experts(
    gate_up: Weights, down: Weights
) -> Iterator[tuple[str, Tensor, tuple[int, ...], tuple[slice, ...], Weights | None]]:
    """Yield name, memory, shape, part and owner of codes and scales.

    Codes are stored as [experts, outputs, groups, 16], and scales as [experts, outputs, groups].
    """
    for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
        codes_eOI, scales_eOG = weights.open.weight_eOI, weights.open.scales_eGB
        assert scales_eOG is not None
        _, num_outputs, num_groups = scales_eOG.shape
        for part, memory in (("blocks", codes_eOI.unflatten(2, (num_groups, -1))), ("scales", scales_eOG)):
            in_order = memory.unflatten(1, (2, -1)).transpose(1, 2) if weights is gate_up else memory
            yield f"{name}_{part}", in_order, (num_outputs, *memory.shape[2:]), (), weights


def _linear(prefix: str, linear: Linear) -> Iterator[Row]:
    """Yield the rows of a projection that is replicated on every rank."""
    yield f"{prefix}.weight", whole(linear.weight, linear.weights)
    if linear.bias is not None:
        yield f"{prefix}.bias", whole(linear.bias)
