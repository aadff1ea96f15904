"""`moeserve chat`: conversations with a server and with a model of its own, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer
from tiny_model import save_tiny_model

from moeserve.cli.chat import converse, questions
from moeserve.cli.chat_models import LocalModel, Piece, RemoteModel, ServerError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def talk(
    server: RunningServer, *lines: str, system: str | None = None, aside: list[str] | None = None
) -> tuple[str, list[list[dict[str, str]]]]:
    """Return what was written, and the conversations that the server received."""
    model = RemoteModel(f"{server.url}/v1", "none", None)
    received: list[list[dict[str, str]]] = []
    aside = [] if aside is None else aside
    answer = model.answer

    def noted(messages: list[dict[str, str]], sampling: Any) -> Any:
        received.append(json.loads(json.dumps(messages)))
        return answer(messages, sampling)

    model.answer = noted  # type: ignore[method-assign]
    written: list[str] = []
    converse(model, GREEDY, system, iter(lines), written.append, aside.append)
    return "".join(written), received


def test_a_conversation_has_its_history(server: RunningServer) -> None:
    question, answer = "What is the capital of England?", "The capital of England is London."
    written, received = talk(
        server, question, "Why?", "/undo", "And?", "/reset", "/system Be brief.", "Who?", "/exit", "No"
    )
    assert written.startswith(f"{answer}\n")
    first = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert received[0] == first[:1]
    assert received[1] == [*first, {"role": "user", "content": "Why?"}]
    assert received[2] == [*first, {"role": "user", "content": "And?"}]
    assert received[3] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert len(received) == 4


def test_a_refused_question_is_forgotten(server: RunningServer) -> None:
    written, received = talk(server, "long " * 2000, "/unknown", "Hi")
    assert "status 400" in written
    assert "/unknown" in written
    assert received[1] == [{"role": "user", "content": "Hi"}]


def test_a_server_that_cannot_be_reached() -> None:
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        RemoteModel("http://127.0.0.1:9/v1", "none", None)


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_alone(default_cache: Path) -> None:
    command = [sys.executable, "-m", "moeserve", "chat", "--max-model-len", "1024", "--kv-cache-memory", "64MiB"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("Count to one hundred, and explain each number.\n")
        process.stdin.flush()
        assert "/help" in process.stdout.readline()
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate("/reset\nWhat is the capital of England?\n", timeout=60)
        assert "[ended]" in rest
        assert rest.endswith("The capital of England is London.\n")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


class ThinkingModel:
    """A model that reasons before each answer, and notes the conversations that it receives."""

    name = "thinker"

    def __init__(self) -> None:
        self.received: list[list[dict[str, str]]] = []

    def answer(self, messages: list[dict[str, str]], sampling: Any) -> Generator[Piece, None, None]:
        self.received.append([*messages])
        yield Piece(reasoning="Let me ")
        yield Piece(reasoning="think.")
        yield Piece(content="Yes", num_tokens=5)
        yield Piece(content=".")

    def close(self) -> None: ...


def test_reasoning_is_apart_and_is_not_sent_back() -> None:
    model = ThinkingModel()
    written: list[str] = []
    aside: list[str] = []
    converse(model, {}, None, iter(["One?", "Two?"]), written.append, aside.append)
    assert "".join(written) == "Yes.\nYes.\n"
    assert "Let me think." in "".join(aside)
    assert model.received[1][:2] == [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]


def test_the_speed_of_an_answer_is_shown_at_its_end(server: RunningServer) -> None:
    aside: list[str] = []
    talk(server, "What is the capital of England?", aside=aside)
    assert re.fullmatch(r"\[8 tokens, \d+\.\d tokens/s\]\n", "".join(aside))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_reasoning_of_a_server_is_no_part_of_the_answer(name: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            deltas = [{name: "Hm."}, {"content": "Yes."}]
            events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
            events.append({"choices": [], "usage": {"completion_tokens": 7}})
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as stand_in:
        thread = threading.Thread(target=stand_in.handle_request)
        thread.start()
        model = RemoteModel(f"http://127.0.0.1:{stand_in.server_port}/v1", "none", "model")
        pieces = list(model.answer([{"role": "user", "content": "?"}], {}))
        thread.join()
    assert pieces == [Piece(reasoning="Hm."), Piece(content="Yes."), Piece(num_tokens=7)]


def test_the_reasoning_of_a_local_model_is_no_part_of_the_answer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "<think>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = LocalModel({"model": str(folder), "dtype": "float32", "max_model_len": 64})
    try:
        pieces = list(model.answer([{"role": "user", "content": "?"}], {"max_tokens": 8, "ignore_eos": True}))
    finally:
        model.close()
    assert "".join(piece.reasoning for piece in pieces)
    assert "".join(piece.content for piece in pieces) == ""
    assert pieces[-1].num_tokens == 8


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["one\\", "two", "three"], ["one\ntwo", "three"]),
        (['"""one', "", '  two"""', "three"], ["one\n\n  two", "three"]),
        (['"""one"""'], ["one"]),
        (["one\\", KeyboardInterrupt(), "two"], ["two"]),
    ],
)
def test_a_message_may_have_several_lines(typed: list[str | BaseException], expected: list[str]) -> None:
    rest = iter(typed)

    def read_line(continues: bool) -> str:
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    assert list(questions(read_line)) == expected
