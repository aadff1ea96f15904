"""Developer messages, for templates that know the role and for others."""

from __future__ import annotations

from typing import Any

from running_server import MODEL, RunningServer

from moeserve.api.template_messages import template_messages


def prompt(server: RunningServer, messages: list[dict[str, Any]]) -> str:
    """Return the prompt of a conversation as the model reads it."""
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        return text


def test_developer_messages_are_system_messages(tiny_server: RunningServer) -> None:
    asked = {"role": "user", "content": "Hi"}
    developer, system = ([{"role": role, "content": "Be brief"}, asked] for role in ("developer", "system"))
    assert prompt(tiny_server, developer) == prompt(tiny_server, system)
    client = tiny_server.openai()
    numbers = set()
    for messages in (developer, system):
        items: Any = messages
        usage = client.responses.create(model=MODEL, input=items, max_output_tokens=1).usage
        assert usage is not None
        numbers.add(usage.input_tokens)
    assert len(numbers) == 1


def test_a_template_that_knows_developers_gets_their_messages() -> None:
    messages = [{"role": "developer", "content": "Be brief"}]
    knows = (
        "{% for message in messages %}{% if message.role == 'developer' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    assert template_messages(messages, knows)[0][0]["role"] == "developer"
    plain = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    assert template_messages(messages, plain)[0][0]["role"] == "system"
