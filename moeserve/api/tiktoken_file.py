"""Makes a tokenizer of a checkpoint whose only vocabulary is a tiktoken file, as Moonshot publishes Kimi and Moonlight.

Such a file holds the bytes and the rank of every token, and not how text is cut into words: that is in Python code
beside it, which is never run. What the code does is known here, by the name of its module. Knows no requests and no
tensors.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from moeserve.api.byte_alphabet import character_of_byte
from moeserve.errors import CheckpointError, shown
from moeserve.models.config_json import read_json

FILE_NAME = "tiktoken.model"
MAX_FILE_BYTES = 32 * 1024 * 1024  # Kimi's has 2.8 million
MAX_TOKEN_BYTES = 1024
MAX_TEMPLATE_BYTES = 4 * 1024 * 1024

# Moonshot's split: runs of Han characters, words of other letters with their ending, digits by three, the rest.
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
# The module of Python code that a checkpoint names for its tokenizer, and the split that is in it.
SPLIT_OF_MODULE = {"tokenization_kimi": MOONSHOT_SPLIT, "tokenization_moonshot": MOONSHOT_SPLIT}
NUM_SPECIAL_TOKENS = 256  # ids behind the ranks; those that the config does not name are reserved

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tiktoken(folder: Path) -> Any | None:
    """The tokenizer of a folder with tiktoken.model, or None when it is not known how that cuts text.

    Returns:
        A PreTrainedTokenizerFast that gives the tokens of the `tiktoken` library with the published split. (The
        published code also cuts text without any white space every 25,000 characters, which spares that library's
        stack; here such text is one piece.) Ids behind the ranks are tokens in a text wherever they are spelled out;
        special are those that tokenizer_config.json says are special, as published.

    Raises:
        CheckpointError: a file is damaged, or the config names tokens that do not fit the vocabulary.
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
    names = _named_tokens(config_path, config)
    tokens = _added_tokens(config_path, config, frozenset(names.values()), len(ranks))
    template = _chat_template(folder, config_path, config)

    backend = _byte_level_bpe(ranks, split)
    backend.add_tokens(tokens)
    for place, token in enumerate(tokens):
        if backend.token_to_id(token.content) != len(ranks) + place:
            raise CheckpointError(
                f"{path} has {token.content!r} as an ordinary token too, with rank "
                f"{backend.token_to_id(token.content)}, where {config_path} has it as token {len(ranks) + place}; "
                "copy both files again from where the checkpoint came from"
            )

    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.name_or_path = str(folder)  # given above, transformers would ask its hub about a model of this name
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a tiktoken file and their ranks, which are their ids: 0, 1, ... without a gap, in any order.

    Each line has the bytes of one token, in base64, and its rank.

    Raises:
        CheckpointError: with the line that is wrong.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CheckpointError(f"{path} is {size} bytes, too large for a vocabulary; at most {MAX_FILE_BYTES} are read")
    lines = [(number, line) for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line]
    ranks: dict[bytes, int] = {}
    line_of_rank = [0] * len(lines)
    for number, line in lines:
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            raise _damaged(path, number, f"is {shown(line)}, which is not a token in base64 and its rank")
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise _damaged(path, number, f"has {shown(fields[0])}, which is not base64 ({error})") from None
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:  # Python 3.10 reads '==' as no bytes
            raise _damaged(path, number, f"has a token of {len(token)} bytes; it must be 1 to {MAX_TOKEN_BYTES}")
        if len(fields[1]) > 9 or int(fields[1]) >= len(lines):
            what = f"has rank {fields[1].decode():.20}, but the file has {len(lines)} tokens, ranked from 0"
            raise _damaged(path, number, what)
        rank = int(fields[1])
        if line_of_rank[rank]:
            raise _damaged(path, number, f"has rank {rank}, which line {line_of_rank[rank]} has too")
        if token in ranks:
            raise _damaged(path, number, f"has {shown(token)}, which line {line_of_rank[ranks[token]]} has too")
        line_of_rank[rank] = number
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path} has no token for the byte 0x{missing[0]:02X}, and {len(missing)} of 256 bytes are missing; "
            "copy the file again from where the checkpoint came from"
        )
    return ranks


def _damaged(path: Path, line_number: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: line {line_number} {what}; copy the file again from where the checkpoint came from"
    )


def _byte_level_bpe(ranks: dict[bytes, int], split: str) -> Tokenizer:
    """A tokenizer with the tokens of tiktoken.

    tiktoken looks a word up as a whole, and else joins, again and again, the two neighbours that make the token of
    lowest rank. Here neighbours are joined that stand in a list, first in the list first: every cut of every token in
    two tokens, by the rank of the whole. That one token has several cuts makes no difference: what happens within its
    bytes before they are one token is the same in any text, so only one of the cuts can ever come up.
    """
    characters = character_of_byte()
    vocabulary = {token.decode("latin-1").translate(characters): rank for token, rank in ranks.items()}
    merges = [
        (token[:place], token[place:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _code_module(config: dict[str, Any]) -> str:
    """The module that auto_map names for the tokenizer, such as tokenization_kimi; empty where there is none."""
    auto_map = config.get("auto_map")
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    classes = entry if isinstance(entry, list) else [entry]
    reference = next((name for name in classes if isinstance(name, str)), "")
    return reference.rpartition("--")[2].partition(".")[0]  # owner/repository--module.Class


def _named_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, those that the config has."""
    names = {}
    for key in NAMED_TOKENS:
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str):
            raise CheckpointError(f"{path}: {key}={shown(value)} must be the text of a token")
        names[key] = content
    return names


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can spell."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _added_tokens(path: Path, config: dict[str, Any], named_tokens: frozenset[str], num_ranks: int) -> list[AddedToken]:
    """The tokens behind the ranks, in order of their ids."""
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder={shown(entries)} must map token ids to tokens")
    last_id = num_ranks + NUM_SPECIAL_TOKENS - 1
    contents = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(num_ranks, last_id + 1)}
    special_ids = set()
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or not _is_unicode(content):
            raise CheckpointError(f"{path}: added_tokens_decoder[{key!r:.60}]={shown(entry)} has no content")
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else -1
        if token_id not in contents:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has {shown(content)} with id {key:.60}, but {FILE_NAME} has {num_ranks} "
                f"tokens, so ids from {num_ranks} to {last_id} are expected; one of the files is incomplete or of "
                "another checkpoint: copy both again from where the checkpoint came from"
            )
        contents[token_id] = content
        if entry.get("special") is True or content in named_tokens:
            special_ids.add(token_id)

    id_of_content: dict[str, int] = {}
    for token_id, content in contents.items():
        if content in id_of_content:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has {shown(content)} with two ids, {id_of_content[content]} and "
                f"{token_id}; copy the file again from where the checkpoint came from"
            )
        id_of_content[content] = token_id
    for content in named_tokens - id_of_content.keys():
        raise CheckpointError(
            f"{path} names the token {shown(content)}, which is not in its added_tokens_decoder; "
            "copy the file again from where the checkpoint came from"
        )
    return [
        AddedToken(content, special=token_id in special_ids, normalized=False) for token_id, content in contents.items()
    ]


def _chat_template(folder: Path, config_path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """From chat_template.jinja, or else from the config: one template, or several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        size = path.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} is {size} bytes; a template of at most {MAX_TEMPLATE_BYTES} is read")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path} is not UTF-8 text ({error}); copy the file again from where the checkpoint came from"
            ) from None
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [template]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{config_path}: chat_template={shown(template)} must be a text, or a list of "
                '{"name": ..., "template": ...}'
            )
        named[name] = text
    return named
