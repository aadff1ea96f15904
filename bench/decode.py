"""How fast an engine decodes and how fast it reads prompts. Knows an engine only as a function that generates.

Every request gets a prompt of random token ids and is decoded greedily. No prompt is used twice, so no engine can reuse
keys and values.

- *decode rate*: two runs are timed, one of N new tokens and one of 1. The rate is batch x (N - 1) / (time of N - time
  of 1): the prompt's share and all fixed costs fall out, for all engines alike.
- *prefill rate*: the prompt tokens of the batch, over the time until each request has its first token.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moeserve import LLM, SamplingParams
from moeserve.bench.harness import interleave

# prompts, tokens to add to each -> the seconds it took, by a clock as near to the engine as possible
Generate = Callable[[list[list[int]], int], float]


@dataclass(frozen=True)
class Workload:
    """What one timed run is given: `batch` prompts of `prompt_tokens` random ids, `new_tokens` more for each."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int


def measure(engines: Mapping[str, Generate], workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    """Decode rates of each engine in tokens per second, one per round, after a round that is not counted."""
    measures = {name: rate_measure(decode_rate, generate, workload) for name, generate in engines.items()}
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def rate_measure(
    rate: Callable[[Generate, Workload, random.Random], float], generate: Generate, workload: Workload, *, seed: int = 0
) -> Callable[[], float]:
    """A measure for rounds. Engines with one seed see the same prompts in the same order."""
    return functools.partial(rate, generate, workload, random.Random(seed))


def decode_rate(generate: Generate, workload: Workload, source: random.Random) -> float:
    """New tokens per second of all requests together."""
    long_seconds = run_seconds(generate, workload, workload.new_tokens, source)
    short_seconds = run_seconds(generate, workload, 1, source)
    if long_seconds <= short_seconds:
        raise RuntimeError(
            f"{workload.new_tokens} tokens took {long_seconds:.3g} s and 1 token {short_seconds:.3g} s: too short to "
            "measure here; ask for more new tokens"
        )
    return workload.batch * (workload.new_tokens - 1) / (long_seconds - short_seconds)


def prefill_rate(generate: Generate, workload: Workload, source: random.Random) -> float:
    """Prompt tokens per second of all requests together."""
    return workload.batch * workload.prompt_tokens / run_seconds(generate, workload, 1, source)


def run_seconds(generate: Generate, workload: Workload, num_tokens: int, source: random.Random) -> float:
    """Seconds that a batch of new prompts takes to its last token."""
    return generate(draw_prompts(workload, source), num_tokens)


def draw_prompts(workload: Workload, source: random.Random) -> list[list[int]]:
    return [source.choices(range(workload.vocab_size), k=workload.prompt_tokens) for _ in range(workload.batch)]


def generate_with(llm: LLM) -> Generate:
    """Greedy decoding by moeserve, past the end of sequence."""

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_new = [len(result.outputs[0].token_ids) for result in results]
        if num_new != [num_tokens] * len(prompts):
            raise RuntimeError(f"asked for {len(prompts)} x {num_tokens} tokens, got {num_new}")
        return seconds

    return generate
