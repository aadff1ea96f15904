"""Tokenizers of checkpoints whose only vocabulary is a tiktoken file (Kimi and Moonlight).

A tiktoken file holds the bytes and the rank of every token, but not the rule that splits text into words before tokens
are merged. Published checkpoints define this split in Python code, which moeserve never runs. This module has the
splits of published Python modules, by module name.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from moeserve.errors import CheckpointError, SettingsError, missing_extra, shown
from moeserve.models.config_values import read_json

FILE_NAME = "tiktoken.model"

# Moonshot's split: runs of Han characters, words of other letters with contractions, up to three digits, other text.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
MOONSHOT_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# The Python modules that checkpoints name for their tokenizers, and the splits in these modules.
SPLIT_OF_MODULE = {"tokenization_kimi": MOONSHOT_SPLIT, "tokenization_moonshot": MOONSHOT_SPLIT}
NUM_SPECIAL_TOKENS = 256  # number of ids after the ranks; ids that the config does not name are reserved

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tiktoken(folder: Path) -> Any | None:
    """Return the tokenizer of a folder with tiktoken.model, or None if its split is not known.

    The result is a PreTrainedTokenizerFast that gives the same ids as the `tiktoken` library with the published split.
    There is one exception: the published code also splits text without white space every 25,000 characters, to protect
    the stack of `tiktoken`. Here, such text is not split. Tokens after the ranks are matched anywhere in a text. They
    are special tokens if tokenizer_config.json marks them as special.

    Raises:
        CheckpointError: a file is damaged, or the config names tokens that do not fit the vocabulary.
        SettingsError: transformers is not installed.
    """
    config_path = folder / "tokenizer_config.json"
    if not config_path.is_file():
        return None
    config = read_json(config_path)
    split = SPLIT_OF_MODULE.get(_code_module(config))
    if split is None:
        return None
    path = folder / FILE_NAME
    ranks = read_ranks(path)
    try:
        return _build(folder, config, split, ranks)
    except SettingsError:
        raise
    except Exception as error:  # values of a wrong type and tokens outside the vocabulary raise various exceptions
        raise CheckpointError(
            f"{config_path} does not fit the {len(ranks)} tokens of {path}: {error!r:.200}; copy both files again from "
            "where the checkpoint came from"
        ) from error


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the tokens of a tiktoken file with their ranks, which are also the token ids.

    The ranks are 0, 1, 2, ..., each once, in any order.

    Raises:
        CheckpointError: the file is damaged.
    """
    lines = [line for line in path.read_bytes().splitlines() if line]
    ranks: dict[bytes, int] = {}
    try:
        for line in lines:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise CheckpointError(f"{path}: {shown(line)} is not a token in base64 and its rank ({error})") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise CheckpointError(f"{path} is damaged: it does not hold {len(lines)} tokens with ranks from 0, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks one-byte tokens, such as 0x{missing[0]:02X}")
    return ranks


def _code_module(config: dict[str, Any]) -> str:
    """Return the tokenizer's Python module from auto_map, such as tokenization_kimi; "" if there is none."""
    match config.get("auto_map"):
        case {"AutoTokenizer": str(reference)} | {"AutoTokenizer": [str(reference), *_]}:
            return reference.rpartition("--")[2].partition(".")[0]  # owner/repository--module.Class
    return ""


def _build(folder: Path, config: dict[str, Any], split: str, ranks: dict[bytes, int]) -> Any:
    try:
        from transformers import PreTrainedTokenizerFast  # takes seconds to import
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise missing_extra(f"reading {folder / FILE_NAME} needs transformers", "transformers", error) from None

    named = {
        key: value["content"] if isinstance(value, dict) else value
        for key in NAMED_TOKENS
        if (value := config.get(key)) is not None
    }
    ids = range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS)
    contents = {token_id: f"<|reserved_token_{token_id}|>" for token_id in ids}
    special = set(named.values())
    for key, entry in config.get("added_tokens_decoder", {}).items():
        if int(key) not in ids:
            raise ValueError(f"added_tokens_decoder has token {key}, but ids from {ids[0]} to {ids[-1]} are expected")
        contents[int(key)] = entry["content"]
        if entry.get("special") is True:
            special.add(entry["content"])
    unknown = special - set(contents.values())
    if unknown:
        raise ValueError(f"added_tokens_decoder lacks {sorted(unknown)}")

    converter = TikTokenConverter(vocab_file=str(folder / FILE_NAME), pattern=split)
    # Do not use the tiktoken library's reader: it caches files by path, so it would not notice a replaced file.
    vars(converter)["load_tiktoken_bpe"] = lambda _: ranks
    backend = converter.converted()
    backend.add_tokens([AddedToken(token, special=token in special, normalized=False) for token in contents.values()])
    for token_id, token in contents.items():
        if backend.token_to_id(token) != token_id:
            raise ValueError(f"{token!r} is token {backend.token_to_id(token)} as well as {token_id}")
    template = folder / "chat_template.jinja"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.name_or_path = str(folder)  # set here, because as an argument it would make transformers query its hub
    return tokenizer
