"""Tokenizers from tiktoken files, as Kimi and Moonlight are published: ids against the tiktoken library, damaged files.

The reference is the tiktoken library with the published split, on a vocabulary that Mistral publishes.
"""

# ruff: noqa: RUF001  # letters that look like others are what these texts are about

from __future__ import annotations

import base64
import json
import random
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_real_tokenizers import CONVERSATION, TEXTS, loaded

from moeserve.api.tokenizer import TextCodec
from moeserve.errors import CheckpointError

tiktoken = pytest.importorskip("tiktoken", reason="it comes with mistral-common; pip install -e '.[dev]'")

# As Moonshot publishes it, in one piece.
PUBLISHED_SPLIT = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_RANKS = 100_000

# Where Kimi-K2 has its tokens, counted from the end of the ranks, and whether they are special.
NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    17: ("<|im_middle|>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}

TEMPLATE = """
{%- for message in messages -%}
    {%- if loop.first and message.role != "system" -%}
        <|im_system|>system<|im_middle|>You are helpful.<|im_end|>
    {%- endif -%}
    <|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
CHINESE = [
    "月之暗面Kimi是一个MoE模型,参数1万亿。",
    "使用Python3编写def函数(x)，don't返回None；々〆〇 㐀㐁 𠀀𠀁豈",
    "A中B文C a中b文c É中é ǅ中ʰ",
    "1中2文12345678年１２３４ ⅣⅤⅥ ①②③④",
]


@dataclass(frozen=True, repr=False)
class Kimi:
    folder: Path
    codec: TextCodec
    reference: Any  # a tiktoken.Encoding
    tokens: list[bytes]  # by id
    special_ids: frozenset[int]


def write_vocabulary(folder: Path, tokens: list[bytes]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))


def published_config(num_ranks: int, **changes: Any) -> dict[str, Any]:
    """tokenizer_config.json in the form of Kimi-K2's."""
    facts = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {
        str(num_ranks + place): {"content": content, "special": special, **facts}
        for place, (content, special) in NAMED.items()
    }
    return {
        "added_tokens_decoder": tokens,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 10**30,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
        **changes,
    }


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    """A real vocabulary in the layout of Kimi-K2, with the code that must not run."""
    mistral_common = pytest.importorskip("mistral_common", reason="install it with pip install -e '.[dev]'")
    source = Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    entries = json.loads(source.read_text(encoding="utf-8"))["vocab"][:NUM_RANKS]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    assert [entry["rank"] for entry in entries] == list(range(NUM_RANKS))

    folder = tmp_path_factory.mktemp("kimi")
    write_vocabulary(folder, tokens)
    write_config(folder, published_config(NUM_RANKS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('the code of the checkpoint was run')")
    added = [NAMED.get(place, (f"<|reserved_token_{NUM_RANKS + place}|>", False))[0] for place in range(256)]
    return Kimi(
        folder=folder,
        codec=loaded(folder),
        reference=tiktoken.Encoding(
            name="kimi",
            pat_str=PUBLISHED_SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={content: NUM_RANKS + place for place, content in enumerate(added)},
        ),
        tokens=[*tokens, *(content.encode() for content in added)],
        special_ids=frozenset(NUM_RANKS + place for place, (_, special) in NAMED.items() if special),
    )


# --- text to tokens


WORDS = ("中", "文字", "々", "a", "The", "ABC", "É", "ß", "ǅ", "'s", "'LL", "1", "2024", "²", "٣", "ʰ", "カ", "한")
OTHERS = ("'", "!", "...", "_", "😀", "<|im_end|>", "[BOS]", "<|", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\u00a0")
PIECES = st.sampled_from([*WORDS, *OTHERS, "\u200d", "\u0301", "\x00"])
ANY_CHARACTER = st.characters(exclude_categories=["Cs"])


@given(text=st.sampled_from(TEXTS + CHINESE) | st.lists(PIECES | ANY_CHARACTER, max_size=40).map("".join))
@settings(max_examples=400)
def test_any_text_becomes_the_tokens_of_tiktoken(kimi: Kimi, text: str) -> None:
    for written in (text, f"{text}<|im_end|> {text}[EOS]{text}<|reserved_token_{NUM_RANKS + 5}|>"):
        token_ids = kimi.codec.encode(written)
        assert token_ids == kimi.reference.encode(written, allowed_special="all")
        assert kimi.codec.decode(token_ids, skip_special_tokens=False) == written


@dataclass(frozen=True, repr=False)
class SplitMadeVisible:
    """A vocabulary that shows where text is cut: any two characters in one word share a token, unless a third takes
    one of them. Tokens are pairs of bytes of which the second begins a character.
    """

    codec: TextCodec
    reference: Any  # a tiktoken.Encoding


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> SplitMadeVisible:
    beginnings = [byte for byte in range(0xF5) if not 0x80 <= byte < 0xC2]
    pairs = [bytes([last, first]) for last in range(0xC0) for first in beginnings]
    random.Random(0).shuffle(pairs)
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    folder = tmp_path_factory.mktemp("split")
    write_vocabulary(folder, tokens)
    write_config(folder, published_config(len(tokens)))
    reference = tiktoken.Encoding(
        name="split",
        pat_str=PUBLISHED_SPLIT,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    return SplitMadeVisible(codec=loaded(folder), reference=reference)


def test_every_character_has_the_class_of_tiktoken(split: SplitMadeVisible) -> None:
    """The two libraries have their own Unicode tables."""
    categories = [unicodedata.category(chr(code)) for code in range(sys.maxunicode + 1)]
    # of the long blocks of Han and Hangul, a few
    is_within_block = [
        categories[code - 1 : code + 2] == ["Lo"] * 3 and code % 16 > 0 for code in range(len(categories))
    ]
    assigned = [
        chr(code)
        for code, category in enumerate(categories)
        if category not in ("Cn", "Co", "Cs") and not is_within_block[code]
    ]
    assert len(assigned) > 20_000
    size = 2000
    for start in range(0, len(assigned), size):
        text = "".join(f"a{one}\n{one}a\n{one}B\n中{one}\n1{one}\n!{one}\n" for one in assigned[start : start + size])
        assert split.codec.encode(text) == split.reference.encode_ordinary(text)


@given(text=st.text("aBsStTrReEvVmMlLdD'éÉǅʰ\u0301中々カ한019²٣Ⅳ \t\n\r\u3000\u00a0!_/.😀\u200dſ", max_size=12))
@example("you're, We'Re, they'LL, I'm, it'S, he'd, i've, can'T")
@example("123 1234 12345中123456")
@settings(max_examples=1000)
def test_text_is_cut_as_published(split: SplitMadeVisible, text: str) -> None:
    assert split.codec.encode(text) == split.reference.encode_ordinary(text)


# --- special tokens


def test_special_tokens_have_the_ids_of_the_config(kimi: Kimi) -> None:
    assert kimi.codec.num_tokens == NUM_RANKS + 256
    assert kimi.codec.eos_token_ids == [NUM_RANKS + 1]
    for token_id in range(NUM_RANKS, NUM_RANKS + 256):
        content = kimi.tokens[token_id].decode()
        assert kimi.codec.encode(content) == [token_id]
        assert kimi.codec.decode([token_id], skip_special_tokens=False) == content
        assert kimi.codec.decode([token_id]) == ("" if token_id in kimi.special_ids else content)


def test_bos_is_added_only_if_the_config_requires_it(small: Path) -> None:
    assert loaded(small).encode("a") == [ord("a")]
    write_config(small, published_config(NUM_SMALL, add_bos_token=True))
    assert loaded(small).encode("a") == [NUM_SMALL, ord("a")]


# --- conversations


def test_a_conversation_becomes_the_tokens_of_the_rendered_template(kimi: Kimi) -> None:
    expected = (
        "<|im_system|>system<|im_middle|>You are helpful.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Hello!<|im_end|>"
    )
    token_ids = kimi.codec.chat_prompt(CONVERSATION[1:3], add_generation_prompt=False)
    assert token_ids == kimi.reference.encode(expected, allowed_special="all")


NUM_SMALL = 256 + 2


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The 256 bytes and two tokens more."""
    write_vocabulary(tmp_path, [*(bytes([byte]) for byte in range(256)), b"ab", "中".encode()])
    write_config(tmp_path, published_config(NUM_SMALL))
    return tmp_path


def prompt(folder: Path) -> str:
    codec = loaded(folder)
    return codec.decode(codec.chat_prompt(CONVERSATION[1:2]), skip_special_tokens=False)


def test_the_template_is_in_its_own_file_or_in_the_config(small: Path) -> None:
    assert not loaded(small).has_chat_template
    write_config(small, published_config(NUM_SMALL, chat_template="in the config: {{ bos_token }}{{ eos_token }}"))
    assert prompt(small) == "in the config: [BOS][EOS]"
    (small / "chat_template.jinja").write_text("in a file: {{ pad_token }}")
    assert prompt(small) == "in a file: [PAD]"


# --- which folders are read


@pytest.mark.parametrize(
    "reference",
    [
        ["tokenization_kimi.TikTokenTokenizer", None],
        ["tokenization_moonshot.TikTokenTokenizer", None],
        "moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer",
    ],
)
def test_a_folder_that_names_moonshots_code_is_read(small: Path, reference: Any) -> None:
    write_config(small, published_config(NUM_SMALL, auto_map={"AutoTokenizer": reference}))
    assert loaded(small).encode("ab中") == [256, 257]


@pytest.mark.parametrize(
    "auto_map",
    [
        None,
        [],
        {"AutoTokenizer": [None, 1]},
        {"AutoTokenizer": ["tokenization_kimi_own.TikTokenTokenizer", None]},
        {"AutoModel": "tokenization_kimi.TikTokenTokenizer"},
    ],
)
def test_a_folder_that_names_other_code_is_refused(small: Path, auto_map: Any) -> None:
    write_config(small, published_config(NUM_SMALL, auto_map=auto_map))
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        TextCodec.load(str(small))


# --- damaged files


def replaced_line(line: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        lines = (folder / "tiktoken.model").read_text().splitlines()
        lines[2] = line
        (folder / "tiktoken.model").write_text("\n".join(lines))

    return damage


def changed_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, published_config(NUM_SMALL, **changes))


def added(token_id: str, entry: Any) -> Callable[[Path], None]:
    tokens = published_config(NUM_SMALL)["added_tokens_decoder"]
    return changed_config(added_tokens_decoder={**tokens, token_id: entry})


def keep_lines(number: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        lines = (folder / "tiktoken.model").read_text().splitlines(keepends=True)
        (folder / "tiktoken.model").write_text("".join(lines[:number]))

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        *(
            (replaced_line(line), "tiktoken.model")
            for line in ("AA==", "AA== -2", "A 2", "A\u00e9== 2", "Ag== 1", "AQ== 2", "Ag== 258", f"Ag== 1{'0' * 5000}")
        ),
        (replaced_line("YWJj 2"), "0x02"),
        (keep_lines(0), "0x00"),
        (keep_lines(257), "513"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"auto_map": '), "JSON"),
        (changed_config(added_tokens_decoder=[1]), "tokenizer_config.json"),
        (changed_config(added_tokens_decoder={}), "[BOS]"),
        (added("257", {"content": "<x>"}), "257"),
        (added("514", {"content": "<x>"}), "514"),
        (added("one", {"content": "<x>"}), "one"),
        *((added("300", entry), "tokenizer_config.json") for entry in ({}, {"content": "\ud800"}, "<x>")),
        (added("300", {"content": "[EOS]"}), "[EOS]"),
        (added("300", {"content": "ab"}), "256"),
        (changed_config(bos_token="<s>"), "<s>"),
        (changed_config(chat_template=[{"name": "x"}]), "template"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "utf-8"),
    ],
)
def test_damaged_files_are_refused(small: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(small)
    with pytest.raises(CheckpointError) as caught:
        TextCodec.load(str(small))
    assert str(small) in str(caught.value)
    assert says in str(caught.value)


def test_lines_may_be_in_any_order_with_empty_ones_between(small: Path) -> None:
    lines = (small / "tiktoken.model").read_text().splitlines()
    (small / "tiktoken.model").write_bytes("\r\n\r\n".join(reversed(lines)).encode())
    eos = {"content": "[EOT]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_config(small, published_config(NUM_SMALL, eos_token=eos, bos_token=None))
    assert loaded(small).encode("ab中a") == [256, 257, ord("a")]
    assert loaded(small).eos_token_ids == [NUM_SMALL + 9]
