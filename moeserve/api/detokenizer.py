"""Detokenizers, which turn the tokens of one output into text as they are generated."""

from __future__ import annotations

import codecs
import re
from typing import Any, Protocol

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Decoder steps that map each token to text independently, except for the first token of a text and for runs of byte
# tokens. Only with these steps can text be released as tokens arrive.
STEPWISE_DECODERS = frozenset({"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece"})

_BYTE_TOKEN = re.compile(r"<0x..>")


class Vocabulary(Protocol):
    """The methods of a tokenizer that detokenizers use."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token(self, token_id: int) -> str | None: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Detokenizer(Protocol):
    """Returns the text of one output in pieces.

    The concatenated pieces are always a prefix of the text that `decode` returns for all tokens, and equal to this text
    after `finish`.
    """

    @property
    def held_text(self) -> str:
        """The text that tokens held back would have if the output ended here; empty while a character is incomplete."""

    def feed(self, token_id: int) -> str:
        """Add a token. Return the text that it completes."""

    def finish(self) -> str:
        """Return the text that was held back. No further token may be added."""


class ByteLevelDetokenizer:
    """Detokenizer for byte-level BPE. Tokens are bytes; only the bytes of an incomplete character are held back."""

    held_text = ""

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        return self._characters.decode(self._vocabulary.token_bytes(token_id))

    def finish(self) -> str:
        return self._characters.decode(b"", final=True)


class StepwiseDetokenizer:
    """Detokenizer for vocabularies like SentencePiece's.

    A run of byte tokens is held back until it ends, because one invalid byte changes the text of the whole run. Each
    token is decoded once, together with the tokens of the previous piece, because the first token of a decoded text may
    lose its leading space.
    """

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int], *, has_byte_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._has_byte_tokens = has_byte_tokens
        self._context: list[int] = []  # tokens of the previous piece, which does not end in a byte token
        self._context_length = 0  # characters of the context when decoded alone
        self._held: list[int] = []
        self._run = _ByteRun()  # the held tokens, if they are byte tokens
        self._num_stripped: int | None = None  # characters that the decoder strips if the output begins with this run

    @property
    def held_text(self) -> str:
        if self._run.num_tokens != len(self._held):
            text = self._decode_held()
            return "" if REPLACEMENT_CHARACTER in text else text
        if self._context or not self._run.text:
            return self._run.text
        if self._num_stripped is None:
            self._num_stripped = len(self._run.text) - len(self._decode_held())
        return self._run.text[self._num_stripped :]

    def feed(self, token_id: int) -> str:
        token = self._vocabulary.token(token_id)
        if token is None or token_id in self._hidden_ids:
            return ""  # the decoder skips the token, so it does not end a run of bytes
        self._held.append(token_id)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            self._run.add(int(token[3:5], 16))
            return ""
        text = self._decode_held()
        if text:
            self._run = _ByteRun()
            self._context, self._held = self._held, []
            self._context_length = len(self._vocabulary.decode(self._context, skip_special_tokens=False))
        return text

    def finish(self) -> str:
        return self._decode_held()

    def _decode_held(self) -> str:
        if not self._held:
            return ""
        text = self._vocabulary.decode(self._context + self._held, skip_special_tokens=False)
        return text[self._context_length :]


class _ByteRun:
    """Consecutive byte tokens, decoded incrementally: decoding the whole run for each token takes quadratic time."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("strict")
        self._text: str | None = ""  # None: the bytes are not valid UTF-8

    @property
    def text(self) -> str:
        """The text of the run; empty if the bytes are invalid or end within a character."""
        is_incomplete = bool(self._characters.getstate()[0])
        return "" if self._text is None or is_incomplete else self._text

    def add(self, byte: int) -> None:
        self.num_tokens += 1
        if self._text is not None:
            try:
                self._text += self._characters.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._text = None


def is_stepwise(decoder: list[dict[str, Any]]) -> bool:
    """Return True if `StepwiseDetokenizer` supports a decoder, given as the steps of its JSON form."""
    kinds = [step["type"] for step in decoder]
    if not STEPWISE_DECODERS.issuperset(kinds):
        return False
    # From Fuse on, steps see the whole text. They may strip one leading space, but nothing that depends on later
    # tokens.
    whole_text_steps = decoder[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    return all(
        step["type"] == "Fuse" or (step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0)
        for step in whole_text_steps
    )
