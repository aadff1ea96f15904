"""Which architectures are served, and by which family. Reads config.json and generation_config.json, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.config import CheckpointFacts, EngineConfig
from moeserve.errors import CheckpointError
from moeserve.models.config_json import ConfigJson, read_json
from moeserve.models.mixtral import Mixtral, MixtralConfig

# A new family is one file and one line here.
FAMILIES = {
    "MixtralForCausalLM": (MixtralConfig, Mixtral),
}


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
    config = _open_config(Path(folder))
    model_config = _family(config)[0].from_json(config)
    return CheckpointFacts(
        path=str(folder),
        dtype=config.dtype(),
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
    )


def build(engine: EngineConfig) -> Mixtral:
    """The model of a checkpoint, its weights not yet filled."""
    config = _open_config(Path(engine.model_path))
    config_class, model_class = _family(config)
    return model_class(config_class.from_json(config), engine)


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


def _open_config(folder: Path) -> ConfigJson:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds the checkpoint's config.json")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json, so it is not a checkpoint in Hugging Face layout")
    return ConfigJson(folder)


def _family(config: ConfigJson) -> tuple[type[MixtralConfig], type[Mixtral]]:
    architecture = config.architecture()
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{config.path}: architecture {architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    if config.values.get("quantization_config") is not None:
        raise config.wrong("quantization_config", "is not supported; give a float32, bfloat16 or float16 checkpoint")
    return FAMILIES[architecture]
