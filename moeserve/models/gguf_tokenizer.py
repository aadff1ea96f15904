"""Build a tokenizer in Hugging Face layout from the metadata of a GGUF file.

transformers converts GGUF tokenizers too, but to other ids: it does not split digits for SmolLM2, does not normalise
text for Qwen 2, and merges differently for Llama 3 and SentencePiece vocabularies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from moeserve.errors import CheckpointError

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

WORD_BOUNDARY = "\u2581"  # SentencePiece writes a space as this

# The split that OpenAI published for cl100k_base; Llama 3 and Qwen 2 differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _ByteLevel:
    """How a byte-level vocabulary splits text before merging."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word in the vocabulary is one token, even if the merges split it
    adds_bos: bool = False  # default, if the file does not set it


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# No space is put before the first word: these vocabularies have separate tokens for words after a space.
_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3 = _ByteLevel(_split_by(_SPLIT % "{1,3}"), ignore_merges=True, adds_bos=True)

# tokenizer.ggml.pre
_BYTE_LEVEL = {
    "gpt-2": _ByteLevel(_GPT2_SPLIT),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _ByteLevel(_split_by(_SPLIT % ""), normalizer=normalizers.NFC()),
    "smollm": _ByteLevel(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT])),
}


def write_tokenizer(source: Path, metadata: dict[str, Any], folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, or nothing if the file has no vocabulary.

    Args:
        source: the GGUF file, for error messages.
        metadata: its `tokenizer.*` values, without that prefix.
        max_length: the longest context of the model, in tokens.

    Raises:
        CheckpointError: an unsupported kind of tokenizer, or values that contradict each other.
    """
    vocabulary = _Vocabulary(source, metadata)
    match metadata.get("ggml.model"):
        case None | "none" | "no_vocab":
            return
        case "gpt2":
            tokenizer, adds_bos = _byte_level(vocabulary)
        case "llama":
            tokenizer, adds_bos = _sentence_piece(vocabulary)
        case other:
            raise CheckpointError(f"{source}: tokenizer.ggml.model={other!r} is not supported; supported: gpt2, llama")

    # Added tokens are matched in the original text, before it is normalised and split.
    for token_type in (CONTROL, USER_DEFINED):
        is_special = token_type == CONTROL
        added = [AddedToken(token, normalized=False, special=is_special) for token in vocabulary.of_type(token_type)]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)

    bos, eos = vocabulary.token_at("bos_token_id"), vocabulary.token_at("eos_token_id")
    before = [bos] if bos is not None and metadata.get("ggml.add_bos_token", adds_bos) else []
    after = [eos] if eos is not None and metadata.get("ggml.add_eos_token", False) else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocabulary.id_of_token[token]) for token in {*before, *after}],
        )

    chat_template = metadata.get("chat_template")
    if chat_template is not None and not isinstance(chat_template, str):
        raise CheckpointError(f"{source}: tokenizer.chat_template={chat_template!r:.100} must be a string")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": vocabulary.token_at("unknown_token_id"),
        "pad_token": vocabulary.token_at("padding_token_id"),
        "chat_template": chat_template,
    }
    config = {key: value for key, value in config.items() if value is not None}
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


class _Vocabulary:
    """The token lists of a GGUF file, checked against each other."""

    def __init__(self, source: Path, metadata: dict[str, Any]) -> None:
        self.source = source
        self.metadata = metadata
        self.tokens: list[str] = self.read_list("ggml.tokens", str)
        self.id_of_token = {token: token_id for token_id, token in enumerate(self.tokens)}
        self.types: list[int] = self.read_list("ggml.token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.id_of_token) != len(self.tokens):
            raise CheckpointError(f"{source}: tokenizer.ggml.tokens lists the same token more than once")
        if len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"{source}: tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens"
            )

    def read_list(self, key: str, kind: type) -> list[Any]:
        values = self.metadata.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise CheckpointError(f"{self.source}: tokenizer.{key} must be a list of {kind.__name__}")
        return values

    def of_type(self, token_type: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind == token_type]

    def token_at(self, key: str) -> str | None:
        token_id = self.metadata.get(f"ggml.{key}")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"{self.source}: tokenizer.ggml.{key}={token_id!r} is not one of the {len(self.tokens)} tokens"
            )
        return self.tokens[token_id]


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer (GPT-2), and True if it adds bos by default."""
    kind = vocabulary.metadata.get("ggml.pre")
    if not isinstance(kind, str) or kind not in _BYTE_LEVEL:
        raise CheckpointError(
            f"{vocabulary.source}: tokenizer.ggml.pre={kind!r} is not supported; supported: {', '.join(_BYTE_LEVEL)}"
        )
    byte_level = _BYTE_LEVEL[kind]
    merges = []
    for merge in vocabulary.read_list("ggml.merges", str):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.id_of_token.keys():
            raise CheckpointError(
                f"{vocabulary.source}: tokenizer.ggml.merges joins {merge!r}, which is not in the vocabulary"
            )
        merges.append((left, right))

    tokenizer = Tokenizer(BPE(vocabulary.id_of_token, merges, ignore_merges=byte_level.ignore_merges))
    if byte_level.normalizer is not None:
        tokenizer.normalizer = byte_level.normalizer
    tokenizer.pre_tokenizer = byte_level.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, byte_level.adds_bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer, and True since it adds bos by default.

    Pieces merge in the order of their scores. A character without a piece becomes byte tokens.
    """
    scores = vocabulary.read_list("ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.source}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    tokenizer = Tokenizer(
        BPE(
            vocabulary.id_of_token,
            _merges_from_scores(vocabulary, scores),
            unk_token=next(iter(vocabulary.of_type(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces_to_boundaries = normalizers.Replace(" ", WORD_BOUNDARY)
    boundaries_to_spaces = [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.get("ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_BOUNDARY), spaces_to_boundaries])
        tokenizer.decoder = decoders.Sequence([*boundaries_to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces_to_boundaries
        tokenizer.decoder = decoders.Sequence(boundaries_to_spaces)
    return tokenizer, True


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return each way to join two pieces into a third, in the order of the third's score, highest first.

    Only normal pieces take part: the others are matched whole in the text, or stand for one byte.
    """
    score_of_piece = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == NORMAL
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(score_of_piece, key=lambda piece: -score_of_piece[piece])  # stable: ties go to the lower id
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in score_of_piece and piece[cut:] in score_of_piece
    ]
