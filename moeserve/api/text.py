"""Text in and out: the checkpoint's tokenizer and chat template, text as its tokens come, and stop strings.

Knows one output at a time, never a request, an engine or a tensor.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from moeserve.api.byte_alphabet import byte_of_character
from moeserve.api.tiktoken_file import load_tiktoken
from moeserve.errors import CheckpointError, RequestError, nearest, shown
from moeserve.sampling_params import SamplingParams

# Vocabularies that transformers reads, but not always as they were meant: it leaves out the space that a SentencePiece
# model puts before a text, and guesses how text is cut before it is looked up in a tiktoken file, which does not say.
# tiktoken.model is read where tokenizer_config.json tells how; see tiktoken_file.py.
UNREAD_VOCABULARY_FILES = {
    "tokenizer.model": "a SentencePiece or tiktoken vocabulary",
    "spiece.model": "a SentencePiece vocabulary",
    "tiktoken.model": "a tiktoken vocabulary",
}
# What shows that a folder has a tokenizer, the best first, and what only goes with one.
VOCABULARY_FILES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", *UNREAD_VOCABULARY_FILES)
COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
)

# What decides how a conversation is rendered, and by which template: not for a request to say.
RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)

# Steps of a decoder that turn tokens into text one by one, up to how the first of them begins and up to runs of
# byte tokens. Text can then be released as it comes.
STEPWISE_DECODERS = frozenset({"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece"})

_BYTE_TOKEN = re.compile(r"<0x..>")
_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """A checkpoint's tokenizer: text to token ids and back.

    Decoded text is that of the tokenizer's own decoder. The clean-up of spaces before punctuation that
    some tokenizer configs ask for is left out: it loses spaces that the model wrote.
    """

    def __init__(self, tokenizer: Any, *, adds_bos: bool = False) -> None:
        """Takes a fast tokenizer of transformers. `load` makes one from a folder.

        Args:
            adds_bos: begin texts with the beginning-of-sequence token, if the tokenizer does not do so by itself.
        """
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        bos = tokenizer.bos_token_id
        is_missing = adds_bos and bos is not None and bos not in self._ids("a", add_special_tokens=True)
        self._first_ids = [bos] if is_missing else []
        self.num_tokens = 1 + max(tokenizer.get_vocab().values())  # ids beyond it have no text

        decoder = _decoder_steps(self._backend)
        kinds = [step["type"] for step in decoder]
        self.is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        if not self.is_byte_level and not _is_stepwise(decoder):
            raise CheckpointError(
                f"the tokenizer in {tokenizer.name_or_path} has the decoder {' + '.join(kinds)}, which cannot be "
                f"streamed; supported are ByteLevel alone, and sequences of {', '.join(sorted(STEPWISE_DECODERS))}"
            )
        self.token_bytes = functools.cache(self._token_bytes)
        self.token_text = functools.cache(self._token_text)

    @classmethod
    def load(cls, folder: str) -> TextCodec | None:
        """The tokenizer in a folder, or None when the folder has no tokenizer file at all.

        Raises:
            CheckpointError: there is no such folder, or a tokenizer file is damaged, missing or of an unknown kind.
        """
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(f"tokenizer {folder!r}: there is no such folder")
        vocabularies = [name for name in VOCABULARY_FILES if (root / name).is_file()]
        companions = [name for name in COMPANION_FILES if (root / name).is_file()]
        if not vocabularies and not companions:
            return None
        if not vocabularies:
            raise CheckpointError(
                f"{root / companions[0]} belongs to a tokenizer, but the folder has no vocabulary: "
                f"add tokenizer.json, or remove {', '.join(companions)} to work with token ids only"
            )
        tokenizer = load_tiktoken(root) if vocabularies == ["tiktoken.model"] else None
        if tokenizer is not None:
            return cls(tokenizer, adds_bos=_says_to_add_bos(root))
        unread = [name for name in vocabularies if name in UNREAD_VOCABULARY_FILES]
        if unread and "tokenizer.json" not in vocabularies:
            raise CheckpointError(
                f"{root / unread[0]} is {UNREAD_VOCABULARY_FILES[unread[0]]}, which moeserve does not read: "
                "add the tokenizer.json of the checkpoint, or of another with the same vocabulary; "
                f"or remove {', '.join([*vocabularies, *companions])} to work with token ids only"
            )

        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds to import

        # tokenizer.json says all. A class named beside it may be another family's, and would change what it says.
        loader = PreTrainedTokenizerFast if "tokenizer.json" in vocabularies else AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # a damaged file shows as an error of any type
            raise CheckpointError(_damage(root, [*vocabularies, *companions], error)) from error
        if not tokenizer.is_fast:
            raise CheckpointError(
                f"{root / vocabularies[0]} gives a tokenizer without a fast version ({type(tokenizer).__name__}); "
                "add the tokenizer.json of the checkpoint"
            )
        return cls(tokenizer, adds_bos=_says_to_add_bos(root))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds of its own accord.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return self._first_ids + self._ids(text, add_special_tokens=True)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that the tokenizer does not know have none."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Text of the tokens of one output, as they come."""
        hidden_ids = self._special_ids if skip_special_tokens else frozenset[int]()
        if self.is_byte_level:
            return ByteLevelDetokenizer(self, hidden_ids)
        return StepwiseDetokenizer(self, hidden_ids)

    @property
    def eos_token_ids(self) -> list[int]:
        """The token that the tokenizer says ends a text, if it says so."""
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [eos]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def chat_prompt(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, written by the checkpoint's chat template.

        Args:
            messages: list of {"role": ..., "content": ...}; the content is a text, or a list of
                {"type": "text", "text": ...}, which are joined by line ends. Other keys go to the template as they are.
            add_generation_prompt: end with the words that open an answer.
            template_arguments: what else the template is told, such as {"enable_thinking": False}.

        Raises:
            RequestError: a malformed message or template argument, no chat template, or a conversation that the
                template refuses.
        """
        messages = _checked_messages(messages)
        arguments = _checked_template_arguments(template_arguments)
        if not self.has_chat_template:
            raise RequestError(
                "the checkpoint's tokenizer has no chat template; "
                "write out the conversation as one prompt and pass that to generate"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **arguments
            )
        except ImportError:
            raise  # jinja2 is missing: not the conversation's fault
        except Exception as error:  # a template's own refusal, or any error of the expressions in it
            raise RequestError(f"the checkpoint's chat template refuses the messages: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry. None beyond it: models may have more rows than their tokenizer has tokens."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def is_byte_token(self, token: str) -> bool:
        """Whether a token stands for a single byte, which has a text only together with its neighbours."""
        return self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token) is not None

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair ({text[error.start]!a}) at character {error.start}; "
                "pass valid Unicode text"
            ) from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return token_ids

    def _token_text(self, token_id: int) -> str:
        """Text that a token has in the middle of an output, with its leading space. Special tokens have theirs too."""
        if self.is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        # The first token of a text may lose its leading space, the second does not.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def _token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token of a byte-level vocabulary stands for."""
        text = self.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT_CHARACTER not in text:
            return text.encode("utf-8")
        token = self.token(token_id)
        assert token is not None, f"token {token_id} has a text but is not in the vocabulary"
        byte_of = byte_of_character()
        if all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        return token.encode("utf-8")  # an added token, kept in plain text


class Detokenizer(Protocol):
    """Gives the text of one output piece by piece. What it gave is at any time the beginning of what
    `TextCodec.decode` gives for all tokens, and all of it after `finish`."""

    @property
    def held_text(self) -> str:
        """Text of the tokens held back, were the output to end here; empty while a character is incomplete."""

    def feed(self, token_id: int) -> str:
        """Text that is decided with this token."""

    def finish(self) -> str:
        """Text that was held back. No token may follow."""


class ByteLevelDetokenizer:
    """For byte-level BPE: tokens are bytes, and only the bytes of an incomplete character are held back."""

    held_text = ""

    def __init__(self, codec: TextCodec, hidden_ids: frozenset[int]) -> None:
        self._codec = codec
        self._hidden_ids = hidden_ids
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        return self._characters.decode(self._codec.token_bytes(token_id))

    def finish(self) -> str:
        return self._characters.decode(b"", final=True)


class StepwiseDetokenizer:
    """For SentencePiece-like vocabularies.

    A run of byte tokens is held back until it ends: one invalid byte anywhere in it changes the text of them all.
    Tokens are decoded once, behind those that gave the text before, because the first token of a text may
    lose its leading space.
    """

    def __init__(self, codec: TextCodec, hidden_ids: frozenset[int]) -> None:
        self._codec = codec
        self._hidden_ids = hidden_ids
        self._context: list[int] = []  # empty, or gave some text and ended with no byte token
        self._context_length = 0  # characters of the context when decoded alone
        self._held: list[int] = []

    @property
    def held_text(self) -> str:
        text = self._decode_held()
        return "" if _REPLACEMENT_CHARACTER in text else text

    def feed(self, token_id: int) -> str:
        token = self._codec.token(token_id)
        if token is None or token_id in self._hidden_ids:
            return ""  # the decoder never sees it: a run of bytes goes on across it
        self._held.append(token_id)
        if self._codec.is_byte_token(token):
            return ""
        text = self._decode_held()
        if text:
            self._context, self._held = self._held, []
            self._context_length = len(self._codec.decode(self._context, skip_special_tokens=False))
        return text

    def finish(self) -> str:
        return self._decode_held()

    def _decode_held(self) -> str:
        if not self._held:
            return ""
        return self._codec.decode(self._context + self._held, skip_special_tokens=False)[self._context_length :]


class OutputText:
    """The text of one output as its tokens come, ended by the first stop string.

    Of all stop strings in the text, the one whose last character comes first ends it (the longest, of several that
    end there), so the result does not depend on how the text is divided into tokens. As in vLLM, a stop string must end
    within the text of the tokens after the first `min_tokens`.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams) -> None:
        self._detokenizer = codec.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._released: list[str] = []
        self._pending = ""  # text that may be the beginning of a stop string
        self._num_exempt = 0  # characters from the beginning of the pending text in which no stop string may end

    @property
    def text(self) -> str:
        """Text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def add(self, token_id: int) -> str | None:
        """Takes the next token. Returns the stop string that it completes, if any; the output then ends with it."""
        self._num_tokens += 1
        self._pending += self._detokenizer.feed(token_id)
        if not self._stops:
            self._release(len(self._pending))
            return None

        text = self._pending + self._detokenizer.held_text
        if self._num_tokens <= self._min_tokens:
            self._num_exempt = max(self._num_exempt, len(text))
        found = _first_stop(text, self._stops, self._num_exempt)
        if found is not None:
            start, stop = found
            self._pending = text
            self._release(start + len(stop) if self._keeps_stop else start)
            return stop
        self._release(_beginning_of_stop(self._pending, self._stops))
        return None

    def finish(self) -> None:
        """Releases the rest of the text, when the output ends for another reason than a stop string."""
        self._pending += self._detokenizer.finish()
        self._release(len(self._pending))

    def _release(self, num_characters: int) -> None:
        if num_characters:
            self._released.append(self._pending[:num_characters])
            self._pending = self._pending[num_characters:]
            self._num_exempt = max(0, self._num_exempt - num_characters)


def _first_stop(text: str, stops: list[str], num_exempt: int) -> tuple[int, str] | None:
    """Start and text of the stop string that ends first, but not within the exempt characters."""
    first: tuple[int, int, str] | None = None  # end, start, stop string
    for stop in stops:
        start = text.find(stop, max(0, num_exempt - len(stop) + 1))
        if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
            first = (start + len(stop), start, stop)
    return None if first is None else (first[1], first[2])


def _beginning_of_stop(text: str, stops: list[str]) -> int:
    """Where the longest ending of the text starts that is the beginning of a stop string, and not all of it."""
    longest = max(map(len, stops))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        ending = text[start:]
        if any(len(stop) > len(ending) and stop.startswith(ending) for stop in stops):
            return start
    return len(text)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f'messages={messages!r:.60} must be a list of at least one {{"role": ..., "content": ...}}')
    return [_checked_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _checked_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f'{name}={message!r:.60} must be a dict with "role" and "content"')
    for key in ("role", "content"):
        if key not in message:
            others = [str(other) for other in message if other not in ("role", "content")]
            hint = "".join(f"; for {other!r}, {nearest(other, ['role', 'content'])}" for other in others[:1])
            raise RequestError(f"{name} has no {key!r}{hint}")
    if not isinstance(message["role"], str) or not message["role"]:
        raise RequestError(f"{name}: role={message['role']!r:.60} must be a text such as 'user'")
    return {**message, "content": _checked_content(name, message["content"])}


