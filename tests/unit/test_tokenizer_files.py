"""tokenizer.json is read without transformers, and gives what transformers makes of it and the files beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import CHAT_TEMPLATE, SENTENCES, byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from moeserve.api import tokenizer as tokenizer_module
from moeserve.api.tokenizer import TextCodec
from moeserve.errors import CheckpointError

IN_VOCABULARY, UNKNOWN = "Hello", "<new>"  # tokens that tokenizer.json does not list as added
ADDED = ["<s>", "</s>", "<unk>", "größe", "<stripped>"]
TEXTS = [*SENTENCES, "a<s>b </s>  <unk> größe <stripped> x<new>Hello", ""]


def make_vocabulary() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<stripped>", lstrip=True, normalized=False)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9, pad_token="</s>")
    return tokenizer


VOCABULARY = make_vocabulary()
ENTRIES = {
    token_id: {
        "content": token.content,
        "lstrip": token.lstrip,
        "normalized": token.normalized,
        "rstrip": token.rstrip,
        "single_word": token.single_word,
        "special": token.special,
    }
    for token_id, token in VOCABULARY.get_added_tokens_decoder().items()
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    VOCABULARY.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def assert_equal_to_transformers(folder: Path) -> TextCodec:
    codec = TextCodec.load(str(folder))
    assert codec is not None
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours, theirs = codec.tokenizer, reference.backend_tokenizer
    assert repr(ours.backend.get_added_tokens_decoder()) == repr(theirs.get_added_tokens_decoder())
    assert ours.special_tokens == reference.special_tokens_map
    assert codec.eos_token_ids == ([] if reference.eos_token_id is None else [reference.eos_token_id])
    for text in TEXTS:
        expected = reference(text)["input_ids"]
        assert codec.encode(text) in (expected, [reference.bos_token_id, *expected])
        assert codec.decode(expected) == reference.decode(
            expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    templates = reference.chat_template
    assert dict(ours.chat_templates) == ({"default": templates} if isinstance(templates, str) else templates or {})
    return codec


tokens = st.sampled_from([*ADDED, IN_VOCABULARY, UNKNOWN])
named = st.dictionaries(
    st.sampled_from(["bos_token", "eos_token", "pad_token", "unk_token", "think_token"]),
    st.none() | tokens | tokens.map(lambda token: {"__type": "AddedToken", "content": token, "normalized": True}),
    max_size=4,
)
entries = st.dictionaries(
    st.sampled_from(list(ENTRIES)), st.sampled_from([{}, {}, {}, {"special": True}, {"lstrip": True}]), max_size=4
).map(lambda changes: {str(token_id): ENTRIES[token_id] | change for token_id, change in changes.items()})
templates = st.sampled_from(
    ["{{ bos_token }}", [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]]
)
configs = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    named,
    st.fixed_dictionaries(
        {},
        optional={
            "added_tokens_decoder": entries,
            "additional_special_tokens": st.lists(tokens, max_size=2),
            "extra_special_tokens": st.lists(tokens, max_size=2) | st.just({"image_token": "<s>"}),
            "add_bos_token": st.booleans(),
            "chat_template": templates,
            "split_special_tokens": st.booleans(),
            "model_max_length": st.just(70),
        },
    ),
)
files = st.fixed_dictionaries(
    {"tokenizer_config.json": configs},
    optional={
        "special_tokens_map.json": st.dictionaries(
            st.sampled_from(["bos_token", "eos_token"]), tokens | tokens.map(lambda token: {"content": token})
        ),
        "added_tokens.json": st.sampled_from([{"<s>": 1}, {"<s>": 2}, {UNKNOWN: 9999}]),
        "chat_template.jinja": st.just("in a file"),
        "additional_chat_templates/rag.jinja": st.just("another"),
    },
)


@given(files=files)
@settings(max_examples=300)
def test_a_folder_gives_what_transformers_makes_of_it(files: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_equal_to_transformers(write(Path(folder), files))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": {"eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE}},
        {"tokenizer_config.json": {"added_tokens_decoder": ENTRIES, "additional_special_tokens": ["<s>"]}},
        {"special_tokens_map.json": {"bos_token": {"content": "<s>"}}, "added_tokens.json": {"<s>": 1}},
    ],
)
def test_files_that_agree_are_read_without_transformers(files: dict[str, Any], tmp_path: Path) -> None:
    assert assert_equal_to_transformers(write(tmp_path, files)).tokenizer.fast is None


def test_a_config_that_adds_a_token_is_left_to_transformers(tmp_path: Path) -> None:
    codec = assert_equal_to_transformers(write(tmp_path, {"tokenizer_config.json": {"eos_token": UNKNOWN}}))
    assert codec.of_transformers is codec.tokenizer.fast
    assert codec.encode(UNKNOWN) == codec.eos_token_ids


def test_a_special_token_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokenizer_config.json": {"eos_token": 3}})
    with pytest.raises(CheckpointError, match="eos_token"):
        TextCodec.load(str(folder))


def test_the_characters_of_bytes_are_those_of_gpt2() -> None:
    assert tokenizer_module._byte_of_character() == {character: byte for byte, character in bytes_to_unicode().items()}
