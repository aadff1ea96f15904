"""Models that `moeserve chat` talks to: a model in this process, or the model of a server."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moeserve.errors import MoeserveError, shown

TIMEOUT_S = 600


class ServerError(MoeserveError, RuntimeError):
    """The server cannot be reached, or has refused a request."""


@dataclass(frozen=True)
class Piece:
    """A new part of an answer."""

    content: str = ""
    reasoning: str = ""
    num_tokens: int | None = None  # tokens of the whole answer so far; None: unknown


class ChatModel(Protocol):
    """A model that answers conversations."""

    name: str

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Yield an answer in pieces. Closing the generator stops the answer.

        Raises:
            RequestError, ServerError: the model refuses the conversation, or cannot be reached.
        """
        ...

    def close(self) -> None: ...


class LocalModel:
    """A model in this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from moeserve import LLM  # imports torch
        from moeserve.api.answers import find_family
        from moeserve.api.default_model import model_name

        self._llm = LLM(**settings)
        template = None if self._llm.codec is None else self._llm.codec.chat_template
        self._family = find_family(None, self._llm.config.weights.model_path, template)
        self.name = model_name(settings.get("model"))

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[Piece, None, None]:
        from moeserve import RequestOutputKind
        from moeserve.api.answers import readable_params

        prompt = self._llm.chat_prompt(messages)
        codec = self._llm.codec
        assert codec is not None, "a conversation was rendered"
        begun = self._family.starts_in_reasoning(codec.decode(prompt["prompt_token_ids"], skip_special_tokens=False))
        parser = self._family.make(None, starts_in_reasoning=begun, parse_tools=False, parse_reasoning=True)
        defaults = self._llm.get_default_sampling_params()
        params = dataclasses.replace(defaults, **sampling, output_kind=RequestOutputKind.DELTA)
        num_tokens = 0
        for output in self._llm.stream(prompt, readable_params(params, self._family, codec)):
            (new,) = output.outputs
            num_tokens += len(new.token_ids)
            for part in [parser.feed(new.text, new.token_ids), *([parser.finish()] if output.finished else [])]:
                yield Piece(part.content, part.reasoning, num_tokens)

    def close(self) -> None:
        self._llm.shutdown()


class RemoteModel:
    """A model of a server with OpenAI's API."""

    def __init__(self, url: str, api_key: str, name: str | None) -> None:
        """
        Args:
            url: URL that ends with the version, as in http://127.0.0.1:8000/v1.
            name: name of the model; None: the server's first model.

        Raises:
            ServerError: the server cannot be reached, or lists no model.
        """
        self._url, self._api_key = url.rstrip("/"), api_key
        if name is None:
            with self._open("models", None) as answer:
                models = json.load(answer).get("data")
            if not models:
                raise ServerError(f"{url} serves no model")
            name = models[0]["id"]
        self.name = name

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[Piece, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("chat/completions", body | dict(sampling)) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not line.startswith(b"data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                num_tokens = (event.get("usage") or {}).get("completion_tokens")
                deltas = [choice["delta"] for choice in event["choices"]]
                yield Piece(
                    "".join(delta.get("content") or "" for delta in deltas),
                    # Some other servers use the second name.
                    "".join(delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in deltas),
                    num_tokens,
                )

    def close(self) -> None:
        pass

    def _open(self, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._url}/{path}", data, headers)
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error)) from None
        except (OSError, ValueError) as error:
            raise ServerError(f"{self._url} cannot be reached: {getattr(error, 'reason', error)}") from None


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return f"status {error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}: {shown(text)}"