def _checked_content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f'{name}: content={content!r:.60} must be a text, or a list of {{"type": "text", "text": ...}}'
        )
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{name}: content[{place}]={part!r:.60} must be {{"type": "text", "text": ...}}; only text is served'
            )
    return "\n".join(part["text"] for part in content)


def _says_to_add_bos(root: Path) -> bool:
    """What tokenizer.json may leave to tokenizer_config.json (DeepSeek), and transformers 5 no longer looks at."""
    path = root / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return isinstance(config, dict) and config.get("add_bos_token") is True


def _checked_template_arguments(arguments: Any) -> dict[str, Any]:
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise RequestError(f"chat_template_kwargs must map names to values, not {shown(arguments)}")
    for name in arguments:
        if name in RESERVED_TEMPLATE_ARGUMENTS:
            raise RequestError(f"chat_template_kwargs cannot set {name!r}: it is not one of the template's own")
    return dict(arguments)


def _damage(root: Path, names: list[str], error: Exception) -> str:
    """What is wrong with a tokenizer that does not load, naming the file at fault as well as can be told."""
    for name in [*names, "config.json"]:
        path = root / name
        if path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, OSError) as cause:
                return f"{path} is damaged ({cause}); copy the file again from where the checkpoint came from"
    if "trust_remote_code" in str(error):
        return (
            f"the tokenizer in {root} comes as Python code, which moeserve does not run from a checkpoint; "
            "add a tokenizer.json and name no auto_map in tokenizer_config.json"
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    remedy = "" if "tokenizer.json" in names else "; add the checkpoint's tokenizer.json"
    return f"the tokenizer in {root / names[0]} cannot be loaded: {reason:.400}{remedy}"


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The decoder of a tokenizer, step by step. No decoder: none."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())  # the library's own way to write one decoder as JSON
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_stepwise(decoder: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in decoder]
    if not STEPWISE_DECODERS.issuperset(kinds):
        return False
    # From Fuse on, a step sees the whole text: it may take the leading space, but nothing that later tokens decide.
    whole_text_steps = decoder[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    return all(
        step["type"] == "Fuse" or (step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0)
        for step in whole_text_steps
    )
