"""Text in and out, against what transformers' own tokenizers give, on vocabularies of both families."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moeserve.api.output_text import OutputText
from moeserve.api.tokenizer import TextCodec
from moeserve.errors import CheckpointError, RequestError
from moeserve.models.checkpoint.tokenizer_files import LoadedTokenizer
from moeserve.sampling_params import SamplingParams

SENTENCES = [
    "Hello world, this is a small test. Isn't it?",
    "  two  spaces,\n\nlines\tand tabs ",
    "Grüße aus Köln 😀 👩‍👩‍👧 😀😀",
    "你好,世界。你好!",
    "Привет, мир",
    "नमस्ते दुनिया",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.add_tokens(["<two words>", "\ufffd", "größe"])  # plain text in the vocabulary, not byte by byte
    return tokenizer


def sentencepiece_tokenizer(decoder: Any) -> Tokenizer:
    """Byte-fallback BPE over Metaspace, as in Llama 2 and Mixtral; emoji and Hindi are in no word piece."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=140, special_tokens=SPECIAL_TOKENS)
    trained.train_from_iterator([SENTENCES[0], SENTENCES[1], SENTENCES[3]] * 5, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ("▁", "▁▁", "▁▁▁"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def fast_tokenizer(tokenizer: Tokenizer, **options: Any) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, **options)


def word_tokenizer(words: list[str], decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoder
    return tokenizer


def llama_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_tokenizer,
    "llama": lambda: sentencepiece_tokenizer(llama_decoder()),
    "metaspace": lambda: sentencepiece_tokenizer(decoders.Metaspace()),
    "wordpiece": lambda: word_tokenizer(["[UNK]", "the", "##re", ".", "n't", "'", "do", "##"], decoders.WordPiece()),
}


def save(tokenizer: Tokenizer, folder: Path, **options: Any) -> str:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    fast_tokenizer(tokenizer, **(names | options)).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {family: save(make(), root / family.replace(" ", "-")) for family, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def codec_of(folders: dict[str, str]) -> dict[str, TextCodec]:
    codecs = {family: TextCodec.load(folder) for family, folder in folders.items()}
    return {family: codec for family, codec in codecs.items() if codec is not None}


@pytest.fixture(scope="session")
def reference_of(folders: dict[str, str]) -> dict[str, Any]:
    return {family: AutoTokenizer.from_pretrained(folder) for family, folder in folders.items()}


def pieces(codec: TextCodec, token_ids: list[int], *, skip_special_tokens: bool = True) -> Iterator[str]:
    detokenizer = codec.detokenizer(skip_special_tokens=skip_special_tokens)
    for token_id in token_ids:
        yield detokenizer.feed(token_id)
    yield detokenizer.finish()


def id_of(codec: TextCodec, token: str) -> int:
    return next(token_id for token_id in range(codec.num_tokens) if codec.token(token_id) == token)


# --- detokenizer


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=400)
def test_random_tokens_come_out_as_the_tokenizer_decodes_them(
    codec_of: dict[str, TextCodec], reference_of: dict[str, Any], family: str, data: st.DataObject
) -> None:
    codec, reference = codec_of[family], reference_of[family]
    beyond_vocabulary = codec.num_tokens + 3
    near = data.draw(st.integers(0, codec.num_tokens - 1))  # neighbours are alike: many bytes, or many words
    ids = st.integers(0, beyond_vocabulary) | st.integers(near, min(near + 70, beyond_vocabulary))
    token_ids = data.draw(st.lists(ids, max_size=40))
    skip = data.draw(st.booleans())

    final = reference.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    given_so_far = ""
    for piece in pieces(codec, token_ids, skip_special_tokens=skip):
        given_so_far += piece
        assert final.startswith(given_so_far)
    assert given_so_far == final
    assert codec.decode(token_ids, skip_special_tokens=skip) == final


@pytest.mark.parametrize("family", ["byte-level", "llama", "metaspace"])
def test_encoded_text_comes_back(codec_of: dict[str, TextCodec], reference_of: dict[str, Any], family: str) -> None:
    codec, reference = codec_of[family], reference_of[family]
    for sentence in SENTENCES:
        token_ids = codec.encode(sentence)
        assert token_ids == reference.encode(sentence)
        assert "".join(pieces(codec, token_ids)) == reference.decode(token_ids, skip_special_tokens=True)


@given(text=st.text(max_size=20))
@example(text="a\ufffd😀\ufffd")  # a replacement character that the model wrote itself
@settings(max_examples=100)
def test_byte_level_holds_back_only_an_incomplete_character(codec_of: dict[str, TextCodec], text: str) -> None:
    codec = codec_of["byte-level"]
    id_of_byte = {codec.token_bytes(i): i for i in range(codec.num_tokens) if len(codec.token_bytes(i)) == 1}
    content = text.encode()
    token_ids = [id_of_byte[content[place : place + 1]] for place in range(len(content))]
    given_so_far = ""
    for count, piece in enumerate(list(pieces(codec, token_ids))[:-1], start=1):
        given_so_far += piece
        assert given_so_far == content[:count].decode(errors="ignore")


def test_one_bad_byte_changes_its_whole_run(codec_of: dict[str, TextCodec]) -> None:
    codec = codec_of["llama"]
    run = [id_of(codec, f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff"]
    word = codec.encode("Hello")[-1]
    assert list(pieces(codec, [*run[:2], word]))[:2] == ["", ""]
    assert "".join(pieces(codec, run[:2])) == "é"
    assert "".join(pieces(codec, run)) == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("family", ["byte-level", "llama"])
def test_work_per_token_does_not_grow_with_the_output(
    codec_of: dict[str, TextCodec], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codec_of[family]
    token_ids = codec.encode(" ".join(SENTENCES) * 40)
    num_decoded = 0

    def counting_decode(ids: list[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return TextCodec.decode(codec, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(codec, "decode", counting_decode)
    list(pieces(codec, token_ids))
    assert len(token_ids) > 2000
    assert num_decoded <= 4 * len(token_ids)


@pytest.mark.parametrize("before", ["", "a"])
def test_a_run_of_byte_tokens_is_decoded_once(
    codec_of: dict[str, TextCodec], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what it shows so far is looked at after each token, for stop strings. Also if the text begins with it."""
    codec = codec_of["llama"]
    run = [id_of(codec, f"<0x{byte:02X}>") for byte in (b" " + "é€".encode()) * 100]
    token_ids = (codec.encode(before) if before else []) + run
    whole = codec.decode(token_ids, skip_special_tokens=False)
    decode, num_decoded = codec.decode, 0

    def counting_decode(ids: list[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(codec, "decode", counting_decode)
    detokenizer = codec.detokenizer(skip_special_tokens=True)
    text = ""
    for token_id in token_ids:
        text += detokenizer.feed(token_id)
        assert whole.startswith(text + detokenizer.held_text)
    assert text + detokenizer.held_text == whole == text + detokenizer.finish()
    assert num_decoded <= 4 * len(token_ids)


@pytest.mark.parametrize(("family", "token"), [("byte-level", "Ġworld"), ("llama", "▁a"), ("metaspace", "▁a")])
def test_token_text_keeps_the_leading_space(codec_of: dict[str, TextCodec], family: str, token: str) -> None:
    codec = codec_of[family]
    candidates = [i for i in range(codec.num_tokens) if (codec.token(i) or "").startswith(token[:2])]
    for token_id in candidates:
        assert codec.token_text(token_id) == " " + (codec.token(token_id) or "")[1:]
    assert candidates
    assert codec.token_text(id_of(codec, "</s>")) == "</s>"
    assert codec.token_text(codec.num_tokens + 5) == ""


def test_num_tokens_counts_added_tokens(codec_of: dict[str, TextCodec]) -> None:
    codec = codec_of["byte-level"]
    assert codec.token(codec.num_tokens - 1) == "größe"
    assert codec.token(codec.num_tokens) is None


# --- stop strings


def letters_codec(pieces_of_text: list[str]) -> TextCodec:
    tokenizer = word_tokenizer(["<unk>", *pieces_of_text], decoders.Fuse())
    return TextCodec(LoadedTokenizer.from_transformers(fast_tokenizer(tokenizer, unk_token="<unk>")))


LETTERS = ["a", "b", "ab", "ba", "aab", "bbaab"]


def expected_with_stops(texts: list[str], stops: list[str], min_tokens: int, keep: bool) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens, character by character."""
    text = ""
    for num_tokens, piece in enumerate(texts, start=1):
        for character in piece:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and num_tokens > min_tokens:
                stop = max(ending, key=len)
                return text if keep else text.removesuffix(stop), stop, num_tokens
    return text, None, len(texts)


@given(
    tokens=st.lists(st.integers(1, len(LETTERS)), max_size=25),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    min_tokens=st.integers(0, 6),
    keep=st.booleans(),
)
@example(tokens=[2, 5], stops=["baab", "aa"], min_tokens=0, keep=True)  # the one that begins later ends first
@settings(max_examples=300)
def test_stop_strings_end_the_text_where_a_character_by_character_search_does(
    tokens: list[int], stops: list[str], min_tokens: int, keep: bool
) -> None:
    codec = letters_codec(LETTERS)
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=keep)
    expected, expected_stop, expected_count = expected_with_stops(
        [LETTERS[token - 1] for token in tokens], stops, min_tokens, keep
    )
    output = OutputText(codec, params)
    found, count = None, 0
    for count, token in enumerate(tokens, start=1):
        found = output.add(token)
        assert expected.startswith(output.text)
        if found is not None:
            break
        so_far = "".join(LETTERS[token - 1] for token in tokens[:count])
        held = so_far[len(output.text) :]
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert held == max((part for part in beginnings if so_far.endswith(part)), key=len, default="")
    if found is None:
        output.finish()
    assert (output.text, found, count) == (expected, expected_stop, expected_count)


def test_a_line_end_written_as_a_byte_token_stops_at_once(codec_of: dict[str, TextCodec]) -> None:
    """Half a character is held back, so it is no stop string."""
    codec = codec_of["llama"]
    output = OutputText(codec, SamplingParams(stop=["\n", "\ufffd"]))
    tokens = ["<0xC3>", "<0xA9>", "<0x0A>"]
    assert [output.add(id_of(codec, token)) for token in tokens] == [None, None, "\n"]
    assert output.text == "é"


def test_special_tokens_are_text_only_when_asked_for(codec_of: dict[str, TextCodec]) -> None:
    codec = codec_of["byte-level"]
    token_ids = [*codec.encode("Hello"), id_of(codec, "</s>")]
    for skip, expected in ((True, "Hello"), (False, "Hello</s>")):
        output = OutputText(codec, SamplingParams(skip_special_tokens=skip))
        for token_id in token_ids:
            output.add(token_id)
        output.finish()
        assert output.text == expected


# --- prompts


def test_encode_adds_the_special_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    folder = save(tokenizer, tmp_path)
    codec = TextCodec.load(folder)
    assert codec is not None
    bos = tokenizer.token_to_id("<s>")
    assert codec.encode("Hello") == AutoTokenizer.from_pretrained(folder).encode("Hello")
    assert codec.encode("Hello")[0] == bos
    # The template writes <s> itself: it must not be there twice.
    assert codec.chat_prompt([{"role": "user", "content": "Hello"}]).count(bos) == 1


def test_half_a_surrogate_pair_is_refused(codec_of: dict[str, TextCodec]) -> None:
    with pytest.raises(RequestError, match=r"surrogate pair \('\\ud83d'\) at character 2"):
        codec_of["byte-level"].encode("ab\ud83d")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_is_what_transformers_makes(
    codec_of: dict[str, TextCodec], reference_of: dict[str, Any], add_generation_prompt: bool
) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "world"}]
    expected = reference_of["llama"].apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert codec_of["llama"].chat_prompt(messages, add_generation_prompt=add_generation_prompt) == expected


def test_chat_content_may_be_a_list_of_texts(codec_of: dict[str, TextCodec]) -> None:
    codec = codec_of["byte-level"]
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    assert codec.chat_prompt([{"role": "user", "content": parts}]) == codec.chat_prompt(
        [{"role": "user", "content": "Hello\nworld"}]
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages='Hello' must be a list"),
        ([], "at least one"),
        (["Hello"], r"messages\[0\]='Hello' must be a dict"),
        ([{"role": "user", "contnet": "Hello"}], r"messages\[0\]=.*'content'|\"content\""),
        ([{"role": 3, "content": "Hello"}], "role=3 must be a text"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], r"messages\[1\]: content=3"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "content=.*only text"),
        ([{"role": "robot", "content": "Hello"}], "messages: no robots here"),
    ],
)
def test_a_malformed_conversation_is_refused_by_name(
    codec_of: dict[str, TextCodec], messages: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        codec_of["byte-level"].chat_prompt(messages)


@pytest.mark.parametrize(
    ("template", "says"),
    [(None, r"chat_template.* generate"), ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe")],
)
def test_a_missing_template_or_one_that_leaves_its_sandbox_is_refused(
    template: str | None, says: str, tmp_path: Path
) -> None:
    codec = TextCodec.load(save(byte_level_tokenizer(), tmp_path, chat_template=template))
    assert codec is not None
    with pytest.raises(RequestError, match=says):
        codec.chat_prompt([{"role": "user", "content": "Hello"}])


# --- loading


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert TextCodec.load(str(tmp_path)) is None


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere'.*no such folder"):
        TextCodec.load(str(tmp_path / "nowhere"))


def cut_short(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:1000])


def remote_code(folder: Path) -> None:
    shutil.copy(folder / "tokenizer.json", folder / "vocab.json")
    (folder / "tokenizer.json").unlink()
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"tokenizer\.json cannot be loaded \(.*line \d+"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be loaded \(\w+"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{no"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer_config\.json.*: add the tokenizer\.json"),
        (remote_code, "cannot be loaded"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    folders: dict[str, str], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders["byte-level"], folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        TextCodec.load(str(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "tiktoken.model"])
@pytest.mark.parametrize("has_code", [False, True])
def test_a_vocabulary_that_does_not_say_how_text_is_cut_is_refused(tmp_path: Path, name: str, has_code: bool) -> None:
    """transformers takes this file, under each of the names, and makes up the rest. Kimi-K2 comes so, with code."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / name).write_text("".join(lines))
    if has_code:
        config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenization_own.py").write_text("raise SystemExit('the code of the checkpoint was run')")
    with pytest.raises(CheckpointError, match=rf"{name}, .* add the tokenizer\.json .* token ids only"):
        TextCodec.load(str(tmp_path))


def test_a_tokenizer_without_a_fast_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"without a fast version \(ByT5Tokenizer\)"):
        TextCodec.load(str(tmp_path))


def test_tokenizer_json_decides_and_not_the_class_or_vocabulary_beside_it(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """DeepSeek names Llama's class beside a byte-level vocabulary."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(folders["byte-level"], folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    for name in ("tokenizer.model", "tiktoken.model"):
        (folder / name).write_text("not read")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    codec = TextCodec.load(str(folder))
    assert codec is not None
    for sentence in SENTENCES:
        assert codec.decode(codec.encode(sentence)) == sentence


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, decoder: Any) -> None:
    folder = save(word_tokenizer(["<unk>", "a"], decoder), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be streamed; supported are ByteLevel") as caught:
        TextCodec.load(folder)
    assert folder in str(caught.value)
