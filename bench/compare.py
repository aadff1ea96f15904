"""Settings of the engine, compared by tokens per second.

Rates are in new tokens per second, without prompts, unless stated otherwise. Settings are measured alternately, after a
round that is not counted; ratios are medians over the rounds, to the first setting.

- *steps*: decoding with one step in flight (`async_scheduling=False`) and with two. *idle* is the fraction of the time
  of decode steps in which a rank, in a thread of this process, computes neither layers nor the head.
- *callers*: the same prompts through `LLM.generate`, 64 asyncio tasks of an `AsyncLLM`, and 16 threads of an `LLM`.
- *pipeline*: two stages with one core each, with one batch of requests in flight and with two. Two batches of half the
  size read the weights of most experts twice, so they gain less than two batches of the same size.
- *executors*: one request of a tiny model, so that sending the steps dominates, with ranks in processes (`mp`) and as
  Ray actors, whose steps are sent through a compiled graph or by plain calls. It needs a Ray cluster:
  `moeserve launch --head 127.0.0.1 --num-cpus 8 -- moeserve bench compare executors`.
- *ranks*: two ranks in each layout, with half of the cores each, beside one rank with all cores. All serve equally many
  requests. Prefill is measured as well.
- *speculation*: one request with n-grams. A model with a tokenizer (`--model default`) is asked for the main sentences
  of a text, so that its answer repeats the prompt. The output of random weights soon repeats itself, which gives an
  upper bound. *steps* is the number of steps relative to that without speculation; *processor rate* is
  in tokens per second of processor time.
- *kv_store*: 16 conversations take turns, and the KV cache holds a fourth of their tokens. Evicted blocks are computed
  again, or loaded from the host's memory (`kv_host_memory`). Rates include prompts; *computed* is the fraction of
  prompt and output tokens that the model computed.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from moeserve import LLM, AsyncLLM, SamplingParams
from moeserve.api.default_model import default_model
from moeserve.bench.checkpoints import find_checkpoint, small_mixtral_config
from moeserve.bench.decode import Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.harness import Row, add_models, at_least, interleave, make_parser
from moeserve.bench.report import show_and_save
from moeserve.engine.engine import Engine
from moeserve.engine.local_replica import LocalReplica
from moeserve.machine import usable_cores
from moeserve.models.inspection import inspect
from moeserve.models.registry import describe
from moeserve.sampling_params import RequestOutputKind
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import StepInputs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.step_runner import StepOutputs

MODELS = ("qwen3-mini",)
BATCHES = (1, 8, 32)
NUM_TASKS, NUM_THREADS, PIPELINE_BATCH = 64, 16, 16
PROMPT_TOKENS, PREFILL_TOKENS = 32, 512
NUM_DRAFTS = (2, 4, 6)
CONVERSATIONS, TURNS, AT_A_TIME = 16, 4, 4  # AT_A_TIME: concurrent requests
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 512, 128, 16
TINY = small_mixtral_config(hidden_size=128, expert_size=256, num_layers=2, num_experts=8, vocab_size=1024)
EXECUTORS: dict[str, dict[str, Any]] = {
    "mp": {"executor": "mp"},
    "ray, compiled graph": {"executor": "ray", "ray_compiled_graph": True},
    "ray, plain calls": {"executor": "ray", "ray_compiled_graph": False},
}
TEXT = """The harbour of the old town was built in 1642, after a great fire had destroyed the wooden quay. For two
hundred years it was the largest port of the coast, and ships from eleven countries unloaded spices, timber and wool
there. In 1871 the railway reached the neighbouring city, whose deeper harbour could take steam ships, and trade moved
away within a decade. Today the warehouses are museums and restaurants, and the quay belongs to fishing boats and to
visitors, who come for the market on Saturdays."""
QUESTION = "Summarise this text with its most important sentences, word by word:\n\n" + " ".join(TEXT.split())

Figures = dict[str, float]  # of one measurement; "rate" is among them


@dataclass(frozen=True)
class Comparison:
    """Settings that are measured in alternation."""

    facts: Row
    ways: Mapping[str, Callable[[], Figures]]

    def rows(self, num_rounds: int) -> Iterator[Row]:
        """Yield the medians of each setting's figures, and of the ratios of its rates to those of the first one."""
        samples = interleave(self.ways, num_rounds, warms_up=True)
        base = next(iter(samples.values()))
        for way, own in samples.items():
            row: Row = self.facts | {"way": way}
            for name in own[0]:
                row[name] = statistics.median(each[name] for each in own)
                if name.endswith("rate"):
                    pairs = zip(own, base, strict=True)
                    row[name.replace("rate", "ratio")] = statistics.median(one[name] / two[name] for one, two in pairs)
            yield row | {"rounds": own}


