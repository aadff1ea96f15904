"""The data that describes a family of models: the reader of its config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import ModelConfig

# Regular expressions and their replacements, applied in this order to each name. In `layers.draft.`, "draft" stands for
# the number after the last decoder layer, which a multi-token prediction (MTP) layer has.
Names: TypeAlias = tuple[tuple[str, str], ...]

# Matrices of networks with gates, in the names of Mixtral's first release.
W123: Names = ((r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj."))
BLOCK_SPARSE: Names = ((r"\.block_sparse_moe\.", ".mlp."), *W123)
# An MTP layer that is stored like a decoder layer (DeepSeek-V3). `draft.copy.` are tensors that are not loaded.
DRAFT: Names = (
    (r"^model\.layers\.draft\.", "draft."),
    (r"^draft\.enorm\.", "draft.embedding_norm."),
    (r"^draft\.hnorm\.", "draft.hidden_norm."),
    (r"^draft\.eh_proj\.", "draft.projection."),
    (r"^draft\.shared_head\.norm\.", "draft.norm."),
    (r"^draft\.(?=embed_tokens\.|shared_head\.)", "draft.copy."),
    (r"^draft\.(?!embedding_norm\.|hidden_norm\.|projection\.|norm\.|copy\.|layer\.)", "draft.layer."),
)
# Names of models for images, sound and video, and of what connects them to a language model, in other models.
OTHER_MODELS = (
    *("vision_tower.", "vision_model.", "vision_encoder.", "embed_vision.", "visual.", "audio_tower.", "audio_model."),
    *("sound_encoder.", "embed_audio.", "talker.", "code2wav.", "multi_modal_projector.", "mm_projector."),
    *("connector.", "projector.", "mlp1.", "image_newline"),
)
# Published names put a prefix before the whole name, transformers 5 inside of it.
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
    model_type: str = ""  # transformers' name of the language model's config, whose defaults are used; "": none are
    read: Callable[[ConfigValues], ModelConfig]  # raises CheckpointError for an unsupported config
    names: Names = ()  # translate the names of stored tensors to those that all families share
    wrapped: Names = ()  # applied before: names inside of another model
    left_out: tuple[str, ...] = ()  # prefixes of the names of tensors that are not the decoder's, which are not loaded
    norm_offset: float = 0.0  # added to the weights of norms if checkpoints store differences from this number


def inside_other_model(family: Family) -> Family:
    """Return a family whose checkpoints hold the language model inside of another model."""
    return replace(family, wrapped=(*family.wrapped, *WRAPPED), left_out=(*family.left_out, *OTHER_MODELS))
