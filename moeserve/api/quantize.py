"""Quantisation of a checkpoint to 4 bits. An error in a weight counts more the larger its input is in sample texts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from moeserve.api.llm import LLM
from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.errors import CheckpointError, SettingsError
from moeserve.models import registry
from moeserve.models.checkpoint.block_tensors import METHOD
from moeserve.models.checkpoint.model_files import TOKENIZER_FILES, find_model
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packing import weights_of
from moeserve.models.checkpoint.quantized_copy import quantized_tensors
from moeserve.models.checkpoint.shard_writer import all_or_nothing, check_unused, write_json, write_shards
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.config_values import ConfigValues, read_json
from moeserve.models.decoder import Decoder
from moeserve.models.registry import Description
from moeserve.models.summary import cpu_model
from moeserve.models.weight_mapping import destinations
from moeserve.ops.native import native_kernels
from moeserve.progress import progress_bar
from moeserve.sampling_params import SamplingParams
from moeserve.worker import importances
from moeserve.worker.loading import load_model
from moeserve.worker.texts import hidden_states

NUM_TOKENS = 32_768
TEXT_TOKENS = 512  # tokens of a single text
MIN_TOKENS = 16
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json")


def quantize(
    name: str | Path,
    out: Path,
    *,
    text: Path | None = None,
    num_tokens: int = NUM_TOKENS,
    revision: str | None = None,
    download_dir: str | None = None,
    show_progress: bool = True,
) -> None:
    """Write a copy of a checkpoint in the formats of `quantization="int4"`, which `LLM` loads without a setting.

    Quantisation minimises the errors of weights, weighted by the importances of the weights' inputs in texts. The
    folder is written under a temporary name and then renamed, so `out` never holds a part of the copy.

    Args:
        name: a folder in Hugging Face layout, or OWNER/NAME in a hub.
        out: the folder to write; it must be empty or not exist.
        text: a file with text; None: the model writes the texts itself.
        num_tokens: tokens of the texts, at least `MIN_TOKENS`.
        revision, download_dir: as for `find_model`.

    Raises:
        SettingsError: an argument is out of range, or the C++ kernels are missing.
        CheckpointError: the model is stored in GGUF, damaged or not supported, or `out` cannot be written.
    """
    out = Path(os.path.abspath(out))
    check_unused(out)
    if num_tokens < MIN_TOKENS:
        raise SettingsError(f"num_tokens={num_tokens} must be at least {MIN_TOKENS}")
    if text is not None and not text.is_file():
        raise SettingsError(f"text={str(text)!r} is not a file; leave it out, and the model writes the texts itself")
    folder = find_model(name, revision=revision, download_dir=download_dir).fetch(shows_progress=show_progress)
    description = registry.describe(folder)
    if description.weight_format.is_gguf or description.weight_format.has_blocks:
        raise CheckpointError(
            f"{folder} is quantised already; give the checkpoint from which it was made, in safetensors"
        )
    config, texts = _texts(folder, text, num_tokens, show_progress=show_progress)
    model = load_model(config, groups_of_one_rank(), show_progress=show_progress).model
    assert isinstance(model, Decoder), "int4 was refused for models of transformers"
    measured = importances.measure(model, hidden_states(model, config, texts))
    del model  # its memory is needed
    write_copy(description, config, measured, out, show_progress=show_progress)


def write_copy(
    description: Description,
    config: EngineConfig,
    measured: Mapping[str, Tensor],
    out: Path,
    *,
    show_progress: bool = True,
) -> None:
    """Write the quantised copy of a checkpoint.

    Args:
        config: the settings with which the checkpoint is loaded, with `quantization="int4"`.
        measured: importances [experts, inputs] of the inputs of weights, by module name. All inputs of a weight without
            an entry are equally important.

    Raises:
        CheckpointError: the checkpoint is damaged, or `out` cannot be written.
    """
    folder = Path(config.weights.model_path)
    try:
        with all_or_nothing(out) as partial, progress_bar("quantize", total=None, is_shown=show_progress) as progress:
            for path in {path for pattern in COPIED_FILES for path in folder.glob(pattern)}:
                (partial / path.relative_to(folder)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, partial / path.relative_to(folder))
            write_shards(partial, _tensors(folder, description, config, measured), progress)
            values = read_json(folder / "config.json") | {"quantization_config": {"quant_method": METHOD}}
            write_json(partial / "config.json", values)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"writing {out} failed: {error}") from error


def _texts(
    folder: Path, text: Path | None, num_tokens: int, *, show_progress: bool
) -> tuple[EngineConfig, list[list[int]]]:
    """Return the settings of the quantised model, and texts as token ids."""
    with LLM(folder, quantization="int4", show_progress=show_progress) as llm:
        size = min(TEXT_TOKENS, llm.config.schedule.max_model_len, num_tokens)
        num_texts = -(-num_tokens // size)
        if text is None:
            params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=size - 1, seed=0, ignore_eos=True)
            first = [_first_token(folder)]
            results = llm.generate(prompt_token_ids=[first] * num_texts, sampling_params=params, use_tqdm=show_progress)
            return llm.config, [[*first, *result.outputs[0].token_ids] for result in results]
        ids = llm.get_tokenizer().encode(text.read_text(encoding="utf-8"))[:num_tokens]
        if len(ids) < MIN_TOKENS:
            raise SettingsError(f"text={str(text)!r} has {len(ids)} tokens; it needs at least {MIN_TOKENS}")
        return llm.config, [ids[start : start + size] for start in range(0, len(ids), size)]


def _first_token(folder: Path) -> int:
    """Return the token with which texts begin, or else a token with which texts end, or else 0."""
    config = ConfigValues.of_folder(folder).text_part()
    ids = [*config.token_ids("bos_token_id"), *registry.read_generation_defaults(folder).eos_token_ids]
    return ids[0] if ids else 0


def _tensors(
    folder: Path, description: Description, config: EngineConfig, measured: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    model = cpu_model(description, config.weights.dtype, "int4")
    stored = open_checkpoint(folder, description.weight_format)
    checkpoint = translated(stored, description.family, description.model.num_decoder_layers)
    into = destinations(model, description.family.norm_offset, checkpoint.shapes).into
    modules = weights_of(model)
    of_weights = {modules[name]: values for name, values in measured.items()}
    native = native_kernels()
    assert native is not None, "int4 was refused without kernels"
    yield from quantized_tensors(checkpoint, into, of_weights, native, getattr(torch, config.weights.dtype))
