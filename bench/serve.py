"""Load on a server with OpenAI's API, and the latencies of its clients.

- *traffic*: lengths, arrival times and common prefixes of recorded requests, from the files that `moeserve simulate`
  reads, or one pair of lengths. Prompts are random token ids, which need no tokenizer; equal blocks of the record
  become equal tokens.
- *--clients*: each client sends its next request when its last one has ended. *--rate*: requests are sent at the
  recorded times, scaled to this many requests per second, whether or not earlier ones have ended.
- *first token*: from sending a request to its first text. *between tokens*: from one event with text to the next.
- *goodput*: requests per second whose time to the first token and mean time between tokens are within the limits
  --first-token-within and --token-within.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from moeserve.bench.harness import Row, at_least, environment, make_parser, percentile, save
from moeserve.bench.plots import Panel, save_bars
from moeserve.errors import MoeserveError, missing_extra
from moeserve.planner.traffic import RecordedRequest, Traffic, choose_traffic

TIMEOUT_S = 3600
FIRST_TOKEN_ID = 100  # lower ids are often special


class ServerUnusableError(MoeserveError, RuntimeError):
    """The server cannot be reached, or has answered none of the requests."""


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass
class Answer:
    """The waiting times of one request, in seconds."""

    num_prompt: int = 0
    num_output: int = 0
    event_times: list[float] = field(default_factory=list)  # time of each event with text, from sending the request
    whole: float = 0.0
    error: str | None = None

    def note(self, event: _Event, now: float) -> None:
        """Add an event that arrived `now` seconds after the request was sent."""
        if event.error is not None:
            self.error = str(event.error)[:200]
        # Some servers report the end of an output in an event without text.
        if event.choices and (event.choices[0].text or event.choices[0].finish_reason is None):
            self.event_times.append(now)
        if event.usage is not None:
            self.num_prompt, self.num_output = event.usage.prompt_tokens, event.usage.completion_tokens

    @property
    def first_token(self) -> float:
        return self.event_times[0]

    @property
    def between_tokens(self) -> list[float]:
        return [after - before for before, after in zip(self.event_times, self.event_times[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """The mean time between tokens after the first."""
        return (self.event_times[-1] - self.first_token) / max(1, self.num_output - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("serve", __doc__, rounds=None, threads=False)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the server's first model")
    parser.add_argument(
        "--traffic", help="a .jsonl file (Mooncake's), a .csv file (Azure's), or PROMPT:OUTPUT in tokens"
    )
    parser.add_argument("--length", type=float, default=1.0, help="multiplies recorded lengths (default: 1)")
    parser.add_argument("--requests", type=at_least(1), default=64, help="number of requests (default: 64)")
    clients = parser.add_mutually_exclusive_group()
    clients.add_argument("--clients", type=at_least(1), default=8, help="concurrent clients (default: 8)")
    clients.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--vocab-size", type=at_least(1000), default=30000, help="of random tokens (default: 30000)")
    parser.add_argument("--first-token-within", type=float, default=2.0, help="seconds, for goodput (default: 2)")
    parser.add_argument("--token-within", type=float, default=0.2, help="seconds, for goodput (default: 0.2)")
    parser.add_argument(
        "--plot", type=Path, help="write charts of the waiting times as SVG, for light and for dark pages"
    )
    options = parser.parse_args(arguments)
    if options.rate is not None and options.rate <= 0:
        parser.error("--rate must be more than 0")

    requests = take(choose_traffic(options.traffic).scaled(length=options.length), options.requests)
    prompts = draw_prompts(requests, options.vocab_size)
    arrivals = None if options.rate is None else arrivals_at(requests, options.rate)
    how = {"num_clients": options.clients, "arrivals": arrivals, "model": options.model, "api_key": options.api_key}
    answers, seconds = asyncio.run(load(options.url, requests, prompts, **how))
    row = summary(answers, seconds, options.first_token_within, options.token_within)
    asked = {"clients": options.clients} if options.rate is None else {"requests_per_second": options.rate}
    facts = {"benchmark": "serve", "url": options.url, "traffic": options.traffic or "sample", "length": options.length}
    show(row)
    if options.json is not None:
        save(options.json, [facts | asked | row | {"environment": environment()}])
    if options.plot is not None:
        waits = {name.replace("_", " "): row[name] for name in ("first_token", "between_tokens")}
        title = f"{row['output_tokens_per_second']:.0f} output tokens per second"
        save_bars(options.plot, [Panel(title, waits)], "seconds")


def take(traffic: Traffic, num_requests: int) -> list[RecordedRequest]:
    """Return the first requests of the traffic, which is repeated if it has too few."""
    recorded = traffic.requests
    period = recorded[-1].arrival_s + 1.0
    return [
        replace(each, arrival_s=each.arrival_s + index // len(recorded) * period)
        for index, each in zip(range(num_requests), itertools.cycle(recorded), strict=False)
    ]


def arrivals_at(requests: Sequence[RecordedRequest], rate: float) -> list[float]:
    """Return the recorded arrival times, scaled to a mean of `rate` requests per second."""
    last = requests[-1].arrival_s
    if not last:
        return [index / rate for index in range(len(requests))]
    return [each.arrival_s / last * len(requests) / rate for each in requests]


def draw_prompts(requests: Sequence[RecordedRequest], vocab_size: int) -> list[list[int]]:
    """Return random token ids. Prompts whose records begin with the same blocks begin with the same tokens."""
    prompts = []
    for number, request in enumerate(requests):
        blocks: Iterable[Any] = request.prefix_blocks or (f"prompt {number}",)
        per_block = -(-request.prompt_tokens // len(request.prefix_blocks or (0,)))
        tokens: list[int] = []
        for block in blocks:
            source = random.Random(f"{block}")
            tokens += [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(per_block)]
        prompts.append(tokens[: request.prompt_tokens])
    return prompts


async def load(
    url: str,
    requests: Sequence[RecordedRequest],
    prompts: Sequence[list[int]],
    *,
    num_clients: int = 1,
    arrivals: Sequence[float] | None = None,
    model: str | None = None,
    api_key: str = "none",
) -> tuple[list[Answer], float]:
    """Send all requests to a server.

    Args:
        arrivals: seconds from the start, by request; None: each client sends its next request after its last.
        model: name of the model; None: the server's first model.

    Returns:
        The answers, and the seconds from the first request to the last token.

    Raises:
        ServerUnusableError: the server cannot be reached.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise missing_extra("the benchmark of servers needs aiohttp", "bench", error) from None

    url = url.rstrip("/")
    answers = [Answer() for _ in requests]
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),  # some servers close idle connections
    ) as session:
        try:
            if model is None:
                async with session.get(f"{url}/models") as listed:
                    model = (await listed.json())["data"][0]["id"]

            async def send(index: int) -> None:
                body = {
                    "model": model,
                    "prompt": prompts[index],
                    "max_tokens": requests[index].output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                try:
                    await _send(session, f"{url}/completions", body, answers[index])
                except aiohttp.ClientPayloadError as error:
                    answers[index].error = f"the answer broke off: {error}"

            return answers, await send_all(send, len(requests), num_clients, arrivals)
        except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
            raise ServerUnusableError(f"{url} does not serve requests: {error}") from None


async def send_all(
    send: Callable[[int], Awaitable[None]], num_requests: int, num_clients: int, arrivals: Sequence[float] | None
) -> float:
    """Send requests by index at their arrival times, or, without these, one after another by each client.

    Returns:
        The seconds from the first request to the end of the last.
    """
    waiting, began_at = iter(range(num_requests)), time.perf_counter()

    async def client() -> None:
        for index in waiting:
            await send(index)

    async def send_at(index: int, arrival_s: float) -> None:
        await asyncio.sleep(arrival_s - (time.perf_counter() - began_at))
        await send(index)

    if arrivals is None:
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return time.perf_counter() - began_at
    await asyncio.gather(*itertools.starmap(send_at, enumerate(arrivals)))
    return time.perf_counter() - began_at - arrivals[0]


async def _send(session: Any, url: str, body: Row, answer: Answer) -> None:
    """Send one request, and record the times of its events, or its error."""
    sent_at = time.perf_counter()
    async with session.post(url, json=body) as response:
        if response.status != 200:
            answer.error = f"status {response.status}: {(await response.text())[:200]}"
            return
        line = b""
        async for received in response.content.iter_any():
            now = time.perf_counter() - sent_at
            *lines, line = (line + received).split(b"\n")
            for each in lines:
                if each.startswith(b"data: ") and not each.startswith(b"data: [DONE]"):
                    answer.note(_EVENT.decode(each[6:]), now)
    answer.whole = time.perf_counter() - sent_at
    if answer.error is None and not answer.event_times:
        answer.error = "the answer has no text"


def summary(answers: Sequence[Answer], seconds: float, first_token_within: float, token_within: float) -> Row:
    """Return the figures of all answers.

    Raises:
        ServerUnusableError: every request failed.
    """
    served = [answer for answer in answers if answer.error is None]
    failed = [answer.error for answer in answers if answer.error is not None]
    if not served:
        raise ServerUnusableError(f"all {len(answers)} requests failed; the first with {failed[0]}")
    between = [wait for answer in served for wait in answer.between_tokens]
    good = [each for each in served if each.first_token <= first_token_within and each.per_token <= token_within]
    return {
        "requests": len(answers),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "requests_served_per_second": len(served) / seconds,
        "prompt_tokens_per_second": sum(answer.num_prompt for answer in served) / seconds,
        "output_tokens_per_second": sum(answer.num_output for answer in served) / seconds,
        "first_token": _spread([answer.first_token for answer in served]),
        "between_tokens": _spread(between or [0.0]),
        "whole": _spread([answer.whole for answer in served]),
        "goodput": len(good) / seconds,
        "goodput_limits": {"first_token": first_token_within, "per_token": token_within},
    }


def show(row: Row) -> None:
    """Print the figures."""
    print(f"{row['requests']} requests, {row['failed']} failed, in {row['seconds']:.1f} s")
    if row["first_failure"]:
        print(f"first failure: {row['first_failure']}")
    for name in ("output_tokens_per_second", "prompt_tokens_per_second", "requests_served_per_second", "goodput"):
        print(f"{name.replace('_', ' '):28} {row[name]:10.2f}")
    print(f"{'milliseconds':28} {'median':>10} {'p90':>10} {'p99':>10}")
    for name in ("first_token", "between_tokens", "whole"):
        figures = "".join(f"{1000 * row[name][each]:11.1f}" for each in ("median", "p90", "p99"))
        print(f"{name.replace('_', ' '):28}{figures}")


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "p90": percentile(seconds, 0.9), "p99": percentile(seconds, 0.99)}
