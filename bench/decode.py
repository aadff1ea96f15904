"""Decode and prefill rates of an engine.

Every request has a prompt of random token ids and is decoded greedily. No prompt is used twice, so no engine can reuse
keys and values.

- *decode rate*: two runs are timed, with N new tokens and with 1. The rate is batch x (N - 1) / (time of N - time of
  1), which excludes the prompt and all fixed costs.
- *prefill rate*: the prompt tokens of the batch, divided by the time until every request has its first token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moeserve import LLM, SamplingParams

# (prompts, new tokens of each) -> seconds, measured as close to the engine as possible
Generate = Callable[[list[list[int]], int], float]


@dataclass(frozen=True)
class Workload:
    """A timed run: `batch` prompts of `prompt_tokens` random ids, with `new_tokens` new tokens each."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int


def rate_measure(
    kind: Literal["decode", "prefill"], generate: Generate, workload: Workload, *, seed: int = 0
) -> Callable[[], float]:
    """Return a measure of the tokens per second over all requests.

    Engines with the same seed get the same prompts in the same order.
    """
    random_source = random.Random(seed)

    def seconds(num_tokens: int) -> float:
        return generate(draw_prompts(workload, random_source), num_tokens)

    def decode() -> float:
        both, prompt = seconds(workload.new_tokens), seconds(1)
        if both <= prompt:
            raise RuntimeError(
                f"{workload.new_tokens} tokens took {both:.3g} s and 1 token {prompt:.3g} s, which is too short to "
                "measure; use more new tokens"
            )
        return workload.batch * (workload.new_tokens - 1) / (both - prompt)

    return decode if kind == "decode" else lambda: workload.batch * workload.prompt_tokens / seconds(1)


def draw_prompts(workload: Workload, random_source: random.Random) -> list[list[int]]:
    return [random_source.choices(range(workload.vocab_size), k=workload.prompt_tokens) for _ in range(workload.batch)]


def generate_with(llm: LLM, **sampling: Any) -> Generate:
    """Return a function that generates with moeserve, and ignores end-of-sequence tokens.

    Args:
        sampling: fields of `SamplingParams`; by default, tokens are chosen greedily.
    """

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_new = [len(result.outputs[0].token_ids) for result in results]
        if num_new != [num_tokens] * len(prompts):
            raise RuntimeError(f"expected {len(prompts)} x {num_tokens} tokens, got {num_new}")
        return seconds

    return generate
