"""`moeserve chat`: conversations with a server and with a model of its own, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from moeserve.cli.chat import converse
from moeserve.cli.chat_models import RemoteModel, ServerError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def talk(server: RunningServer, *lines: str, system: str | None = None) -> tuple[str, list[list[dict[str, str]]]]:
    """Return what was written, and the conversations that the server received."""
    model = RemoteModel(f"{server.url}/v1", "none", None)
    received = []
    answer = model.answer

    def noted(messages: list[dict[str, str]], sampling: Any) -> Any:
        received.append(json.loads(json.dumps(messages)))
        return answer(messages, sampling)

    model.answer = noted  # type: ignore[method-assign]
    written: list[str] = []
    converse(model, GREEDY, system, iter(lines), written.append)
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


@pytest.mark.usefixtures("ctrl_c")
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
