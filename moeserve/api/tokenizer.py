"""`TextCodec`: a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moeserve.api.chat_messages import check_messages, check_tools
from moeserve.api.detokenizer import (
    REPLACEMENT_CHARACTER,
    STEPWISE_DECODERS,
    ByteLevelDetokenizer,
    Detokenizer,
    StepwiseDetokenizer,
    is_stepwise,
)
from moeserve.errors import CheckpointError, RequestError
from moeserve.models.checkpoint.tokenizer_files import LoadedTokenizer, load_tokenizer, load_with_transformers

# The maximum number of characters that a Unicode normal form composes into one.
MOST_COMPOSED = 4
LONG_TEXT = 2**13  # characters from which a text takes milliseconds
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # stands for one byte in vocabularies that are not byte-level


class TextCodec:
    """A checkpoint's tokenizer: converts text to token ids and back.

    Text is decoded with the tokenizer's own decoder. Some tokenizer configs request a clean-up of spaces before
    punctuation. This clean-up is not applied, because it removes spaces that the model has written.
    """

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        """
        Args:
            tokenizer: the tokenizer, as `load` reads it from a folder.

        Raises:
            CheckpointError: the tokenizer's text cannot be decoded token by token.
        """
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._added_tokens = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in self._added_tokens.items() if token.special)
        bos = tokenizer.token_id("bos_token")
        first_ids = [bos] if tokenizer.adds_bos and bos is not None else []
        self._first_ids = first_ids if bos not in self._ids("a", add_special_tokens=True) else []

        decoder = _steps(self._backend.decoder, "decoders")
        kinds = [step["type"] for step in decoder]
        self.is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        if not self.is_byte_level and not is_stepwise(decoder):
            raise CheckpointError(
                f"the tokenizer in {tokenizer.path} has the decoder {' + '.join(kinds)}, which cannot be "
                f"streamed; supported are ByteLevel alone, and sequences of {', '.join(sorted(STEPWISE_DECODERS))}"
            )
        self.token_bytes = functools.cache(self._token_bytes)
        self.token_text = functools.cache(self._token_text)

    @classmethod
    def load(cls, folder: str) -> TextCodec | None:
        """Load the tokenizer of a folder; None if the folder has no tokenizer file.

        Raises:
            CheckpointError: see `load_tokenizer`; or the tokenizer's text cannot be decoded token by token.
        """
        tokenizer = load_tokenizer(folder)
        return None if tokenizer is None else cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default including the special tokens that the tokenizer adds.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        first_ids = self._first_ids if add_special_tokens else []
        return first_ids + self._ids(text, add_special_tokens=add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, from its length and the longest token."""
        longest = self._most_characters_per_token
        return 0 if longest is None else -(-len(text) // longest)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Unknown ids are skipped."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one output."""
        hidden_ids = self._special_ids if skip_special_tokens else frozenset[int]()
        if self.is_byte_level:
            return ByteLevelDetokenizer(self, hidden_ids)
        return StepwiseDetokenizer(self, hidden_ids, has_byte_tokens=self._has_byte_tokens)

    @functools.cached_property
    def of_transformers(self) -> Any:
        """The tokenizer as a transformers object. Imports transformers."""
        return load_with_transformers(self.tokenizer.path) if self.tokenizer.fast is None else self.tokenizer.fast

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokenizer's end-of-sequence token, as a list that is empty if it has none."""
        eos = self.tokenizer.token_id("eos_token")
        return [] if eos is None else [eos]

    @functools.cached_property
    def num_tokens(self) -> int:
        """The size of the vocabulary. Larger token ids have no text."""
        return 1 + max(self._backend.get_vocab().values())

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_templates)

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's default chat template."""
        return self.tokenizer.chat_templates.get("default")

    def chat_prompt(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        check_length: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Return the token ids of a conversation, as rendered by a chat template.

        Args:
            messages: list of {"role": ..., "content": ...}. The content is a text, or a list of
                {"type": "text", "text": ...}, which are joined by newlines. See `template_messages` for their forms.
            chat_template: Jinja template, or the name of a template of the checkpoint; None: the checkpoint's default.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end the prompt with the tokens that begin an answer.
            continue_final_message: end the prompt after the content of the last message, for an answer that continues
                it; `add_generation_prompt` then has no effect.
            template_arguments: further variables of the template, such as {"enable_thinking": False}.
            check_length: called with the rendered text; raises an error if it is too long to be tokenized.

        Raises:
            RequestError: an argument is malformed, there is no chat template, or the template raises an error.
        """
        # Imports jinja2, for conversations only.
        from moeserve.api.chat_template import choose_template, render_conversation

        messages, tools = check_messages(messages), check_tools(tools)
        text = render_conversation(
            choose_template(self.tokenizer.chat_templates, chat_template, has_tools=tools is not None),
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.tokenizer.special_tokens,
            arguments=template_arguments or {},
        )
        check_length(text)
        return self._ids(text, add_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """Return an entry of the vocabulary; None if there is none (a model may have more rows than its tokenizer)."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the learned vocabulary, such as special tokens, by their text."""
        return {token.content: token_id for token_id, token in self._added_tokens.items()}

    def id_of_token(self, token: str) -> int | None:
        """Return the id of an entry of the vocabulary; None if there is no such entry."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @functools.cached_property
    def _most_characters_per_token(self) -> int | None:
        """The maximum number of characters that one token can stand for; None if there is no limit."""
        if not keeps_text(self._backend, self._added_tokens.values()):
            return None
        return MOST_COMPOSED * max(map(len, self._backend.get_vocab()))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair ({text[error.start]!a}) at character {error.start}; "
                "pass valid Unicode text"
            ) from None
        if len(text) < LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # unlike `encode`, this releases the interpreter's lock
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _token_text(self, token_id: int) -> str:
        """Return the text of a token in the middle of an output, with its leading space; also of special tokens."""
        if self.is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        # The first token of a decoded text may lose its leading space, so decode the token twice and drop the first.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        if not self.is_byte_level:
            byte = _BYTE_TOKEN.fullmatch(self.token(token_id) or "") if self._has_byte_tokens else None
            return self.token_text(token_id).encode("utf-8") if byte is None else bytes.fromhex(byte[1])
        text = self.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT_CHARACTER not in text:
            return text.encode("utf-8")
        token = self.token(token_id)
        assert token is not None, f"token {token_id} has a text but is not in the vocabulary"
        byte_of = _byte_of_character()
        if all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        return token.encode("utf-8")  # an added token, stored as plain text


def keeps_text(backend: Any, added_tokens: Iterable[Any]) -> bool:
    """Return True if each character of a text becomes part of a token, except characters that a normal form composes.

    Other tokenizers may drop characters, or map any number of them to one token.
    """
    model = backend.model
    vocabulary_keeps_all = getattr(model, "byte_fallback", False) and model.token_to_id("<0x00>") is not None
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in splits):
        vocabulary_keeps_all = all(model.token_to_id(character) is not None for character in _byte_of_character())
    return (
        vocabulary_keeps_all
        and not any(token.lstrip or token.rstrip for token in added_tokens)
        and all(
            step["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
            or (step["type"] == "Replace" and len(step["pattern"].get("String", "aa")) <= len(step["content"]))
            for step in _steps(backend.normalizer, "normalizers")
        )
        and all(
            step["type"] in ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
            and step.get("behavior") != "Removed"
            for step in splits
        )
    )


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte of each of the 256 characters of a byte-level vocabulary, as assigned by GPT-2."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of one part of a tokenizer in their JSON form; an empty list if it has no such part.

    Args:
        key: the key of the list of steps: "decoders", "normalizers" or "pretokenizers".
    """
    if part is None:
        return []
    state = json.loads(part.__getstate__())  # the library's only way to serialise one part as JSON
    return state[key] if state["type"] == "Sequence" else [state]