@dataclass(frozen=True)
class Setup:
    """The model of a comparison, and the engines that live as long as `stack`."""

    stack: ExitStack
    model: Path
    num_threads: int
    new_tokens: int

    def start(self, **settings: Any) -> LLM:
        shared = {"num_threads": self.num_threads, "max_model_len": 512, "enable_prefix_caching": False}
        return self.stack.enter_context(LLM(self.model, show_progress=False, **shared | settings))

    def workload(self, batch: int, llm: LLM) -> Workload:
        return Workload(batch, PROMPT_TOKENS, self.new_tokens, llm.config.texts.vocab_size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("compare", __doc__, rounds=5)
    parser.add_argument("table", nargs="+", choices=TABLES, metavar="TABLE", help=f"some of {', '.join(TABLES)}")
    add_models(parser, MODELS)
    parser.add_argument("--new-tokens", type=at_least(3), default=65, help="new tokens of each request (default: 65)")
    options = parser.parse_args(arguments)
    for model, table in itertools.product(options.model or MODELS, options.table):
        folder = default_model() if model == "default" else find_checkpoint(model)
        with ExitStack() as stack:
            for comparison in TABLES[table](Setup(stack, folder, options.threads, options.new_tokens)):
                facts = {"benchmark": "compare", "table": table, "model": Path(model).name}
                show_and_save(options.json, [facts | row for row in comparison.rows(options.rounds)])


def rate_of(measure: Callable[[], float]) -> Callable[[], Figures]:
    return lambda: {"rate": measure()}


def steps(setup: Setup) -> Iterator[Comparison]:
    ways = {"one step in flight": False, "two steps in flight": True}
    llms = {way: setup.start(executor="uniproc", async_scheduling=is_on) for way, is_on in ways.items()}
    timers = {way: timer_of(llm) for way, llm in llms.items()}
    for batch in BATCHES:
        yield Comparison(
            {"batch": batch},
            {
                way: functools.partial(timed_decode, llm, timers[way], setup.workload(batch, llm))
                for way, llm in llms.items()
            },
        )


class ModelTimer:
    """A `StepRunner` that records the start of each decode step, and the time that its layers and head take."""

    def __init__(self, runner: ModelRunner) -> None:
        """Replace the runner's `StepRunner`, and its model's head."""
        self._steps, self._logits = runner.step_runner, runner.model.logits
        self.on_layers = self._steps.on_layers
        self.starts: list[float] = []
        self.seconds: list[float] = []
        runner.step_runner = self
        runner.model.logits = self._timed_logits  # type: ignore[method-assign]

    def padded_size(self, agreement: Agreement) -> int | None:
        return self._steps.padded_size(agreement)

    def capture_ahead(self) -> bool:
        return self._steps.capture_ahead()

    def free_memory(self) -> None:
        self._steps.free_memory()

    def __call__(self, step: StepInputs) -> StepOutputs:
        start = time.perf_counter()
        outputs = self._steps(step)
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
    assert isinstance(llm.core, Engine)
    (replica,) = llm.core.replicas
    assert isinstance(replica, LocalReplica)
    return ModelTimer(replica.executor.worker.runner)


def timed_decode(llm: LLM, timer: ModelTimer, workload: Workload) -> Figures:
    timer.starts.clear()
    timer.seconds.clear()
    generate_with(llm)(draw_prompts(workload, random.Random(time.monotonic_ns())), workload.new_tokens)
    num_steps = workload.new_tokens - 2  # from the start of the first decode step to that of the last
    total_s = timer.starts[num_steps] - timer.starts[0]
    return {"rate": workload.batch * num_steps / total_s, "idle": 1 - sum(timer.seconds[:num_steps]) / total_s}


def callers(setup: Setup) -> Iterator[Comparison]:
    llm = setup.start(max_num_seqs=NUM_TASKS)
    async_llm = AsyncLLM(setup.model, max_num_seqs=NUM_TASKS, num_threads=setup.num_threads, max_model_len=512)
    setup.stack.callback(async_llm.shutdown)
    workload = setup.workload(NUM_TASKS, llm)
    params = SamplingParams(
        temperature=0, max_tokens=setup.new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

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
        return workload.batch * setup.new_tokens / (time.perf_counter() - start)

    runs: dict[str, Callable[[list[list[int]]], object]] = {
        "LLM.generate": lambda prompts: llm.generate(prompts, params, use_tqdm=False),
        f"{NUM_TASKS} tasks": lambda prompts: asyncio.run(run_tasks(prompts)),
        f"{NUM_THREADS} threads": run_threads,
    }
    yield Comparison({}, {name: rate_of(functools.partial(rate, run)) for name, run in runs.items()})


def pipeline(setup: Setup) -> Iterator[Comparison]:
    one, two = (setup.start(num_threads=1, pipeline_parallel_size=2, max_concurrent_batches=count) for count in (1, 2))
    half, batch = PIPELINE_BATCH // 2, PIPELINE_BATCH
    workloads = {
        f"one batch of {batch}": (one, batch),
        f"two batches of {half}": (two, batch),
        f"two batches of {batch}": (two, 2 * batch),
    }
    yield Comparison(
        {},
        {
            way: rate_of(rate_measure("decode", generate_with(llm), setup.workload(number, llm)))
            for way, (llm, number) in workloads.items()
        },
    )


def executors(setup: Setup) -> Iterator[Comparison]:
    folder = Path(setup.stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(TINY))
    for tp, dp in ((1, 1), (2, 1), (1, 2)):
        with ExitStack() as stack:
            own = Setup(stack, folder, 1, setup.new_tokens)
            layout: dict[str, Any] = dict(tensor_parallel_size=tp, data_parallel_size=dp, load_format="dummy")
            llms = {name: own.start(kv_cache_memory="64MiB", **layout, **each) for name, each in EXECUTORS.items()}
            rates = {
                name: rate_of(rate_measure("decode", generate_with(llm), own.workload(1, llm)))
                for name, llm in llms.items()
            }
            yield Comparison({"tp": tp, "dp": dp}, rates)


def ranks(setup: Setup) -> Iterator[Comparison]:
    shape, cores = describe(setup.model).model.expert_shape, usable_cores()
    for tp, dp in ((2, 1), (1, 2)):  # one layout at a time: each engine holds the whole model
        layout = {"tensor_parallel_size": tp, "data_parallel_size": dp, "num_threads": max(1, cores // 2)}
        settings = {"one rank": {"num_threads": cores}} | {
            each: layout | {"dispatcher": each} for each in ("all_to_all", "shared_memory")
        }
        if dp == 1 and shape is not None and tp in shape.slices_alike:
            settings["slices"] = layout | {"expert_parallel": False}
        with ExitStack() as stack:
            own = Setup(stack, setup.model, 1, setup.new_tokens)
            common: Any = dict(dtype="bfloat16", max_model_len=PREFILL_TOKENS + 1, kv_cache_memory="256MiB")
            llms = {name: own.start(packed_cache=0, **common | each) for name, each in settings.items()}
            vocab_size = llms["one rank"].config.texts.vocab_size
            works: list[tuple[Literal["decode", "prefill"], Workload]] = [
                ("decode", Workload(count * dp, PROMPT_TOKENS, setup.new_tokens, vocab_size)) for count in (1, 8)
            ]
            for kind, work in [*works, ("prefill", Workload(dp, PREFILL_TOKENS, 1, vocab_size))]:
                measures = {name: rate_measure(kind, generate_with(llm), work) for name, llm in llms.items()}
                facts = {"tp": tp, "dp": dp, "kind": kind, "batch": work.batch}
                yield Comparison(facts, {name: rate_of(measure) for name, measure in measures.items()})


def speculation(setup: Setup) -> Iterator[Comparison]:
    configs = {"no speculation": None} | {
        f"{number} draft tokens": {"method": "ngram", "num_speculative_tokens": number} for number in NUM_DRAFTS
    }
    llms = {way: setup.start(speculative_config=config) for way, config in configs.items()}
    llm = llms["no speculation"]
    prompt_ids = list(itertools.chain(*draw_prompts(setup.workload(4, llm), random.Random(1))))
    if (setup.model / "tokenizer.json").exists():
        messages = [{"role": "user", "content": QUESTION}]
        prompt_ids = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    outputs: set[tuple[int, ...]] = set()

    def decode(llm: LLM) -> Figures:
        """Decode once completely, and once up to the first token, whose time is subtracted."""

        def run(num_tokens: int) -> tuple[float, float, list[int]]:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            start, of_processor = time.perf_counter(), time.process_time()
            (output,) = llm.generate([prompt_ids], params, use_tqdm=False)
            processor_s = time.process_time() - of_processor
            return time.perf_counter() - start, processor_s, output.outputs[0].token_ids

        before = llm.session.engine.replica_stats[0].speculation
        (first_s, first_processor_s, _), (whole_s, processor_s, token_ids) = run(1), run(setup.new_tokens)
        after = llm.session.engine.replica_stats[0].speculation
        outputs.add(tuple(token_ids))
        assert len(outputs) == 1, "speculation has changed the output"
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        num_accepted, num_new = after.num_accepted_tokens - before.num_accepted_tokens, setup.new_tokens - 1
        return {
            "rate": num_new / (whole_s - first_s),
            "processor_rate": num_new / (processor_s - first_processor_s),
            "accepted": num_accepted / max(1, num_drafted),
            "steps": 1 - num_accepted / num_new,
        }

    yield Comparison({}, {way: functools.partial(decode, llm) for way, llm in llms.items()})


def kv_store(setup: Setup) -> Iterator[Comparison]:
    length = FIRST_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)
    bytes_per_token = inspect(setup.model, "bfloat16").cache.bytes_per_token
    all_bytes = CONVERSATIONS * length * bytes_per_token
    settings: dict[str, Any] = dict(
        dtype="bfloat16", device="cpu", max_model_len=length, max_num_seqs=AT_A_TIME, enable_prefix_caching=True,
        kv_cache_memory=max(all_bytes // 4, AT_A_TIME * length * bytes_per_token), packed_cache=0,
    )  # fmt: skip
    llms = {"recomputation": setup.start(**settings), "memory": setup.start(**settings, kv_host_memory=2 * all_bytes)}
    expected: dict[int, list[list[int]]] = {}  # by round: the tokens of each conversation, equal for both engines

    def converse(llm: LLM, rounds: Iterator[int]) -> Figures:
        number = next(rounds)
        chance, vocab_size = random.Random(number), llm.config.texts.vocab_size

        def draw(num_tokens: int) -> list[int]:
            return [chance.randrange(vocab_size) for _ in range(num_tokens)]

        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        conversations = [draw(FIRST_TOKENS) for _ in range(CONVERSATIONS)]
        before = sum(stats.steps.num_tokens for stats in llm.core.replica_stats)
        num_tokens, started = 0, time.perf_counter()
        for _, first in itertools.product(range(TURNS), range(0, CONVERSATIONS, AT_A_TIME)):
            group = conversations[first : first + AT_A_TIME]
            for tokens in group:
                tokens += draw(TURN_TOKENS)
            prompts = [{"prompt_token_ids": tokens.copy()} for tokens in group]
            for tokens, output in zip(group, llm.generate(prompts, params, use_tqdm=False), strict=True):
                tokens += output.outputs[0].token_ids
                num_tokens += len(tokens) - 1  # the last token is not computed
        seconds = time.perf_counter() - started
        assert expected.setdefault(number, conversations) == conversations, "the store has changed the output"
        computed = sum(stats.steps.num_tokens for stats in llm.core.replica_stats) - before
        return {"rate": CONVERSATIONS * TURNS * ANSWER_TOKENS / seconds, "computed": computed / num_tokens}

    yield Comparison({}, {way: functools.partial(converse, llm, itertools.count()) for way, llm in llms.items()})


TABLES: dict[str, Callable[[Setup], Iterator[Comparison]]] = {
    "steps": steps,
    "callers": callers,
    "pipeline": pipeline,
    "executors": executors,
    "ranks": ranks,
    "speculation": speculation,
    "kv_store": kv_store,
}
