"""The data that describes a family of models: the reader of its config.json, and its tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MoENames:
    """Tensor names of a mixture-of-experts layer, without the prefix `model.layers.3.`.

    A checkpoint stores each expert in separate tensors (`<experts>.7.<gate>.weight`), or all experts of a layer in two
    tensors (`<experts>.gate_up_proj`, [experts, 2 * width, hidden], and `<experts>.down_proj`, [experts, hidden,
    width]). Networks without gates do not use the names of gates.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    is_correction_matrix: bool = False  # True: the correction has the shape [1, experts]
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")  # names of tensors of all experts, after `<experts>.`
    shared: str = "mlp.shared_experts"
    shared_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_fused: tuple[str, str] | None = None  # fused gate and up, and down, after `<shared>.`; None: three tensors
    table: str = ""  # table of the experts of each token id, if a router has one
    to_latent: str = ""  # this and the next: projections before and after experts of a latent size
    from_latent: str = ""
    factors: str = ""  # of the weights of each expert, where a router has them
    is_transposed: bool = False  # one tensor for all experts, [experts, inputs, outputs], gates before ups
    is_interleaved: bool = False  # one tensor for all experts, [experts, inputs, outputs], gate and up outputs in turn


@dataclass(frozen=True, kw_only=True)
class AttentionNames:
    """Tensor names of attention, without the prefix `model.layers.3.self_attn.`."""

    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    gates: str = "g_proj"
    output: str = "o_proj"
    # Latent attention:
    query: str = "q_proj"  # where queries are not compressed
    compress: str = "kv_a_proj_with_mqa"
    latent_norm: str = "kv_a_layernorm"
    expand: str = "kv_b_proj"
    temperature: str = "ssmax_scaling"


LinearAttentionPart: TypeAlias = Literal["query", "key", "value", "gate", "rate", "decay"]


@dataclass(frozen=True, kw_only=True)
class LinearAttentionNames:
    """Tensor names of linear attention, without the prefix `model.layers.3.linear_attn.`.

    A projection or convolution is listed with the parts that its tensor concatenates.
    """

    projections: tuple[tuple[str, tuple[LinearAttentionPart, ...]], ...]
    convolutions: tuple[tuple[str, tuple[LinearAttentionPart, ...]], ...]
    is_by_key_head: bool = False  # projections are ordered by key head, each with its rows of all parts
    decays_down: str = "f_a_proj"  # the first factor of low-rank projections
    gates_down: str = "g_a_proj"
    log_decay_dims: tuple[int, int] = (0, 0)  # dimensions of size 1 before and after the heads
    norm: str = "norm"
    output: str = "out_proj"
    joined_convolution: str = ""  # of all queries, keys and values, in the form that transformers saves of its own


# In the terms of Mamba-2: C, B, x, z and dt.
MAMBA2_NAMES = LinearAttentionNames(
    projections=(("in_proj", ("gate", "value", "key", "query", "decay")),),
    convolutions=(("conv1d", ("value", "key", "query")),),
)


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Tensor names of a layer's parts, without the prefix `model.layers.3.`."""

    mixer_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    recurrent: str = "linear_attn"  # a token mixer with a state
    dense: str = "mlp"  # a feed-forward network without experts
    dense_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # Where layers have them: norms of the outputs of both networks, and the factor of the residual stream
    mixer_output_norm: str = ""
    feed_forward_output_norm: str = ""
    factor: str = ""
    # Norms around a dense network beside experts. That of the router is the name of a tensor.
    router_norm: str = ""
    experts_norm: str = ""
    dense_output_norm: str = ""
    experts_output_norm: str = ""


@dataclass(frozen=True, kw_only=True)
class DecoderPart:
    """The names of the decoder's tensors where they differ from those of a checkpoint that holds only the decoder."""

    left_out: tuple[str, ...] = ()  # prefixes of the names of all other tensors, which are not loaded
    # Prefixes of names, and their replacements in a checkpoint that holds only the decoder. The first match is used; a
    # name without a match is not changed.
    prefixes: tuple[tuple[str, str], ...] = ()
    # The same for parts inside of names, in the forms that transformers 5 saves. Published names have none.
    own_parts: tuple[tuple[str, str], ...] = ()


# Names of models for images, sound and video, and of what connects them to a language model, in other models.
OTHER_MODELS = (
    *("vision_tower.", "vision_model.", "vision_encoder.", "vision_embedding.", "visual.", "embed_vision."),
    *("audio_tower.", "audio_model.", "sound_encoder.", "embed_audio.", "talker.", "code2wav."),
    *("multi_modal_projector.", "mm_projector.", "connector.", "projector.", "mlp1.", "image_newline"),
)


def inside_other_model(part: DecoderPart | None = None) -> DecoderPart:
    """Return the names of the decoder's tensors in a checkpoint whose language model is inside of another model.

    Args:
        part: those in a checkpoint of the language model alone; None: as the decoder names them.
    """
    part = part or DecoderPart()
    own = (*part.prefixes, ("", ""))
    return DecoderPart(
        prefixes=(
            # Published names put a prefix before the whole name, transformers 5 inside of it.
            *((f"language_model.{old}", new) for old, new in own),
            *((f"model.language_model.{old.removeprefix('model.')}", new or "model.") for old, new in own),
            *part.prefixes,
        ),
        left_out=(
            *OTHER_MODELS,
            *(f"model.{name}" for name in OTHER_MODELS),
            *part.left_out,
            *(f"language_model.{name}" for name in part.left_out),
            *(f"model.language_model.{name.removeprefix('model.')}" for name in part.left_out),
        ),
        own_parts=part.own_parts,
    )


@dataclass(frozen=True, kw_only=True)
class DraftNames:
    """Tensor names of the multi-token prediction (MTP) layer. `{number}` is the index after the last decoder layer."""

    layer: str = "model.layers.{number}"  # prefix of its decoder layer, named like other layers
    embedding_norm: str = "model.layers.{number}.enorm"
    hidden_norm: str = "model.layers.{number}.hnorm"
    projection: str = "model.layers.{number}.eh_proj"
    norm: str = "model.layers.{number}.shared_head.norm"
    # Copies of the model's embedding and head, which are not loaded.
    copies: tuple[str, ...] = (
        "model.layers.{number}.embed_tokens.weight",
        "model.layers.{number}.shared_head.head.weight",
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models. Each is a file in `moeserve/models/families`."""

    name: str
    architecture: str  # name under `architectures` in config.json
    other_architectures: tuple[str, ...] = ()  # additional names
    model_type: str = ""  # transformers' name of the language model's config, whose defaults are used; "": none are
    read: Callable[[ConfigValues], ModelConfig]  # raises CheckpointError for an unsupported config
    names: tuple[MoENames, ...] = (MoENames(),)  # alternatives; those of which most are stored are used
    attention_names: AttentionNames = AttentionNames()
    linear_attention_names: LinearAttentionNames | None = None  # None: there is no linear attention
    layer_names: LayerNames = LayerNames()
    draft_names: DraftNames = DraftNames()  # used if the model has a `draft_layer`
    decoder_part: DecoderPart | None = None  # None: all tensors are the decoder's
    norm_offset: float = 0.0  # added to the weights of norms if checkpoints store differences from this number
