"""Time to the first token and between tokens, while requests arrive at given rates.

    moeserve bench latency [--model NAME ...] [--rate 0.5 --rate 1 ...] [--requests 16] [--rounds 3] [--json PATH]

- *arrivals*: a Poisson process, independent of answers. Prompts are new random token ids, and outputs have a fixed
  number of tokens. Rates alternate round by round, after a few uncounted requests. A round ends when all its requests
  have.
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
from moeserve.bench.decode import Workload, draw_prompts
from moeserve.bench.engines import QUANTIZATIONS
from moeserve.bench.harness import Row, add_models, at_least, interleave, make_parser, percentile
from moeserve.bench.report import show_and_save
from moeserve.ops.native import set_num_threads
from moeserve.sampling_params import RequestOutputKind

MODELS = ("mixtral-mini",)
RATES = (0.25, 0.5, 1.0)  # requests per second
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Waits:
    """The waiting times of one round, in seconds."""

    first_token: list[float]  # by request
    between_tokens: list[float]  # over all requests
    total: float  # from the first arrival to the last token


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moeserve bench latency", "Time to first token and between tokens under load.", rounds=3)
    add_models(parser, MODELS)
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
            traffic = Workload(options.requests, options.prompt_tokens, options.new_tokens, llm.config.texts.vocab_size)
            facts = {"benchmark": "latency", "model": model.name, "engine": options.engine}
            show_and_save(options.json, [facts | row for row in measure(llm, rates, traffic, options.rounds)])


def measure(llm: LLM, rates: Sequence[float], traffic: Workload, num_rounds: int) -> list[Row]:
    """Return one row for each rate."""
    random_source = random.Random(0)

    def one_round(rate: float) -> Waits:
        arrivals = draw_arrivals(rate, traffic.batch, random_source)
        return serve(llm, arrivals, draw_prompts(traffic, random_source), traffic.new_tokens)

    serve(llm, [0.0] * NUM_WARM_UP, draw_prompts(traffic, random_source)[:NUM_WARM_UP], traffic.new_tokens)
    rounds = interleave({str(rate): functools.partial(one_round, rate) for rate in rates}, num_rounds)
    num_tokens = traffic.batch * traffic.new_tokens
    return [
        {
            "requests_per_second": rate,
            "traffic": asdict(traffic),
            "first_token": spread([wait for waits in rounds[str(rate)] for wait in waits.first_token]),
            "between_tokens": spread([wait for waits in rounds[str(rate)] for wait in waits.between_tokens]),
            "tokens_per_second": statistics.median(num_tokens / waits.total for waits in rounds[str(rate)]),
            "rounds": [asdict(waits) for waits in rounds[str(rate)]],
        }
        for rate in rates
    ]


def serve(llm: LLM, arrivals: Sequence[float], prompts: Sequence[list[int]], new_tokens: int) -> Waits:
    """Submit each request at its arrival time, and run engine steps until all requests have ended.

    Args:
        arrivals: seconds from the start of the round, by request.

    Raises:
        EngineError: a request failed.
    """
    session = llm.session
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    last_time: dict[str, float] = {}  # by unfinished request: time of the arrival, or of the last token
    first_token: list[float] = []
    between_tokens: list[float] = []
    has_token: set[str] = set()
    waiting = list(zip(arrivals, prompts, strict=False))
    start = time.perf_counter()
    while waiting or last_time:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            arrived_at, prompt = waiting.pop(0)
            (prompt_id,) = session.submit([{"prompt_token_ids": prompt}], params)
            last_time[prompt_id] = arrived_at
        if not last_time:
            time.sleep(waiting[0][0] - now)
            continue
        for prompt_id in session.poll():
            session.raise_error(prompt_id)
            output = session.new_output(prompt_id)
            now = time.perf_counter() - start
            for _ in [] if output is None else output.outputs[0].token_ids:
                (between_tokens if prompt_id in has_token else first_token).append(now - last_time[prompt_id])
                has_token.add(prompt_id)
                last_time[prompt_id] = now
            if output is not None and output.finished:
                del last_time[prompt_id]
                session.discard([prompt_id])
    return Waits(first_token, between_tokens, time.perf_counter() - start - arrivals[0])


def draw_arrivals(rate: float, num_requests: int, random_source: random.Random) -> list[float]:
    """Draw the arrivals of a Poisson process of `rate` requests per second."""
    return list(itertools.accumulate(random_source.expovariate(rate) for _ in range(num_requests)))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "p99": percentile(seconds, 0.99)}


if __name__ == "__main__":
    main()
