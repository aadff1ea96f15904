"""The data that describes a family of models: the reader of its config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import ModelSpec

# Regular expressions and their replacements, applied in this order to each name. In a name, `layers.draft0.` stands for
# the layer after the last decoder layer: the layer of the first module for multi-token prediction (MTP). A plus behind
# a number in a replacement adds one to the number.
Names: TypeAlias = tuple[tuple[str, str], ...]

# Names of the matrices of gated networks in Mixtral's first release.
W123: Names = ((r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj."))
BLOCK_SPARSE: Names = ((r"\.block_sparse_moe\.", ".mlp."), *W123)
PARTS = "(?:embedding_|hidden_)?(?:norm|projection)|embedding|head|copy|layer"  # names of the parts of an MTP module
# MTP modules that are stored like decoder layers (DeepSeek-V3). Tensors named `draft.0.copy.` are not loaded.
DRAFT: Names = (
    (r"^model\.layers\.draft(\d+)\.", r"draft.\1."),
    (r"^(draft\.\d+)\.enorm\.", r"\1.embedding_norm."),
    (r"^(draft\.\d+)\.hnorm\.", r"\1.hidden_norm."),
    (r"^(draft\.\d+)\.eh_proj\.", r"\1.projection."),
    (r"^(draft\.\d+)\.(?:shared_head\.norm|final_layernorm)\.", r"\1.norm."),
    (r"^(draft\.\d+)\.(?=embed_tokens\.|shared_head\.)", r"\1.copy."),
    (rf"^(draft\.\d+)\.(?!(?:{PARTS})\.)", r"\1.layer."),
)
# The names of Qwen3-Next and other models that have one MTP module.
ONE_MODULE: Names = (
    (r"^mtp\.layers\.0\.", "draft.0.layer."),
    (r"^mtp\.pre_fc_norm_embedding\.", "draft.0.embedding_norm."),
    (r"^mtp\.pre_fc_norm_hidden\.", "draft.0.hidden_norm."),
    (r"^mtp\.fc\.", "draft.0.projection."),
    (r"^mtp\.norm\.", "draft.0.norm."),
    (r"^mtp\.", "draft.0.copy."),
)
# Prefixes of tensors of models for images, sound and video, and of projectors from these to a language model.
OTHER_MODELS = (
    *("vision_tower.", "vision_model.", "vision_encoder.", "embed_vision.", "visual.", "audio_tower.", "audio_model."),
    *("sound_encoder.", "embed_audio.", "talker.", "code2wav.", "multi_modal_projector.", "mm_projector."),
    *("connector.", "projector.", "mlp1.", "image_newline"),
)
# Published checkpoints put a prefix before the whole name. transformers 5 puts a prefix inside the name.
WRAPPED: Names = (
    (r"^language_model\.", ""),
    (r"^model\.language_model\.(?:model\.)?", "model."),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models. Each is a file in `moeserve/models/families`."""

    name: str
    models: str = ""  # published models, for docs/models.md; "": they are called `name`
    architecture: str  # name under `architectures` in config.json
    other_architectures: tuple[str, ...] = ()  # additional names
    model_type: str = ""  # transformers' name of the language model's config, whose defaults are used; "": no defaults
    read: Callable[[ConfigValues], ModelSpec]  # raises CheckpointError for an unsupported config
    names: Names = ()  # translation of the names of stored tensors to the names that all families share
    wrapped: Names = ()  # translation applied before `names`, of names inside of another model
    left_out: tuple[str, ...] = ()  # prefixes of tensors that do not belong to the decoder, and are not loaded
    norm_offset: float = 0.0  # added to the stored weights of norms, if checkpoints store differences from this number


def inside_other_model(family: Family) -> Family:
    """Return the variant of a family for checkpoints that hold the language model inside of another model."""
    return replace(family, wrapped=(*family.wrapped, *WRAPPED), left_out=(*family.left_out, *OTHER_MODELS))
