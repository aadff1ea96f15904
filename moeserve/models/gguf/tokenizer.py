"""Conversion of a tokenizer in the metadata of a GGUF file to Hugging Face layout.

transformers converts GGUF tokenizers too, but the results differ from the original tokenizers: it does not split digits
for SmolLM2, does not normalise text for Qwen 2, and merges differently for Llama 3 and SentencePiece vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from moeserve.errors import CheckpointError
from moeserve.models.gguf.splits import SPLITS, Split

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

WORD_BOUNDARY = "\u2581"  # SentencePiece replaces a space by this character


def write_tokenizer(source: Path, metadata: Mapping[str, Any], folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, or nothing if the file has no vocabulary.

    Args:
        source: the GGUF file, for error messages.
        metadata: the file's `tokenizer.*` values, keyed without this prefix.
        max_length: maximum context length of the model in tokens.

    Raises:
        CheckpointError: the kind of tokenizer is not supported, or values contradict each other.
    """
    if metadata.get("ggml.model") in (None, "none", "no_vocab"):
        return
    try:
        tokenizer, config = _convert(source, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # lists of a wrong type or length and ids outside the vocabulary raise various types
        raise CheckpointError(f"{source}: the values under tokenizer.ggml contradict each other: {error!r}") from error
    # `Tokenizer.save` would raise a bare Exception if the disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    config = {key: value for key, value in config.items() if value is not None}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _convert(source: Path, metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and the entries of its tokenizer_config.json."""
    tokens = _without_duplicates(metadata["ggml.tokens"])
    id_of_token = {token: token_id for token_id, token in enumerate(tokens)}
    types = metadata.get("ggml.token_type") or [NORMAL] * len(tokens)
    type_of_token = dict(zip(tokens, types, strict=True))
    name = metadata.get("ggml.pre", "default")
    if metadata["ggml.model"] == "llama":
        tokenizer, adds_bos = _sentence_piece(metadata, type_of_token), True
    elif metadata["ggml.model"] == "gpt2" and name in SPLITS:
        split = SPLITS[name]
        tokenizer, adds_bos = _byte_level(metadata, id_of_token, split), split.adds_bos
    else:
        kinds = [f"{key}={metadata.get(key)!r}" for key in ("ggml.model", "ggml.pre")]
        raise CheckpointError(f"{source}: tokenizer.{kinds[0]} with tokenizer.{kinds[1]} is not supported")

    # Added tokens are matched in the original text, before it is normalised and split.
    for token_type in (CONTROL, USER_DEFINED):
        is_special = token_type == CONTROL
        chosen = [token for token, kind in type_of_token.items() if kind == token_type]
        added = [AddedToken(token, normalized=False, special=is_special) for token in chosen]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)

    special = {
        name: tokens[token_id] if 0 <= (token_id := metadata.get(f"ggml.{key}_token_id", -1)) < len(tokens) else None
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    bos, eos = special["bos"], special["eos"]
    before = [bos] if bos is not None and metadata.get("ggml.add_bos_token", adds_bos) else []
    after = [eos] if eos is not None and metadata.get("ggml.add_eos_token", False) else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, id_of_token[token]) for token in {*before, *after}],
        )
    return tokenizer, {
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        "chat_template": _chat_templates(metadata),
        **{f"{name}_token": token for name, token in special.items()},
    }


def _chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template, or a list of named templates in the form of tokenizer_config.json."""
    prefix, default = "chat_template.", metadata.get("chat_template")
    named = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    if not named:
        return default
    named |= {} if default is None else {"default": default}
    return [{"name": name, "template": template} for name, template in named.items()]


def _without_duplicates(tokens: list[str]) -> list[str]:
    """Return tokens without duplicates. A later duplicate is replaced by a text that does not occur in prompts."""
    first_ids: dict[str, int] = {}
    return [
        token if first_ids.setdefault(token, token_id) == token_id else f"\ue000{token_id}"
        for token_id, token in enumerate(tokens)
    ]


def _byte_level(metadata: Mapping[str, Any], id_of_token: dict[str, int], split: Split) -> Tokenizer:
    """Return a byte-level BPE tokenizer (GPT-2)."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["ggml.merges"]]
    tokenizer = Tokenizer(BPE(id_of_token, merges, ignore_merges=split.ignore_merges))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], type_of_token: dict[str, int]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer, which merges pieces in the order of their scores.

    A character without a piece is split into byte tokens.
    """
    tokenizer = Tokenizer(
        BPE(
            {token: token_id for token_id, token in enumerate(type_of_token)},
            _merges_from_scores(type_of_token, metadata["ggml.scores"]),
            unk_token=next((token for token, kind in type_of_token.items() if kind == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces_to_boundaries = normalizers.Replace(" ", WORD_BOUNDARY)
    boundaries_to_spaces = [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_BOUNDARY), spaces_to_boundaries])
        tokenizer.decoder = decoders.Sequence([*boundaries_to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces_to_boundaries
        tokenizer.decoder = decoders.Sequence(boundaries_to_spaces)
    return tokenizer


def _merges_from_scores(type_of_token: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, ordered by this piece's score, highest first.

    Only normal pieces are merged. Other pieces are matched as a whole in the text, or represent one byte.
    """
    score_of_piece = {
        token: score for (token, kind), score in zip(type_of_token.items(), scores, strict=True) if kind == NORMAL
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(score_of_piece, key=lambda piece: -score_of_piece[piece])  # stable: ties go to the lower id
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in score_of_piece and piece[cut:] in score_of_piece
    ]
