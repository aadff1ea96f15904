"""Which architectures are served, and by which family. Reads config.json and generation_config.json, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.config.resolve import CheckpointFacts
from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError
from moeserve.models.config_values import ConfigValues, read_json
from moeserve.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moeserve.models.family import Family
from moeserve.models.glm4_moe import GLM4_MOE
from moeserve.models.gpt_oss import GPT_OSS
from moeserve.models.mixtral import MIXTRAL
from moeserve.models.model_config import ModelConfig
from moeserve.models.olmoe import OLMOE
from moeserve.models.quantization import WeightFormat, read_weight_format
from moeserve.models.qwen2_moe import QWEN2_MOE
from moeserve.models.qwen3_moe import QWEN3_MOE

# By the name that config.json gives under `architectures`. A new family is one file and one line here.
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": OLMOE,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint, without its weights."""

    architecture: str
    family: Family
    model: ModelConfig
    dtype: DtypeName  # of the weights that are not quantised
    weight_format: WeightFormat


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json says."""

    eos_token_ids: list[int]
    sampling: dict[str, Any]  # arguments for SamplingParams


def read_facts(folder: str | Path) -> CheckpointFacts:
    """What the engine must know of a checkpoint before it loads any of it.

    Raises:
        CheckpointError: no such folder, no config.json, an unsupported architecture, or a config that is wrong.
    """
    description = describe(folder)
    return CheckpointFacts(
        path=str(folder),
        dtype=description.dtype,
        vocab_size=description.model.vocab_size,
        max_position_embeddings=description.model.max_position_embeddings,
        tensor_parallel_sizes=description.model.tensor_parallel_sizes,
        num_sparse_layers=description.model.num_sparse_layers,
        num_experts=description.model.num_experts,
    )


def describe(folder: str | Path) -> Description:
    """What a checkpoint's config.json says of it.

    Raises:
        CheckpointError: see `read_facts`.
    """
    config = _open_config(Path(folder))
    architecture = config.architecture()
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{config.path}: architecture {architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[architecture]
    weight_format = read_weight_format(config)
    return Description(
        architecture=architecture,
        family=family,
        model=family.read(config),
        # transformers takes float32 where nothing is said; what was quantised was trained in bfloat16 (gpt-oss).
        dtype=config.dtype(default="bfloat16" if weight_format.stored_as else "float32"),
        weight_format=weight_format,
    )


def read_generation_defaults(folder: str | Path) -> GenerationDefaults:
    """End-of-sequence ids and sampling defaults, from generation_config.json, else from config.json."""
    folder = Path(folder)
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", read_json(folder / "config.json").get("eos_token_id"))
    eos_token_ids = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    if not all(type(token_id) is int and token_id >= 0 for token_id in eos_token_ids):
        raise CheckpointError(f"{path}: eos_token_id={eos!r:.100} must be a token id or a list of them")

    given = {name: generation[name] for name in _SAMPLING_NAMES if generation.get(name) is not None}
    sampling = {_SAMPLING_NAMES[name]: value for name, value in given.items()}
    if generation.get("do_sample") is False:
        sampling |= {"temperature": 0.0}
    return GenerationDefaults(eos_token_ids, sampling)


# transformers' name of each default that we take over: our name
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _open_config(folder: Path) -> ConfigValues:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give the folder that holds the checkpoint's config.json (nothing is downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json, so it is not a checkpoint in Hugging Face layout")
    return ConfigValues.of_folder(folder)
