"""Responses that later requests refer to, by OpenAI's client, and the bounds of their store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.server.openai.response_store import OVERHEAD, ResponseStore, StoredResponse

ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}


@pytest.fixture(scope="module")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=512, max_num_seqs=8, show_progress=False)
    with running(llm) as server:
        yield server
    llm.shutdown()


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def num_prompt(response: Any) -> int:
    return response.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_response(store_server: RunningServer, stream: bool) -> None:
    client = store_server.openai()
    if stream:
        first = list(client.responses.create(**ASKED, input="Hi", stream=True))[-1].response
    else:
        first = client.responses.create(**ASKED, input="Hi")
    whole = [user("Hi"), *first.output, user("Go")]
    expected = client.responses.create(**ASKED, input=whole, store=False)
    continued = client.responses.create(**ASKED, input="Go", previous_response_id=first.id)
    assert continued.output_text == expected.output_text
    assert num_prompt(continued) == num_prompt(expected) > num_prompt(first)
    assert continued.previous_response_id == first.id
    again = client.responses.create(**ASKED, input="On", previous_response_id=continued.id)
    longer = client.responses.create(**ASKED, input=[*whole, *continued.output, user("On")])
    assert num_prompt(again) == num_prompt(longer)


def test_items_are_found_by_their_ids(store_server: RunningServer) -> None:
    client = store_server.openai()
    first = client.responses.create(**ASKED, input="Hi")
    (message,) = first.output
    expected = client.responses.create(**ASKED, input=[user("Hi"), message, user("Go")])
    references: list[Any] = [{"type": "item_reference", "id": message.id}, {"id": message.id}]
    for reference in references:
        found = client.responses.create(**ASKED, input=[user("Hi"), reference, user("Go")])
        assert (found.output_text, num_prompt(found)) == (expected.output_text, num_prompt(expected))


def test_responses_are_read_and_deleted(store_server: RunningServer) -> None:
    client = store_server.openai()
    first = client.responses.create(**ASKED, input="Hi")
    assert first.store is True
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=first.id):
            call(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id) as refused:
        client.responses.create(**ASKED, input="Go", previous_response_id=first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError, match=first.output[0].id or "") as missing:
        client.responses.create(**ASKED, input=[{"type": "item_reference", "id": first.output[0].id}])
    assert (missing.value.param, missing.value.code) == ("input", "item_not_found")


def test_responses_that_must_not_be_stored_are_not(store_server: RunningServer) -> None:
    client = store_server.openai()
    first = client.responses.create(**ASKED, input="Hi", store=False)
    assert first.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with running(store_server.llm, response_store=False) as server:
        client = server.openai()
        first = client.responses.create(**ASKED, input="Hi", store=True)
        assert first.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**ASKED, input="Go", previous_response_id=first.id)


def test_responses_of_another_key_are_not_found(store_server: RunningServer) -> None:
    with running(store_server.llm, api_key=["first", "second"]) as server:
        mine = server.openai(api_key="first").responses.create(**ASKED, input="Hi")
        other = server.openai(api_key="second")
        for call in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(mine.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(**ASKED, input=[{"type": "item_reference", "id": mine.output[0].id}])
        assert server.openai(api_key="first").responses.retrieve(mine.id) == mine


def stored(size: int, item: str) -> StoredResponse:
    return StoredResponse(response=b"x" * size, context=(), items={item: b""})


def test_the_oldest_responses_are_dropped() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10 * OVERHEAD)
    for number in range(5):
        store.add("a", f"resp_{number}", stored(10, f"msg_{number}"))
    assert [store.find("a", f"resp_{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert [store.find_item("a", f"msg_{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    store.add("a", "resp_5", stored(7 * OVERHEAD, "msg_5"))  # leaves room for one more
    assert [store.find("a", f"resp_{number}") is not None for number in range(6)] == [False] * 4 + [True] * 2
    store.add("a", "resp_6", stored(11 * OVERHEAD, "msg_6"))  # too large
    assert store.find("a", "resp_6") is None
    assert store.find("a", "resp_5") is not None
    assert not store.delete("b", "resp_5")
    assert store.delete("a", "resp_5")
    assert store.find_item("a", "msg_5") is None
