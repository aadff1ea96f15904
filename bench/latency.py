"""Time to the first token and between tokens, while requests arrive at given rates.

    moeserve bench latency [--model NAME ...] [--rate 0.5 --rate 1 ...] [--requests 16] [--rounds 3] [--json PATH]

- *arrivals*: a Poisson process; requests do not wait for answers. Prompts are new random token ids, and outputs have a
  fixed number of tokens. Rates alternate round by round, after a few requests that are not counted. A round serves all
  its requests.
- *first token*: from a request's arrival, including the wait for the running step. *between tokens*: from one token to
  the next of the same request. Medians and 99th percentiles are over all requests of all rounds.
- *served*: output tokens per second, from the first arrival to the last token. Where it is below the offered rate,
  requests queue.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.engines import QUANTIZATIONS
from moeserve.bench.harness import Row, at_least, environment, interleave, make_parser, percentile, save, show
from moeserve.bench.limits import LimitProbe, MachineLimits
from moeserve.errors import EngineError
from moeserve.ops.threads import set_num_threads

MODELS = ("mixtral-mini",)
RATES = (0.25, 0.5, 1.0)  # requests per second
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Traffic:
    """The shape of the requests."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Arrival:
    seconds: float  # after the start of the round
    prompt: list[int]


@dataclass(frozen=True)
class Waits:
    """The waiting times of one round, in seconds."""

    first_token: list[float]  # of each request
    between_tokens: list[float]  # of all requests
    total: float  # until the last token
    before: MachineLimits
    after: MachineLimits


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moeserve bench latency", "Time to first token and between tokens under load.", rounds=3)
    parser.add_argument(
        "--model", action="append", help=f"name or folder of a checkpoint, repeatable (default: {', '.join(MODELS)})"
    )
    parser.add_argument(
        "--engine",
        choices=list(QUANTIZATIONS),
        default="moeserve",
        metavar="NAME",
        help=f"default: moeserve [{', '.join(QUANTIZATIONS)}]",
    )
    parser.add_argument("--rate", type=float, action="append", help=f"requests per second (default: {RATES})")
    parser.add_argument("--requests", type=at_least(1), default=16, help="requests of each rate and round")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128)
    parser.add_argument("--new-tokens", type=at_least(2), default=32, help="new tokens of each request")
    options = parser.parse_args(arguments)
    rates: Sequence[float] = options.rate or RATES
    if min(rates) <= 0:
        parser.error("--rate must be more than 0")

    set_num_threads(options.threads)
    probe = LimitProbe()
    for model in map(find_checkpoint, options.model or MODELS):
        with LLM(
            model,
            dtype="bfloat16",
            quantization=QUANTIZATIONS[options.engine],
            device="cpu",
            num_threads=options.threads,
            max_model_len=options.prompt_tokens + options.new_tokens,
            packed_cache=0,  # writing a packed copy would disturb the measurement
        ) as llm:
            traffic = Traffic(options.requests, options.prompt_tokens, options.new_tokens, llm.config.vocab_size)
            show(f"\n{model.name}, {options.engine}, {traffic.prompt_tokens} + {traffic.new_tokens} tokens")
            show(f"{'requests/s':>10}{'first token':>14}{'p99':>11}{'between':>11}{'p99':>11}{'served':>16}")
            for row in measure(llm, rates, traffic, options.rounds, probe):
                row = {"benchmark": "latency", "model": model.name, "engine": options.engine, **row}
                show(as_text(row))
                save(options.json, [row])


def measure(llm: LLM, rates: Sequence[float], traffic: Traffic, num_rounds: int, probe: LimitProbe) -> list[Row]:
    """Return one row for each rate."""
    random_source = random.Random(0)
    serve(
        llm, [Arrival(0.0, draw_prompt(traffic, random_source)) for _ in range(NUM_WARM_UP)], traffic.new_tokens, probe
    )

    def one_round(rate: float) -> Waits:
        return serve(llm, draw_arrivals(rate, traffic, random_source), traffic.new_tokens, probe)

    rounds = interleave({str(rate): functools.partial(one_round, rate) for rate in rates}, num_rounds)
    machine = environment()
    num_tokens = traffic.num_requests * traffic.new_tokens
    return [
        {
            "requests_per_second": rate,
            "traffic": asdict(traffic),
            "first_token": spread([wait for waits in rounds[str(rate)] for wait in waits.first_token]),
            "between_tokens": spread([wait for waits in rounds[str(rate)] for wait in waits.between_tokens]),
            "tokens_per_second": statistics.median(num_tokens / waits.total for waits in rounds[str(rate)]),
            "rounds": [asdict(waits) for waits in rounds[str(rate)]],
            "environment": machine,
        }
        for rate in rates
    ]


def serve(llm: LLM, arrivals: Sequence[Arrival], new_tokens: int, probe: LimitProbe) -> Waits:
    """Submit each request at its arrival time, and step the engine until all are served.

    Raises:
        EngineError: a request failed.
    """
    before = probe.measure()
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    last_time: dict[str, float] = {}  # of each unfinished request: its arrival, or its last token
    first_token: list[float] = []
    between_tokens: list[float] = []
    has_token: set[str] = set()
    waiting = list(arrivals)
    start = time.perf_counter()
    while waiting or last_time:
        now = time.perf_counter() - start
        while waiting and waiting[0].seconds <= now:
            arrival = waiting.pop(0)
            (submission,) = llm.frontend.submit([{"prompt_token_ids": arrival.prompt}], params)
            (request,) = submission.requests
            llm.core.add(request)
            last_time[request.request_id] = arrival.seconds
        if not last_time:
            time.sleep(waiting[0].seconds - now)
            continue
        for update in llm.core.step():
            if update.error is not None:
                raise EngineError(update.error)
            output = llm.frontend.update(update)
            now = time.perf_counter() - start
            request_id = update.request_id
            for _ in update.token_ids:
                (between_tokens if request_id in has_token else first_token).append(now - last_time[request_id])
                has_token.add(request_id)
                last_time[request_id] = now
            if output is not None and output.finished:
                del last_time[request_id]
                llm.frontend.discard(output.prompt_id)
    total = time.perf_counter() - start - arrivals[0].seconds
    assert len(first_token) == len(arrivals)
    assert len(between_tokens) == len(arrivals) * (new_tokens - 1)
    return Waits(first_token, between_tokens, total, before, probe.measure())


def draw_arrivals(rate: float, traffic: Traffic, random_source: random.Random) -> list[Arrival]:
    """Draw the arrivals of a Poisson process of `rate` requests per second."""
    gaps = (random_source.expovariate(rate) for _ in range(traffic.num_requests))
    return [Arrival(seconds, draw_prompt(traffic, random_source)) for seconds in itertools.accumulate(gaps)]


def draw_prompt(traffic: Traffic, random_source: random.Random) -> list[int]:
    return random_source.choices(range(traffic.vocab_size), k=traffic.prompt_tokens)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "p99": percentile(seconds, 0.99)}


def as_text(row: Row) -> str:
    waits = [row["first_token"]["median"], row["first_token"]["p99"]]
    waits += [row["between_tokens"]["median"], row["between_tokens"]["p99"]]
    shown = [f"{wait * 1e3:>8.0f} ms" for wait in waits]
    served = f"{row['tokens_per_second']:>7.1f} tokens/s"
    return f"{row['requests_per_second']:>10.2f}   " + "".join(shown) + served


if __name__ == "__main__":
    main()
