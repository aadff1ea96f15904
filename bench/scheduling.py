"""The idle time of ranks between steps, and the cost of different callers.

    python -m moeserve.bench.scheduling [--table steps] [--table callers] [--table pipeline] [--rounds 5] [--json PATH]

- *steps*: decoding with one step in flight (`async_scheduling=False`) and with two. *idle* is the fraction of the time
  of decode steps in which a rank, in a thread of this process, computes neither layers nor the head. It includes
  sampling, the engine's loop, and building the step's inputs.
- *callers*: the same prompts through `LLM.generate`, 64 asyncio tasks of an `AsyncLLM`, and 16 threads of an `LLM`.
- *pipeline*: two stages with one core each, with one batch of requests in flight and with two. Two batches of half the
  size read the weights of most experts twice, so they gain less than two batches of the same size.

Rates are in new tokens per second. Configurations are measured alternately; ratios are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from moeserve import LLM, AsyncLLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.decode import Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.harness import Row, add_choices, add_models, at_least, interleave, make_parser
from moeserve.bench.report import show_and_save
from moeserve.engine.core import EngineCore
from moeserve.sampling_params import RequestOutputKind
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import StepInputs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.step_replay import StepOutputs

MODELS = ("qwen3-mini",)
TABLES = ("steps", "callers", "pipeline")
BATCHES = (1, 8, 32)
NUM_TASKS, NUM_THREADS, PIPELINE_BATCH = 64, 16, 16
PROMPT_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("scheduling", "The idle time of ranks between steps.", rounds=5)
    add_models(parser, MODELS)
    add_choices(parser, "--table", TABLES, "all")
    parser.add_argument("--new-tokens", type=at_least(2), default=65, help="new tokens of each request")
    options = parser.parse_args(arguments)
    measures = {"steps": measure_steps, "callers": measure_callers, "pipeline": measure_pipeline}
    for model in options.model or MODELS:
        for table in options.table or TABLES:
            settings = {"num_threads": options.threads, "max_model_len": 512, "enable_prefix_caching": False}
            with ExitStack() as stack:
                rows = measures[table](stack, find_checkpoint(model), settings, options.new_tokens, options.rounds)
            show_and_save(options.json, [row | {"benchmark": "scheduling", "model": model} for row in rows])


def measure_steps(
    stack: ExitStack, model: Path, settings: Mapping[str, Any], new_tokens: int, num_rounds: int
) -> list[Row]:
    ways = {"one step in flight": False, "two steps in flight": True}
    llms = {
        way: stack.enter_context(LLM(model, executor="uniproc", async_scheduling=is_on, **settings))
        for way, is_on in ways.items()
    }
    timers = {way: timer_of(llm) for way, llm in llms.items()}
    rows: list[Row] = []
    for batch in BATCHES:
        workload = Workload(batch, PROMPT_TOKENS, new_tokens, llms["one step in flight"].config.texts.vocab_size)
        rounds = interleave(
            {way: functools.partial(timed_decode, llm, timers[way], workload) for way, llm in llms.items()},
            num_rounds,
            warms_up=True,
        )
        figures = {way: [{"rate": rate, "idle": idle} for rate, idle in samples] for way, samples in rounds.items()}
        rows += rows_of_ways("steps", batch, figures)
    return rows


class ModelTimer:
    """A `StepReplay` that records the start of each decode step, and the time that its layers and head take."""

    def __init__(self, runner: ModelRunner) -> None:
        """Replace the runner's replay, and its model's head."""
        self._replay, self._logits = runner.replay, runner.model.logits
        self.on_layers = self._replay.on_layers
        self.starts: list[float] = []
        self.seconds: list[float] = []
        runner.replay = self
        runner.model.logits = self._timed_logits  # type: ignore[method-assign]

    def padded_size(self, agreement: Agreement) -> int | None:
        return self._replay.padded_size(agreement)

    def capture_ahead(self) -> bool:
        return self._replay.capture_ahead()

    def __call__(self, step: StepInputs) -> StepOutputs:
        start = time.perf_counter()
        outputs = self._replay(step)
        if step.max_rows_per_chunk == 1:
            self.starts.append(start)
            self.seconds.append(time.perf_counter() - start)
        return outputs

    def _timed_logits(self, hidden_TD: Tensor) -> Tensor:
        start = time.perf_counter()
        logits_TV = self._logits(hidden_TD)
        if self.seconds:  # skip the head of a prompt, which precedes the first decode step
            self.seconds[-1] += time.perf_counter() - start
        return logits_TV


def timer_of(llm: LLM) -> ModelTimer:
    assert isinstance(llm.core, EngineCore)
    assert llm.core.executor.worker is not None
    return ModelTimer(llm.core.executor.worker.runner)


def timed_decode(llm: LLM, timer: ModelTimer, workload: Workload) -> tuple[float, float]:
    """Return new tokens per second while decoding, and the fraction of that time in which the rank was idle."""
    timer.starts.clear()
    timer.seconds.clear()
    generate_with(llm)(draw_prompts(workload, random.Random(time.monotonic_ns())), workload.new_tokens)
    num_steps = workload.new_tokens - 2  # from the start of the first decode step to that of the last
    total_s = timer.starts[num_steps] - timer.starts[0]
    return workload.batch * num_steps / total_s, 1 - sum(timer.seconds[:num_steps]) / total_s


def measure_callers(
    stack: ExitStack, model: Path, settings: Mapping[str, Any], new_tokens: int, num_rounds: int
) -> list[Row]:
    llm = stack.enter_context(LLM(model, max_num_seqs=NUM_TASKS, **settings))
    async_llm = AsyncLLM(model, max_num_seqs=NUM_TASKS, **settings)
    stack.callback(async_llm.shutdown)
    workload = Workload(NUM_TASKS, PROMPT_TOKENS, new_tokens, llm.config.texts.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def consume(prompt: list[int]) -> None:
        async for _ in async_llm.generate(prompt, params):
            pass

    async def run_tasks(prompts: list[list[int]]) -> None:
        await asyncio.gather(*map(consume, prompts))

    def run_threads(prompts: list[list[int]]) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            shares = [prompts[index::NUM_THREADS] for index in range(NUM_THREADS)]
            list(pool.map(lambda share: llm.generate(share, params, use_tqdm=False), shares))

    def rate(run: Callable[[list[list[int]]], object]) -> float:
        prompts = draw_prompts(workload, random.Random(time.monotonic_ns()))
        start = time.perf_counter()
        run(prompts)
        return workload.batch * new_tokens / (time.perf_counter() - start)

    callers: dict[str, Callable[[list[list[int]]], object]] = {
        "LLM.generate": lambda prompts: llm.generate(prompts, params, use_tqdm=False),
        f"{NUM_TASKS} tasks": lambda prompts: asyncio.run(run_tasks(prompts)),
        f"{NUM_THREADS} threads": run_threads,
    }
    rounds = interleave(
        {name: functools.partial(rate, run) for name, run in callers.items()}, num_rounds, warms_up=True
    )
    figures = {name: [{"rate": each} for each in samples] for name, samples in rounds.items()}
    return rows_of_ways("callers", NUM_TASKS, figures)


def measure_pipeline(
    stack: ExitStack, model: Path, settings: Mapping[str, Any], new_tokens: int, num_rounds: int
) -> list[Row]:
    shared = dict(settings) | {"num_threads": 1, "pipeline_parallel_size": 2}
    one, two = (stack.enter_context(LLM(model, max_concurrent_batches=count, **shared)) for count in (1, 2))
    batch = PIPELINE_BATCH

    def measure(llm: LLM, num_requests: int) -> Callable[[], float]:
        workload = Workload(num_requests, PROMPT_TOKENS, new_tokens, llm.config.texts.vocab_size)
        return rate_measure("decode", generate_with(llm), workload)

    measures = {
        f"one batch of {batch}": measure(one, batch),
        f"two batches of {batch // 2}": measure(two, batch),
        f"two batches of {batch}": measure(two, 2 * batch),
    }
    rounds = interleave(measures, num_rounds, warms_up=True)
    figures = {way: [{"rate": rate} for rate in samples] for way, samples in rounds.items()}
    return rows_of_ways("pipeline", batch, figures)


def rows_of_ways(table: str, batch: int, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Return the medians of each configuration's figures, and of its rate over that of the first configuration."""
    base = next(iter(figures.values()))
    return [
        {
            "table": table,
            "batch": batch,
            "way": way,
            "rate": statistics.median(each["rate"] for each in samples),
            "ratio": statistics.median(own["rate"] / other["rate"] for own, other in zip(samples, base, strict=True)),
            "idle": statistics.median(each["idle"] for each in samples) if "idle" in samples[0] else None,
            "rounds": list(samples),
        }
        for way, samples in figures.items()
    ]


if __name__ == "__main__":
    main()
