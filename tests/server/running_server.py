"""A server in this process, and clients of it by others."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import uvicorn

from moeserve import AsyncLLM
from moeserve.server.app import build_app
from moeserve.server.http_server import budget_of, http_config
from moeserve.server.keys import Keys
from moeserve.server.service import Service
from moeserve.server.settings import ServerSettings
from moeserve.server.tracing import open_tracing

MODEL = "small"


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, llm: AsyncLLM, **settings: Any) -> None:
        chosen = ServerSettings(port=0, **settings)
        self.llm = llm
        self.tracing = open_tracing(chosen.otlp_traces_endpoint)
        self.service = Service(
            llm,
            [MODEL],
            max_waiting=chosen.max_waiting,
            parser=chosen.parser_name,
            chat_template=chosen.read_chat_template(),
            trusts_templates=chosen.trust_request_chat_template,
            is_strict=chosen.strict_requests,
            tracing=self.tracing,
        )
        budget = budget_of(chosen)
        app = build_app(self.service, chosen, Keys(chosen.api_key or (), chosen.admin_key or ()), budget)
        self._server = uvicorn.Server(http_config(app, chosen, budget))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def async_openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, **{"api_key": "none", "max_retries": 0} | options)

    def async_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, **{"api_key": "none", "max_retries": 0} | options)

    def token_totals(self) -> tuple[int, int]:
        """Return the tokens of prompts and the generated ones so far, as /metrics counts them."""
        with self.http() as http:
            text = http.get("/metrics").text
        prompt, generated = (
            sum(float(value) for value in re.findall(rf"^moeserve_{name}_tokens_total{{.*}} (.*)$", text, re.MULTILINE))
            for name in ("prompt", "generation")
        )
        return int(prompt), int(generated)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, **options)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def running(llm: AsyncLLM, **settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(llm, **settings)
    try:
        yield server
    finally:
        server.stop()
