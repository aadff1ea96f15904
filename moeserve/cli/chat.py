"""`moeserve chat`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from moeserve.cli.chat_models import ChatModel, LocalModel, RemoteModel, ServerError
from moeserve.cli.parser import Parser, add_engine_flags, engine_settings, reader
from moeserve.errors import RequestError

HELP = """\
/system TEXT   set the system prompt; without TEXT: remove it
/undo          forget the last question and its answer
/reset         forget the conversation
/exit          leave, as does Ctrl-D
Ctrl-C stops an answer and keeps the part that was generated."""


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve chat [MODEL] [flags]\n       moeserve chat --url URL [flags]"
    command.add_argument("--url", metavar="URL", help="a server with OpenAI's API, such as http://127.0.0.1:8000/v1")
    command.add_argument("--api-key", default="none", metavar="KEY", help="API key of the server")
    command.add_argument("--served-model", metavar="NAME", help="model of the server (default: its first one)")
    command.add_argument("--system", metavar="TEXT", help="system prompt")
    command.add_argument("--temperature", type=reader(float), metavar="TEMPERATURE", help="0: the most likely tokens")
    command.add_argument(
        "--max-tokens", type=reader(int), default=1024, metavar="TOKENS", help="maximum per answer (default: 1024)"
    )
    add_engine_flags(command)


def run(options: argparse.Namespace) -> None:
    settings = engine_settings(options)
    if options.url is not None and options.on_command_line:
        options.parser.error(f"--url uses the model of a server: leave out {', '.join(options.on_command_line)}")
    sampling = {"max_tokens": options.max_tokens}
    if options.temperature is not None or (settings.get("model") is None and options.url is None):
        sampling["temperature"] = options.temperature or 0.0  # the default model is small, and rambles when sampled
    model: ChatModel
    if options.url is not None:
        model = RemoteModel(options.url, options.api_key, options.served_model)
    else:
        model = LocalModel(settings)
    with contextlib.closing(model):
        print(f"{model.name}: /help lists commands")
        converse(model, sampling, options.system, _typed_lines())


def converse(
    model: ChatModel,
    sampling: dict[str, Any],
    system: str | None,
    lines: Iterator[str],
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> None:
    """Answer each line of input until the lines end or one is /exit."""
    conversation = Conversation(system)
    for line in lines:
        command, _, text = line.strip().partition(" ")
        match command:
            case "":
                continue
            case "/exit":
                return
            case "/help":
                write(HELP + "\n")
            case "/reset":
                conversation.messages.clear()
            case "/undo":
                del conversation.messages[-2:]
            case "/system":
                conversation.system = text.strip() or None
            case _ if command.startswith("/"):
                write(f"unknown command {command}; /help lists commands\n")
            case _:
                _answer(model, sampling, conversation, line.strip(), write)


class Conversation:
    """A system prompt, and questions with their answers."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []

    def with_question(self, question: str) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, {"role": "user", "content": question}]


def _answer(
    model: ChatModel, sampling: dict[str, Any], conversation: Conversation, question: str, write: Callable[[str], None]
) -> None:
    """Write the answer as it is generated. A question whose answer fails is removed."""
    answer = ""
    try:
        with contextlib.closing(model.answer(conversation.with_question(question), sampling)) as pieces:
            for piece in pieces:
                answer += piece
                write(piece)
    except KeyboardInterrupt:
        write(" [ended]")
    except (RequestError, ServerError) as error:
        write(f"{error}\n")
        return
    write("\n")
    conversation.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _typed_lines() -> Iterator[str]:
    """Yield lines of standard input, with a prompt if it is a terminal. Ctrl-C discards a partly typed line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, adds history and editing to `input`
    while True:
        try:
            yield input("\n> " if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
