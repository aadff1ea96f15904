"""`moeserve chat`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from moeserve.cli.chat_models import ChatModel, LocalModel, RemoteModel, ServerError
from moeserve.cli.parser import Parser, add_engine_flags, engine_settings, reader
from moeserve.errors import RequestError

QUOTES = '"""'
HELP = """\
/system TEXT   set the system prompt; without TEXT: remove it
/undo          forget the last question and its answer
/reset         forget the conversation
/exit          leave, as does Ctrl-D
A line that ends with \\ continues on the next one. Lines between \"\"\" and \"\"\" are one message.
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
        converse(model, sampling, options.system, questions(_typed_line))


def converse(
    model: ChatModel,
    sampling: dict[str, Any],
    system: str | None,
    questions: Iterator[str],
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    write_aside: Callable[[str], None] | None = None,
) -> None:
    """Answer each question, until there are no more questions or the user types /exit.

    Args:
        questions: what the user types: questions and commands.
        write: writes answers.
        write_aside: writes reasoning and the speed of answers; None: to standard error.
    """
    conversation = Conversation(system)
    for question in questions:
        command, _, text = question.strip().partition(" ")
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
                _answer(model, sampling, conversation, question.strip(), write, write_aside or _write_dimly)


class Conversation:
    """A system prompt, and questions with their answers."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []

    def with_question(self, question: str) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, {"role": "user", "content": question}]


def _answer(
    model: ChatModel,
    sampling: dict[str, Any],
    conversation: Conversation,
    question: str,
    write: Callable[[str], None],
    write_aside: Callable[[str], None],
) -> None:
    """Write an answer and its reasoning as they are generated. Keep question and answer, unless the model fails."""
    answer, is_reasoning = "", False
    num_tokens: int | None = None
    began_s = time.monotonic()
    try:
        with contextlib.closing(model.answer(conversation.with_question(question), sampling)) as pieces:
            for piece in pieces:
                num_tokens = piece.num_tokens or num_tokens
                if piece.reasoning:
                    write_aside(piece.reasoning if is_reasoning else f"[reasoning]\n{piece.reasoning}")
                    is_reasoning = True
                if piece.content:
                    write_aside("\n[answer]\n" * is_reasoning)
                    is_reasoning = False
                    answer += piece.content
                    write(piece.content)
    except KeyboardInterrupt:
        write(" [ended]")
    except (RequestError, ServerError) as error:
        write(f"{error}\n")
        return
    write("\n")
    if num_tokens:
        write_aside(f"[{num_tokens} tokens, {num_tokens / (time.monotonic() - began_s):.1f} tokens/s]\n")
    conversation.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def questions(read_line: Callable[[bool], str]) -> Iterator[str]:
    """Yield each message that the user types. A backslash continues a line, and three quotes enclose several lines.

    Args:
        read_line: returns a line of input, and raises EOFError at the end. The argument is True if the line continues a
            message. KeyboardInterrupt discards the message.
    """
    while True:
        try:
            message = read_line(False)
            if message.startswith(QUOTES):
                message = message.removeprefix(QUOTES)
                while not message.endswith(QUOTES):
                    message += "\n" + read_line(True)
                message = message.removesuffix(QUOTES)
            else:
                while message.endswith("\\"):
                    message = message.removesuffix("\\") + "\n" + read_line(True)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
        else:
            yield message


def _typed_line(continues: bool) -> str:
    """Read a line of standard input, with a prompt if it is a terminal."""
    if not sys.stdin.isatty():
        return input()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, adds history and editing to `input`
    return input("... " if continues else "\n> ")


def _write_dimly(text: str) -> None:
    """Write to standard error, so that standard output has the answers alone."""
    if text:
        is_terminal = sys.stderr.isatty()
        print(f"\x1b[2m{text}\x1b[0m" if is_terminal else text, end="", file=sys.stderr, flush=True)
