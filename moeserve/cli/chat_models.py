"""Models that `moeserve chat` talks to: a model in this process, or the model of a server."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from typing import Any, Protocol

from moeserve.errors import MoeserveError, shown

TIMEOUT_S = 600


class ServerError(MoeserveError, RuntimeError):
    """The server cannot be reached, or has refused a request."""


class ChatModel(Protocol):
    """A model that answers conversations."""

    name: str

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
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

        self._llm = LLM(**settings)
        self.name = self._llm.config.model_path.rstrip("/").rpartition("/")[2]

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        from moeserve import RequestOutputKind

        defaults = self._llm.get_default_sampling_params()
        params = dataclasses.replace(defaults, **sampling, output_kind=RequestOutputKind.DELTA)
        for output in self._llm.stream(self._llm.chat_prompt(messages), params):
            yield output.outputs[0].text

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

    def answer(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, **sampling}
        with self._open("chat/completions", body) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not line.startswith(b"data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""

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
