"""One test for each lesson from the advisories of other engines: a bad request harms nobody else.

Each is refused with a second of work at most, its answer shows nothing of the host, and a stream that runs at the same
time gets the bytes that it gets alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hmac
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.config.limits import LIMITS
from moeserve.errors import EngineError
from moeserve.server.errors import api_error
from moeserve.server.keys import Keys

SECONDS = 1.0  # of this process's CPU time until a bad request is answered, in the best of three tries
MAX_MODEL_LEN = 512
MAX_BODY = 8 * 2**20  # bytes
VOCAB = 264
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
HOST = re.compile(r"Traceback|File \"|0x[0-9a-f]{6}|127\.0\.0\.1|\.py\b|/(root|tmp|home|usr|work)/")


def text(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": "a", "max_tokens": 1} | fields


def turn(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | fields


def content(part: dict[str, Any]) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": [part]}]}


def message(content: Any, **fields: Any) -> tuple[str, Any]:
    return MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": content}]} | fields


def nested(depth: int, inner: Any = 1) -> Any:
    for _ in range(depth):
        inner = {"a": [inner]}
    return inner


def schema(schema: Any) -> tuple[str, Any]:
    return turn(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


IMAGE = "http://169.254.169.254/latest/meta-data"
# By lesson: requests that are refused, each a path and a body, as JSON or as bytes.
REFUSED: dict[str, list[tuple[str, Any]]] = {
    "body size": [text(prompt="a" * MAX_BODY), (COMPLETIONS, (b" " * (MAX_BODY // 2),) * 3)],
    "malformed JSON": [
        (COMPLETIONS, body)
        for body in (
            b"{",
            b"null",
            b"\xff\xfe",
            b'{"prompt": "a", "temperature": NaN}',
            b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}",
            b'"' + b'\\"' * 200_000,
        )
    ],
    "nesting": [
        (COMPLETIONS, b"[" * 500_000),
        (COMPLETIONS, b"[" * 300_000 + b"]" * 300_000),
        (COMPLETIONS, b'{"prompt":' * 80_000 + b"1" + b"}" * 80_000),
        turn(chat_template_kwargs=nested(LIMITS.max_nesting // 2)),
        turn(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(400)}}]),
        schema(nested(400)),
    ],
    "prompts per call": [
        text(prompt=["a"] * (LIMITS.max_prompts + 1)),
        text(prompt=["a"] * 20, n=LIMITS.max_outputs // 20 + 1),
        text(prompt=[]),
        text(prompt=[[]]),
    ],
    "messages and tools": [
        turn(messages=[{"role": "user", "content": "a"}] * (LIMITS.max_messages + 1)),
        turn(messages=[]),
        turn(tools=[{"type": "function", "function": {"name": "f"}}] * (LIMITS.max_tools + 1)),
        turn(tools=[{"type": "function", "function": {"name": "f" * 1000}}]),
    ],
    "prompt tokens": [
        text(prompt="a" * MAX_MODEL_LEN),
        text(prompt="a" * 900_000),
        text(prompt=[5] * MAX_MODEL_LEN),
        text(prompt=""),
        turn(messages=[{"role": "user", "content": "a" * 900_000}]),
    ],
    # By each of these, pydantic would make an error for each element, unless the first one ends it.
    "wrong elements": [
        text(prompt=[None] * 10**6),
        text(prompt=[[]] * 10**6),
        text(stop=[None] * 10**6),
        text(stop_token_ids=[None] * 10**6),
        text(logit_bias=dict.fromkeys(map(str, range(500_000)))),
        text(**dict.fromkeys(map(str, range(500_000)))),
        turn(messages=[None] * 10**6),
        turn(messages=[{"role": "user", "content": [None] * 10**6}]),
        turn(messages=[{"role": "user", "content": [{}] * 10**6}]),
        turn(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]),
        turn(messages=[{"role": "assistant", "tool_calls": [None] * 10**6}]),
        turn(tools=[None] * 10**6),
        turn(modalities=[None] * 10**6),
        (RESPONSES, {"input": [None] * 10**6}),
        (RESPONSES, {"input": [{"role": "user", "content": [None] * 10**6}]}),
        (RESPONSES, {"input": "a", "include": [None] * 10**6}),
        message([None] * 10**6),
        message("a", system=[None] * 10**6),
        message("a", stop_sequences=[None] * 10**6),
        ("/detokenize", {"tokens": [None] * 10**6}),
    ],
    "n": [text(n=each) for each in (LIMITS.max_n + 1, 10**9, 0, -1, 1.5, "2", True)],
    "best_of": [text(best_of=each) for each in (2, 10**9, 0, -1)],
    "max_tokens": [text(max_tokens=each) for each in (-2, 2**70, 1.5)] + [turn(max_tokens=0)],
    "logprobs": [
        text(logprobs=LIMITS.max_logprobs + 1),
        text(logprobs=-1),
        text(prompt_logprobs=10**9),
        turn(logprobs=True, top_logprobs=LIMITS.max_logprobs + 1),
        turn(top_logprobs=1),
    ],
    "stop strings": [
        text(stop=[f"{number}" for number in range(LIMITS.max_stop_strings + 1)]),
        text(stop="a" * (LIMITS.max_stop_string_length + 1)),
        text(stop=[1]),
        message("a", stop_sequences=[1]),
    ],
    "logit_bias": [
        text(logit_bias={str(number): 1 for number in range(LIMITS.max_logit_bias + 1)}),
        text(logit_bias={str(VOCAB): 1}),
        text(logit_bias={"-1": 1}),
        text(logit_bias={"x": 1}),
        (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"5": 1e999}}'),
    ],
    "parameters of vLLM": [
        text(allowed_token_ids=[VOCAB]),
        text(allowed_token_ids=[]),
        text(allowed_token_ids=[-1]),
        text(allowed_token_ids="ab"),
        text(bad_words=[""]),
        text(bad_words=["a"] * 65),
        text(bad_words="a"),
        text(truncate_prompt_tokens=0),
        text(truncate_prompt_tokens=-2),
        text(truncate_prompt_tokens=True),
    ],
    "token ids": [
        text(prompt=[VOCAB]),
        text(prompt=[-1]),
        text(prompt=[2**40]),
        text(prompt=[[1, 2], [VOCAB]]),
        text(prompt=[1, "a"]),
        text(stop_token_ids=[VOCAB]),
        text(stop_token_ids=list(range(LIMITS.max_stop_token_ids + 1))),
        ("/detokenize", {"tokens": [5] * (LIMITS.max_token_ids + 1)}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"prompt": "a" * (LIMITS.max_text_length + 1), "return_token_strs": True}),
    ],
    "sampling": [
        text(**{name: value})
        for name, value in (
            ("temperature", -1), ("temperature", 1e9), ("top_p", 2), ("top_k", -2), ("min_p", 2),
            ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**70),
            ("min_tokens", 5), ("cache_salt", "a" * 2000),
        )
    ],
    "templates and addresses": [
        turn(chat_template="{{ cycler.__init__.__globals__ }}"),
        turn(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        turn(chat_template_kwargs={"messages": []}),
        turn(documents=[{"url": IMAGE}]),
        content({"type": "image_url", "image_url": {"url": IMAGE}}),
        content({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}),
        content({"type": "file", "file": {"file_id": "file:///etc/passwd"}}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]}),
        message("a", mcp_servers=[{"type": "url", "url": IMAGE, "name": "x"}]),
        message([{"type": "image", "source": {"type": "url", "url": IMAGE}}]),
    ],
    "names of models": [turn(model="../../etc/passwd"), turn(model=IMAGE), text(model="a" * 100_000)],
    "formats": [
        schema({"$ref": IMAGE}),
        schema({"$ref": "file:///etc/passwd"}),
        schema({"not": {}}),
        schema({"type": "string", "pattern": "(" * 50_000}),
        text(structured_outputs={"regex": "a" * (LIMITS.max_grammar_length + 1)}),
        text(structured_outputs={"choice": ["a"] * (LIMITS.max_choices + 1)}),
        text(structured_outputs={"grammar": "start: start start"}),
        text(structured_outputs={"regex": "a", "choice": ["b"]}),
    ],
}  # fmt: skip
# Formats that are small and may grow large: refused, or served like others.
BOMBS: list[tuple[str, Any]] = [
    text(structured_outputs={"regex": "((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99})"}),
    text(structured_outputs={"regex": "(" + "|".join(f".*{number}.*" for number in range(3000)) + ")"}),
    schema({"type": "array", "items": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, "maxItems": 10**9}),
    schema({"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 10} for i in range(40)} | {"a40": {}},
            "$ref": "#/$defs/a0"}),
]  # fmt: skip
ADMINISTRATION = [
    "/docs",
    "/redoc",
    "/admin",
    "/debug",
    "/sleep",
    "/wake_up",
    "/shutdown",
    "/abort_requests",
    "/collective_rpc",
    "/start_profile",
    "/stop_profile",
    "/load_lora_adapter",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_mm_cache",
    "/update_weights",
    "/init_weights_send_group",
    "/scale_elastic_ep",
    "/invocations",
    "/pause",
    "/resume",
    "/generate",
    "/pickle",
    "/flush_cache",
    "/set_internal_state",
    "/v1/files",
    "/v1/batches",
    "/v1/audio/transcriptions",
    "/v1/embeddings",
    "/tokenizer_info",
    "/../etc/passwd",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, show_progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def bounded(tiny: AsyncLLM) -> Iterator[RunningServer]:
    with running(tiny, max_body_bytes=MAX_BODY) as server:
        yield server


STREAMED: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "temperature": 1.0, "seed": 3}
STREAMED["extra_body"] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def alone(bounded: RunningServer) -> str:
    """The text of the stream without other requests."""
    return bounded.openai().completions.create(**STREAMED).choices[0].text


@contextlib.contextmanager
def streams_are_unharmed(server: RunningServer, alone: str) -> Iterator[None]:
    """Stream an output again and again while the context lasts, and compare each with the one that came alone."""
    is_over, texts, has_begun = threading.Event(), [], threading.Event()

    def stream() -> None:
        client = server.openai()
        while not (is_over.is_set() and texts):
            chunks = []
            for chunk in client.completions.create(**STREAMED, stream=True):
                chunks.append(chunk.choices[0].text)
                has_begun.set()
            texts.append("".join(chunks))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        ended = pool.submit(stream)
        try:
            assert has_begun.wait(60)
            yield
        finally:
            is_over.set()
            ended.result(60)
    assert set(texts) == {alone}


def send(server: RunningServer, path: str, body: Any) -> tuple[int, str]:
    """Return the status and the text of the answer, which must take at most a second of CPU time.

    The clock would also count what other processes do; the CPU time counts the stream that runs here too.
    """
    data = body if isinstance(body, (bytes, tuple)) else json.dumps(body).encode()
    times = []
    with server.http() as http:
        while not times or (min(times) > SECONDS and len(times) < 3):
            begin = time.process_time()
            content = iter(data) if isinstance(data, tuple) else data
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            times.append(time.process_time() - begin)
    assert min(times) <= SECONDS, (path, str(body)[:200], times)
    assert not HOST.search(answer.text), (path, str(body)[:200], answer.text)
    return answer.status_code, answer.text


@pytest.mark.slow
@pytest.mark.parametrize("lesson", REFUSED)
def test_bad_requests_are_refused(bounded: RunningServer, alone: str, lesson: str) -> None:
    with streams_are_unharmed(bounded, alone):
        for path, body in REFUSED[lesson]:
            status, answer = send(bounded, path, body)
            assert status == {"body size": 413, "names of models": 404}.get(lesson, 400), (str(body)[:200], answer)
            assert json.loads(answer)["error"]["message"]


def test_formats_that_grow_harm_their_own_request_alone(bounded: RunningServer, alone: str) -> None:
    with streams_are_unharmed(bounded, alone):
        for path, body in BOMBS:
            status, answer = send(bounded, path, body)
            assert status in (200, 400), answer


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_unknown_paths_and_administration(bounded: RunningServer, method: str) -> None:
    with bounded.http() as http:
        for path in ADMINISTRATION:
            answer = http.request(method, path, json={"lora_name": "x", "lora_path": "/etc"})
            assert answer.status_code == 404, path
            assert not HOST.search(answer.text)
        assert http.request("PUT", CHAT).status_code == 405
        assert http.request("DELETE", f"/v1/models/{MODEL}").status_code == 405


def test_failures_show_nothing_of_the_host() -> None:
    answer = api_error(EngineError("rank 3 at 10.0.0.7:2345 has died; see /root/logs/rank3.log"))
    assert answer.status == 503
    assert not re.search(r"10\.0|/root|rank", str(answer.body))


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is compared with every key, by the function of the standard library for this."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    keys = Keys(["first", "second", "third"])
    for given in ("first", "third", "fourth", "f", "first" * 1000, ""):
        compared.clear()
        assert (keys.client({"authorization": f"Bearer {given}"}) is None) == (given not in ("first", "third"))
        assert compared == [(32, 32)] * 3  # of digests, whose length says nothing about a key


def test_a_prefix_of_another_key_is_never_found(tiny: AsyncLLM) -> None:
    """Neither by chance nor with a salt that the other one has chosen."""
    prompt = "A secret of the first: " + "tell nobody. " * 20

    def cached(key: str, **extra: str) -> int:
        usage = server.openai(api_key=key).completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body=extra
        ).usage  # fmt: skip
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    with running(tiny, api_key=["first", "second"]) as server:
        assert cached("first") == 0
        assert cached("first") > 200
        assert cached("second") == 0
        assert cached("first", cache_salt="a") == 0
        assert cached("second", cache_salt="a") == 0
        assert cached("first", cache_salt="a") == cached("second") > 200
        names = [Keys([key]).client({"x-api-key": key}) for key in ("first", "second")]
        assert cached("second", cache_salt=f"{names[0]}/") == 0  # the form in which salts are derived from keys
