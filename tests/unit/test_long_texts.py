"""Long texts are tokenized without holding up other threads."""

from __future__ import annotations

import threading
from pathlib import Path

from test_text import byte_level_tokenizer, save

from moeserve.api.tokenizer import LONG_TEXT, TextCodec


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    codec = TextCodec.load(save(byte_level_tokenizer(), tmp_path))
    assert codec is not None
    text = "a" * 2**19
    has_begun, token_ids = threading.Event(), list[int]()

    def encode() -> None:
        has_begun.set()
        token_ids.extend(codec.encode(text))

    thread = threading.Thread(target=encode)
    thread.start()
    has_begun.wait()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.001)
        num_turns += 1
    assert num_turns > 10
    assert codec.decode(token_ids) == text


def test_long_and_short_texts_have_the_same_tokens(tmp_path: Path) -> None:
    codec = TextCodec.load(save(byte_level_tokenizer(), tmp_path))
    assert codec is not None
    text = "a bc " * (LONG_TEXT // 5)
    for special in (True, False):
        short, long = (codec.encode(each, add_special_tokens=special) for each in (text, text + " bc" * 5))
        assert long[: len(short) - 5] == short[:-5]
