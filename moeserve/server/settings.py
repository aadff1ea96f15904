"""Settings of the HTTP server, beside those of the engine, and of the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from moeserve.config.settings import PositiveInt, setting


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """HTTP server"""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 listens on all interfaces")
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = setting(8000, "port; 0 chooses a free one")
    api_server_count: PositiveInt = setting(
        1, "processes that speak HTTP, all on one port, for an engine in a process of its own"
    )
    served_model_name: list[str] | None = setting(
        None, "name of the model in requests and answers; none: the name of its folder"
    )
    answer_parser: str | None = setting(
        None, "form of the model's tool calls and reasoning, such as hermes; none: found by the chat template"
    )
    api_key: list[str] | None = setting(None, "key that requests must carry; none: no key is needed")
    api_key_file: str | None = setting(None, "file with one key per line")
    max_body_bytes: PositiveInt = setting(8 * 2**20, "most bytes of a request")
    max_waiting: PositiveInt = setting(
        1024, "most outputs that wait until the engine has room for them; further requests are answered with status 429"
    )
    drain_timeout: Annotated[float, msgspec.Meta(ge=0)] = setting(
        30.0, "seconds that requests have to finish after SIGTERM or Ctrl-C; then they end with an error"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL to which traces are sent with OTLP over HTTP, such as http://localhost:4318/v1/traces; none: no traces",
    )
    allow_scale: bool = setting(
        False, "serve POST /scale, with which every client that may send requests can change the number of replicas"
    )
    cors_origin: list[str] | None = setting(None, "origin of web pages that may send requests, or *; none: no others")
    ssl_certfile: str | None = setting(None, "certificate for TLS, with its chain, as a PEM file")
    ssl_keyfile: str | None = setting(None, "private key of the certificate, as a PEM file")


def _required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Router, which passes requests on to other servers and has no engine"""

    prefill: list[str] = _required("URL of a server that computes long prompts, such as http://10.0.0.1:8000")
    decode: list[str] = _required("URL of a server that generates, and computes short prompts")
    min_remote_prefill: PositiveInt = setting(
        1024, "tokens from which prompts are sent to a prefill server; a token is estimated as 4 bytes of text"
    )
    prefill_timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] = setting(
        60.0, "seconds after which a prompt is no longer waited for, and a decode server computes it"
    )
