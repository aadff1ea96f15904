"""The registry of families, and descriptions of checkpoints from config.json and generation_config.json."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from moeserve.config.facts import CheckpointFacts
from moeserve.config.settings import DtypeName, ModelImplName, QuantizationName
from moeserve.errors import CheckpointError
from moeserve.models import families
from moeserve.models.checkpoint.experts import are_in_mxfp4
from moeserve.models.checkpoint.tied_head import stored_head_is_tied
from moeserve.models.checkpoint.weight_format import WeightFormat, read_weight_format
from moeserve.models.config_defaults import defaults_of
from moeserve.models.config_values import TIED, ConfigValues, read_json
from moeserve.models.family import Family, inside_other_model
from moeserve.models.gguf.names import with_gguf_names
from moeserve.models.model_config import ModelSpec
from moeserve.models.unsupported import unsupported

logger = logging.getLogger(__name__)


def _find_families() -> dict[str, Family]:
    """Return the families defined in the package `families`, by architecture."""
    names = [f"{families.__name__}.{module.name}" for module in iter_modules(families.__path__)]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    found = [value for value in values if isinstance(value, Family)]
    return {name: family for family in found for name in (family.architecture, *family.other_architectures)}


FAMILIES = _find_families()
# If several families have the same type, the first is the language model alone, without a model for images.
FAMILIES_BY_TYPE = {family.model_type: family for family in reversed(FAMILIES.values())}
HEADS = ("ForCausalLM", "ForConditionalGeneration")


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint's family, shape and weight format, known before its weights are read."""

    family: Family
    model: ModelSpec
    dtype: DtypeName  # dtype of weights that are not quantised
    weight_format: WeightFormat
    has_stored_head: bool = False  # the checkpoint stores a head although its config says that embeddings are tied

    def with_draft_layers(self, num_drafts: int) -> Description:
        """Return the description with the model's MTP modules, so that their tensors are loaded.

        Args:
            num_drafts: number of draft tokens of a request in a step.
        """
        return replace(self, model=self.model.with_draft_layers(num_drafts))

    def keeps_mxfp4(self, dtype: DtypeName) -> bool:
        """Return True if experts in MXFP4 are kept without decoding, provided that there are kernels for them."""
        return dtype == "bfloat16" and self.weight_format.is_mxfp4

    def keeps_stored(self, dtype: DtypeName, quantization: QuantizationName | None = None) -> bool:
        """Return True if weights are kept as the checkpoint's quantised codes, where there are kernels for them."""
        if self.weight_format.has_blocks:
            return quantization == "int4"
        is_encoded = self.weight_format.stored_as is not None
        return dtype == "bfloat16" and is_encoded and quantization in (None, "mxfp4")


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults in a checkpoint's generation_config.json."""

    eos_token_ids: list[int]
    sampling: dict[str, Any]  # arguments of SamplingParams


def read_facts(
    folder: str | Path,
    model_impl: Literal["auto", ModelImplName] = "auto",
    *,
    num_drafts: int = 0,
    hf_overrides: Mapping[str, Any] | None = None,
) -> CheckpointFacts:
    """Return the facts that the engine needs before it loads a checkpoint (a folder or a GGUF file).

    Args:
        num_drafts: number of tokens that multi-token prediction (MTP) drafts in a step. MTP modules are included if
            the checkpoint has them.
        hf_overrides: changes to config.json.

    Raises:
        CheckpointError: the folder or its config.json is missing, the architecture is unsupported, or the config is
            invalid.
    """
    folder = folder_of(folder)
    description = describe(folder, model_impl, hf_overrides)
    if description.has_stored_head:
        logger.warning(
            "%s says that the output head is the embedding (%s), but the checkpoint stores a different head, which is "
            "used",
            Path(folder) / "config.json",
            TIED,
        )
    is_foreign = model_impl == "transformers"
    if num_drafts and description.model.draft is not None:
        description = description.with_draft_layers(num_drafts)
    return CheckpointFacts(
        path=str(folder),
        dtype=description.dtype,
        vocab_size=description.model.vocab_size,
        max_position_embeddings=description.model.max_position_embeddings,
        tensor_parallel_sizes=(sizes := (1,) if is_foreign else description.model.tensor_parallel_sizes),
        tensor_parallel_sizes_alike=tuple(filter(description.model.keeps_bytes, sizes)),
        num_layers=len(description.model.layers),
        num_sparse_layers=description.model.num_sparse_layers,
        first_sparse_layer=min(description.model.sparse_layers, default=0),
        num_experts=description.model.num_experts,
        expert_shape=None if is_foreign else description.model.expert_shape,
        route_shape=None if is_foreign else description.model.route_shape,
        quantization=description.weight_format.method,
        has_mxfp4=description.weight_format.is_mxfp4,
        has_blocks=description.weight_format.has_blocks,
        needs=description.model.needs,
        num_draft_layers=description.model.num_draft_layers,
        first_layers=description.model.first_layers,
    )


