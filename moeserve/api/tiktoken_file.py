"""Load the tokenizer of a checkpoint whose only vocabulary is a tiktoken file (Kimi and Moonlight).

A tiktoken file holds the bytes and the rank of every token, but not how text is split into words before tokens are
merged. Published checkpoints define the split in Python code beside the file. That code is never run: the splits of the
published modules are listed here by module name.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from moeserve.errors import CheckpointError, shown
from moeserve.models.config_values import read_json

FILE_NAME = "tiktoken.model"
MAX_FILE_BYTES = 32 * 1024 * 1024  # Kimi's file has 2.8 million bytes
MAX_TOKEN_BYTES = 1024
COPY_AGAIN = "copy the file again from where the checkpoint came from"

# Moonshot's split: runs of Han characters, words of other letters with their contractions, digits by three, the rest.
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
# The Python module that a checkpoint names for its tokenizer, and the split that this module uses.
SPLIT_OF_MODULE = {"tokenization_kimi": MOONSHOT_SPLIT, "tokenization_moonshot": MOONSHOT_SPLIT}
NUM_SPECIAL_TOKENS = 256  # ids that follow the ranks; those that the config does not name are reserved

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tiktoken(folder: Path) -> Any | None:
    """Return the tokenizer of a folder with tiktoken.model, or None when its split is not known.

    The result is a PreTrainedTokenizerFast with the ids of the `tiktoken` library under the published split. (The
    published code also cuts text without white space every 25,000 characters, to spare that library's stack; here
    such text is one piece.) Tokens that follow the ranks are matched wherever a text spells them; those that
    tokenizer_config.json marks as special are special.

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
    named = _named_tokens(config_path, config)
    added = _added_tokens(config_path, config, frozenset(named.values()), len(ranks))

    from transformers import PreTrainedTokenizerFast  # takes seconds to import
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(vocab_file=str(path), pattern=split)
    # The reader of the tiktoken library caches files by path, so it would miss that a file was replaced.
    vars(converter)["load_tiktoken_bpe"] = lambda _: ranks
    backend = converter.converted()
    backend.add_tokens(added)
    for token_id, token in enumerate(added, start=len(ranks)):
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path} has {token.content!r} as an ordinary token too, with rank "
                f"{backend.token_to_id(token.content)}, but {config_path} has it as token {token_id}; {COPY_AGAIN}"
            )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(folder, config_path, config),
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.name_or_path = str(folder)  # set later: as an argument it would make transformers query its hub
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the tokens of a tiktoken file with their ranks, which are their ids: each of 0, 1, ... once, in any order.

    Raises:
        CheckpointError: the file is too large, or a line is damaged; the message names the line.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CheckpointError(f"{path} is {size} bytes, too large for a vocabulary; at most {MAX_FILE_BYTES} are read")
    lines = [(number, line) for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line]
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in lines:
        where = f"{path}: line {number}"
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            raise CheckpointError(f"{where} is {shown(line)}, not a token in base64 and its rank; {COPY_AGAIN}")
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise CheckpointError(
                f"{where} has {shown(fields[0])}, which is not base64 ({error}); {COPY_AGAIN}"
            ) from None
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:  # Python 3.10 reads '==' as no bytes
            raise CheckpointError(
                f"{where} has a token of {len(token)} bytes; it must have 1 to {MAX_TOKEN_BYTES}; {COPY_AGAIN}"
            )
        rank = int(fields[1][:10])  # ten digits are out of range in any file
        if rank >= len(lines):
            raise CheckpointError(f"{where} has rank {rank}, but the file has {len(lines)} tokens; {COPY_AGAIN}")
        duplicate = line_of_rank.get(rank) or line_of_rank.get(ranks.get(token, -1))
        if duplicate is not None:
            raise CheckpointError(f"{where} repeats the token or the rank of line {duplicate}; {COPY_AGAIN}")
        line_of_rank[rank] = number
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the 256 one-byte tokens, such as 0x{missing[0]:02X}; {COPY_AGAIN}"
        )
    return ranks


def _code_module(config: dict[str, Any]) -> str:
    """Return the module that auto_map names for the tokenizer, such as tokenization_kimi; "" if it names none."""
    auto_map = config.get("auto_map")
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    classes = entry if isinstance(entry, list) else [entry]
    reference = next((name for name in classes if isinstance(name, str)), "")
    return reference.rpartition("--")[2].partition(".")[0]  # owner/repository--module.Class


def _named_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token and the like, as far as the config has them."""
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


def _added_tokens(path: Path, config: dict[str, Any], named_tokens: frozenset[str], num_ranks: int) -> list[AddedToken]:
    """Return the tokens that follow the ranks, in the order of their ids."""
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder={shown(entries)} must map token ids to tokens")
    last_id = num_ranks + NUM_SPECIAL_TOKENS - 1
    contents = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(num_ranks, last_id + 1)}
    special = set(named_tokens)
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or not _is_unicode(content):
            raise CheckpointError(f"{path}: added_tokens_decoder[{key!r:.60}]={shown(entry)} has no content")
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else -1
        if token_id not in contents:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has {shown(content)} with id {key:.60}, but {FILE_NAME} has {num_ranks} "
                f"tokens, so ids from {num_ranks} to {last_id} are expected. One of the files is incomplete or belongs "
                "to another checkpoint: copy both again from where the checkpoint came from"
            )
        contents[token_id] = content
        if entry.get("special") is True:
            special.add(content)

    id_of_content: dict[str, int] = {}
    for token_id, content in contents.items():
        if id_of_content.setdefault(content, token_id) != token_id:
            raise CheckpointError(
                f"{path}: added_tokens_decoder has {shown(content)} with two ids, {id_of_content[content]} and "
                f"{token_id}; {COPY_AGAIN}"
            )
    for content in named_tokens - id_of_content.keys():
        raise CheckpointError(
            f"{path} names the token {shown(content)}, which is not in its added_tokens_decoder; {COPY_AGAIN}"
        )
    return [AddedToken(content, special=content in special, normalized=False) for content in contents.values()]


def _is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which JSON can spell."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _chat_template(folder: Path, config_path: Path, config: dict[str, Any]) -> Any:
    """Return the template in chat_template.jinja, or else that of the config: one text, or several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text ({error}); {COPY_AGAIN}") from None
    template = config.get("chat_template")
    entries = template if isinstance(template, list) else []
    is_list = bool(entries) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in entries
    )
    if template is not None and not isinstance(template, str) and not is_list:
        raise CheckpointError(
            f"{config_path}: chat_template={shown(template)} must be a text, or a list of "
            '{"name": ..., "template": ...}'
        )
    return template
