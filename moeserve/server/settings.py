"""Settings of the HTTP server, in addition to those of the engine, and settings of the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from moeserve.config.settings import PositiveInt, setting
from moeserve.errors import SettingsError
from moeserve.processes.logs import LogFormat


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """HTTP server"""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 listens on all interfaces")
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = setting(8000, "port; 0 chooses a free one")
    api_server_count: PositiveInt = setting(1, "HTTP processes, which share one port and an engine in another process")
    served_model_name: list[str] | None = setting(
        None, "names of the model in requests; responses use the first; none: the name of its folder"
    )
    answer_parser: str | None = setting(
        None, "format of tool calls and reasoning, such as hermes; none: detected from the chat template"
    )
    tool_call_parser: str | None = setting(None, "vLLM's name of --answer-parser")
    reasoning_parser: str | None = setting(None, "the same; --tool-call-parser goes before it")
    enable_auto_tool_choice: bool = setting(True, "no effect: tools are always offered to the model")
    chat_template: str | None = setting(None, "file with a template in Jinja, which replaces that of the checkpoint")
    trust_request_chat_template: bool = setting(
        False, "allow requests to have a chat template of their own, which runs in the server"
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "serve GET /tokenizer_info: tokenizer and chat template, for all clients"
    )
    strict_requests: bool = setting(
        False, "refuse requests with unknown fields; otherwise they are logged once per name and ignored"
    )
    response_store: bool = setting(True, "keep recent responses of /v1/responses in memory")
    api_key: list[str] | None = setting(None, "API key that requests must send; none: no key is needed")
    api_key_file: str | None = setting(None, "file with one key per line")
    admin_key: list[str] | None = setting(
        None, "key for POST /reset_prefix_cache and, if there is one, for POST /scale"
    )
    rl_without_key: bool = setting(
        False, "with rl: trainers' routes need no key; every program that reaches the server can replace the weights"
    )
    max_body_bytes: PositiveInt = setting(8 * 2**20, "maximum bytes of a request's body")
    max_bytes_in_flight: PositiveInt = setting(
        32 * 2**20,
        "maximum bytes of all requests that arrive or are parsed; the largest unfinished one ends beyond it",
    )
    keep_alive_timeout: Annotated[float, msgspec.Meta(gt=0)] = setting(
        75.0, "seconds for which an idle connection is kept open after a response"
    )
    allowed_host: list[str] | None = setting(
        None,
        "host name that requests may have, beside addresses and names without a dot; checked only on a "
        "loopback address without API keys",
    )
    max_waiting: PositiveInt = setting(
        1024, "maximum outputs that wait for room in the engine; further requests get status 429"
    )
    drain_timeout: Annotated[float, msgspec.Meta(ge=0)] = setting(
        30.0, "seconds for requests to finish after SIGTERM or Ctrl-C; then they end with an error"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least level of messages; those of requests and statistics are of level info"
    )
    log_format: LogFormat = setting("text", "form of the log; json: an object in each line")
    log_stats_interval: Annotated[float, msgspec.Meta(ge=0, le=86400)] = setting(
        10.0, "seconds between lines of statistics while requests run; 0: none"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL for traces by OTLP over HTTP, such as http://localhost:4318/v1/traces",
    )
    allow_scale: bool = setting(
        False,
        "serve POST /scale, with which every client, or every administrator if admin_key is given, changes "
        "the number of replicas",
    )
    cors_origin: list[str] | None = setting(None, "origin of web pages that may send requests, or *; none: no others")
    ssl_certfile: str | None = setting(None, "certificate for TLS, with its chain, as a PEM file")
    ssl_keyfile: str | None = setting(None, "private key of the certificate, as a PEM file")

    def check_rl(self, rl: bool) -> None:
        """Raise SettingsError if `rl_without_key` does not fit the other settings.

        Args:
            rl: the engine's setting of this name.
        """
        if not self.rl_without_key:
            return
        if not rl:
            raise SettingsError(
                "rl_without_key=True opens the routes for trainers, which exist only with rl: set rl=True, or leave "
                "rl_without_key out"
            )
        for name in ("api_key", "api_key_file", "admin_key"):
            if getattr(self, name):
                raise SettingsError(
                    f"rl_without_key=True and {name} exclude each other: leave {name} out, or leave rl_without_key out "
                    "and give trainers the admin_key"
                )

    @property
    def parser_name(self) -> str | None:
        """The name of the parser of answers, from any of its three settings; None: no name is set."""
        return self.answer_parser or self.tool_call_parser or self.reasoning_parser

    def read_chat_template(self) -> str | None:
        """Return the text of the file with the chat template; None if no file is set.

        Raises:
            SettingsError: the file cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise SettingsError(f"chat_template={self.chat_template!r} cannot be read: {error}") from None


def _required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Router, which forwards requests to other servers and has no engine"""

    prefill: list[str] = _required("URL of a server that computes long prompts, such as http://10.0.0.1:8000")
    decode: list[str] = _required("URL of a server that generates, and computes short prompts")
    min_remote_prefill: PositiveInt = setting(
        1024, "minimum tokens of prompts for a prefill server; a token is estimated as 4 bytes of text"
    )
    prefill_timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] = setting(
        60.0, "seconds after which a decode server computes the prompt instead"
    )
    decode_timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] = setting(
        600.0, "seconds without a byte from a decode server after which its response ends with an error"
    )