def describe(
    folder: str | Path,
    model_impl: Literal["auto", ModelImplName] = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
) -> Description:
    """Return the description of a checkpoint from its config.json.

    Args:
        model_impl: "transformers" if the model runs with transformers' code.
        hf_overrides: changes to config.json, as in `with_overrides`.

    Raises:
        CheckpointError: as in `read_facts`.
    """
    config = _open_config(folder_of(folder), hf_overrides)
    if model_impl == "transformers":
        from moeserve.models.transformers_model import family_of

        family = family_of(config.architecture())
    else:
        family = _find_family(config)
    is_said_to_be_tied = config.values.get(TIED) is True
    config = config.text_part().with_defaults(defaults_of(family.model_type))
    weight_format = read_weight_format(config)
    if model_impl == "transformers" and weight_format.stored_as is not None:
        raise config.wrong("quantization_config", "cannot be read with model_impl='transformers'; use plain weights")
    if weight_format.is_gguf:
        family = with_gguf_names(family)
    model, has_stored_head = family.read(config), False
    # compressed-tensors configs name modules by patterns that may not match the tensors' names, so check the tensors.
    if weight_format.is_mxfp4 and weight_format.method == "compressed-tensors":
        is_mxfp4 = are_in_mxfp4(config.path.parent, weight_format, family, model.num_decoder_layers)
        weight_format = replace(weight_format, is_mxfp4=is_mxfp4)
    if model_impl != "transformers" and (model.tie_word_embeddings or is_said_to_be_tied):
        is_tied = stored_head_is_tied(config.path.parent, weight_format, family)
        if is_tied is not None:
            has_stored_head = model.tie_word_embeddings and not is_tied
            model = replace(model, tie_word_embeddings=is_tied)
    return Description(
        family=family,
        model=model,
        # transformers defaults to float32; models with quantised weights were trained in bfloat16 (gpt-oss).
        dtype=config.dtype(default="bfloat16" if weight_format.stored_as else "float32"),
        weight_format=weight_format,
        has_stored_head=has_stored_head,
    )


def _find_family(config: ConfigValues) -> Family:
    """Return the family of a checkpoint, by its architectures or by the type of its language model."""
    names = config.architectures()
    # The config may name a class without a head although the checkpoint has a head. If there is no head, loading fails.
    with_heads = [name.removesuffix("Model") + end for end in HEADS for name in names if name.endswith("Model")]
    if (found := next((name for name in (*names, *with_heads) if name in FAMILIES), None)) is not None:
        return FAMILIES[found]
    text = config.text_part()
    family = FAMILIES_BY_TYPE.get(str(text.values.get("model_type")))
    if family is not None and text is not config:
        return inside_other_model(family)
    if family is not None and not names:
        return family
    raise unsupported(config, config.architecture(), FAMILIES)


def read_generation_defaults(folder: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> GenerationDefaults:
    """Read sampling defaults and end-of-sequence ids from generation_config.json, or else the ids from config.json."""
    folder = Path(folder)
    path = folder / "generation_config.json"
    generation = read_json(path) if os.path.lexists(path) else {}  # a dangling link is an error
    has_ids = "eos_token_id" in generation
    source = ConfigValues(path, generation) if has_ids else ConfigValues.of_folder(folder, hf_overrides).text_part()
    eos_token_ids = source.token_ids("eos_token_id")
    given = {name: generation[name] for name in _SAMPLING_NAMES if generation.get(name) is not None}
    sampling = {_SAMPLING_NAMES[name]: value for name, value in given.items()}
    if generation.get("do_sample") is False:
        sampling |= {"temperature": 0.0}
    return GenerationDefaults(eos_token_ids, sampling)


# Sampling defaults that are read: transformers' name and the name in SamplingParams.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def folder_of(model: str | Path) -> Path:
    """Return the folder of a checkpoint. For a GGUF file, return the cache folder that represents it."""
    if Path(model).suffix != ".gguf":
        return Path(model)
    from moeserve.models.gguf.checkpoint import checkpoint_folder

    return checkpoint_folder(Path(model))


def _open_config(folder: Path, hf_overrides: Mapping[str, Any] | None) -> ConfigValues:
    if not os.path.isdir(folder):  # False also for names that are invalid in any file system
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise CheckpointError(
            f"{folder} {what}; give the folder that holds the checkpoint's config.json, a GGUF file, or "
            "OWNER/NAME of a repository in a hub"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json; give the folder of a checkpoint in Hugging Face layout")
    return ConfigValues.of_folder(folder, hf_overrides)
