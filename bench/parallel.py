"""What it costs to be several ranks: agreeing, dispatching, and serving beside one rank, on one CPU host over gloo.

    python -m moeserve.bench.parallel [--rounds 3] [--table agreement|dispatch|serving] [--json PATH]

Three tables. Ranks are processes, started and connected as the engine's are; those that have nothing to do sleep.

- *agreement*: what replicas do before every step: each tells the others what it would run, and all draw the same
  conclusion. One agreement follows the other, so nobody has to be woken. Median and 99th percentile over all
  agreements of all rounds and replicas.
- *dispatch*: the tokens of one layer to the ranks of their experts and back, without what the experts compute: the rows
  that arrive are sent straight back. Random tokens, random experts. A sample is the median over calls of all ranks.
  *exchanging* is the share of the time spent inside collectives: copying into them, sending, waiting for the others.
  *sent* are bytes that a rank sends to others, counted from the shapes of what it gives to each collective, on average
  over ranks. *speed-up* is of all_to_all over allgather.
- *serving*: two ranks in each layout and with each dispatcher, with half of the cores each, beside one rank with all of
  them, on the same model through `LLM`. Decode rates are measured as in `decode.py`; prefill is the rate of prompt
  tokens up to the first token of prompts of `--prefill-tokens`. In each line all engines serve equally many requests at
  a time: 1, or 8, for each replica of the layout. Three engines are loaded at a time, one rank and both dispatchers.

In every table all that is compared takes turns, round by round, after a round that is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from moeserve import LLM
from moeserve.bench import decode
from moeserve.bench.checkpoints import CheckpointName, make_checkpoint
from moeserve.bench.decode import Generate, Workload
from moeserve.bench.harness import add_options, at_least, environment, interleave, ratio_of_medians, write_jsonl
from moeserve.bench.parallel_rank import Order, TimeAgreements, TimeDispatch, Timing, TravellingDispatcher
from moeserve.config.environment import environment_of_rank
from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.settings import EngineConfig
from moeserve.config.validation import parse_settings
from moeserve.distributed.group import start_store
from moeserve.machine import shown_bytes, usable_cores
from moeserve.models.registry import describe, read_facts
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all, wait_for_messages
from moeserve.worker.protocol import RankStart, rank_name

Table = Literal["agreement", "dispatch", "serving"]
DISPATCHERS: tuple[TravellingDispatcher, ...] = get_args(TravellingDispatcher)

NUM_RANKS = (2, 4)
NUM_AGREEMENTS = 500  # of one sample
TOKENS_PER_RANK = (1, 16, 128, 1024)
HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 2048, 64, 8  # close to DeepSeek-V2-Lite and OLMoE
SAMPLE_SECONDS = 0.2  # a sample of a dispatch is of as many calls as take about so long, of 2 at least
LAYOUTS = ((2, 1), (1, 2))  # tp, dp
REQUESTS_PER_REPLICA = (1, 8)
CACHE_MEMORY = "256MiB"


@dataclass(frozen=True)
class Layout:
    """Several ranks of an engine, or one."""

    tp: int = 1
    dp: int = 1
    dispatcher: Literal["local", "allgather", "all_to_all"] = "local"

    @property
    def name(self) -> str:
        if self.tp * self.dp == 1:
            return "one rank"
        return f"tp {self.tp}, dp {self.dp}, {self.dispatcher}"


ONE_RANK = Layout()


class Ranks:
    """Processes that time what all of them are told. Each holds a rank of one group, and a replica of its own."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        """
        Args:
            folder: of a checkpoint, which is not loaded: a rank's configuration names one.
        """
        settings = parse_settings({"data_parallel_size": num_ranks, "num_threads": 1})
        config: EngineConfig = resolve(settings, read_facts(folder), MachineFacts(num_cores=usable_cores()))
        self._store = start_store()
        self._children: list[WatchedProcess[Timing]] = [
            start_process(
                "moeserve.bench.parallel_rank:work",
                rank_name(config, rank),
                RankStart(config=config, rank=rank, store_host="127.0.0.1", store_port=self._store.port),
                Timing,
                environment=environment_of_rank(config, usable_cores()),
            )
            for rank in range(num_ranks)
        ]

    def time(self, order: Order) -> list[Timing]:
        """What each rank saw. EngineError when one has died."""
        for child in self._children:
            child.channel.send(order)
        timings: dict[str, Timing] = {}
        while len(timings) < len(self._children):
            wait_for_messages(self._children, None)
            for child in self._children:
                for timing in child.receive():
                    timings[child.name] = timing
            if any(child.failures() for child in self._children):
                raise as_error(root_cause(collect_failures(self._children)), "while ranks were timed")
        return [timings[child.name] for child in self._children]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._children)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.parallel", description="What it costs to be several ranks."
    )
    parser.add_argument("--model", default="mixtral-small", help="what is served: a checkpoint by name, or a folder")
    parser.add_argument(
        "--table", action="append", choices=get_args(Table), help="measure this one only; may be repeated"
    )
    parser.add_argument("--new-tokens", type=at_least(2), default=12, help="tokens of the longer decode run")
    parser.add_argument("--prefill-tokens", type=at_least(1), default=512)
    add_options(parser, rounds=3, threads=False)
    options = parser.parse_args(arguments)

    model = make_checkpoint(options.model) if options.model in get_args(CheckpointName) else Path(options.model)
    if not (model / "config.json").exists():
        parser.error(
            f"--model {options.model}: no such checkpoint; known names are {', '.join(get_args(CheckpointName))}"
        )
    torch.set_num_threads(usable_cores())
    machine = environment()  # before any of our own load
    _show(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    tables: Sequence[Table] = options.table or get_args(Table)
    rows: list[dict[str, Any]] = []
    if "serving" not in tables or len(tables) > 1:
        with contextlib.ExitStack() as stack:
            ranks = {num_ranks: stack.enter_context(Ranks(num_ranks, model)) for num_ranks in NUM_RANKS}
            if "agreement" in tables:
                rows += measure_agreements(ranks, options.rounds)
            if "dispatch" in tables:
                rows += measure_dispatches(ranks, options.rounds)
    if "serving" in tables:
        rows += measure_serving(model, options.rounds, options.new_tokens, options.prefill_tokens)
    if options.json:
        write_jsonl(options.json, [{"benchmark": "parallel", **row, "environment": machine} for row in rows])


def measure_agreements(ranks: dict[int, Ranks], num_rounds: int) -> list[dict[str, Any]]:
    """Prints the first table and returns its rows."""
    order = TimeAgreements(num_calls=NUM_AGREEMENTS)
    measures = {f"{num_ranks}": functools.partial(each.time, order) for num_ranks, each in ranks.items()}
    interleave(measures, 1)
    rows = []
    _show(f"\nagreement{'replicas':>10}{'median':>12}{'p99':>12}")
    for name, samples in interleave(measures, num_rounds).items():
        microseconds = [second * 1e6 for timings in samples for timing in timings for second in timing.seconds]
        row: dict[str, Any] = {
            "table": "agreement",
            "num_replicas": int(name),
            "num_agreements": NUM_AGREEMENTS * num_rounds,
            "median_us": statistics.median(microseconds),
            "p99_us": percentile(microseconds, 0.99),
            "samples": [median_seconds(timings) for timings in samples],
        }
        _show(f"{'':<9}{name:>10}{row['median_us']:>9.0f} us{row['p99_us']:>9.0f} us")
        rows.append(row)
    return rows


def measure_dispatches(ranks: dict[int, Ranks], num_rounds: int) -> list[dict[str, Any]]:
    """Prints the second table and returns its rows."""
    rows = []
    _show(f"\ndispatch and combine, {NUM_EXPERTS} experts, top-{TOP_K}, rows of {HIDDEN_SIZE} values in bf16")
    _show(f"{'ranks':>5}{'tokens':>8}   {'dispatcher':<12}{'median':>13}{'exchanging':>12}{'sent':>12}{'speed-up':>9}")
    for (num_ranks, group), num_tokens in itertools.product(ranks.items(), TOKENS_PER_RANK):
        samples = _dispatch_samples(group, num_tokens, num_rounds)
        seconds = {name: [median_seconds(timings) for timings in each] for name, each in samples.items()}
        ratio = ratio_of_medians(seconds["allgather"], seconds["all_to_all"])
        for name, each in samples.items():
            last = each[-1]
            row: dict[str, Any] = {
                "table": "dispatch",
                "dispatcher": name,
                "num_ranks": num_ranks,
                "tokens_per_rank": num_tokens,
                "shape": {"hidden_size": HIDDEN_SIZE, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "dtype": "bfloat16"},
                "median_us": statistics.median(seconds[name]) * 1e6,
                "exchanging": statistics.median(map(share_exchanging, each)),
                "bytes_sent_per_rank": statistics.mean(timing.bytes_sent for timing in last),
                "ratio": ratio if name == "all_to_all" else 1.0,  # how many times as fast as allgather
                "samples": seconds[name],
            }
            rows.append(row)
            _show(
                f"{num_ranks:>5}{num_tokens:>8}   {name:<12}{row['median_us']:>9.0f} us{row['exchanging']:>12.0%}"
                f"{shown_bytes(round(row['bytes_sent_per_rank'])):>12}"
                + (f"{ratio:>9.2f}" if name != "allgather" else "")
            )
    return rows


def _dispatch_samples(ranks: Ranks, num_tokens: int, num_rounds: int) -> dict[str, list[list[Timing]]]:
    def measure(dispatcher: TravellingDispatcher) -> Callable[[], list[Timing]]:
        def run(num_calls: int) -> list[Timing]:
            return ranks.time(
                TimeDispatch(
                    dispatcher=dispatcher,
                    num_tokens=num_tokens,
                    hidden_size=HIDDEN_SIZE,
                    num_experts=NUM_EXPERTS,
                    top_k=TOP_K,
                    num_calls=num_calls,
                )
            )

        run(1)
        num_calls = max(2, int(SAMPLE_SECONDS / mean_seconds(run(2))))
        return lambda: run(num_calls)

    measures: dict[str, Callable[[], list[Timing]]] = {name: measure(name) for name in DISPATCHERS}
    return interleave(measures, num_rounds)


def measure_serving(model: Path, num_rounds: int, new_tokens: int, prefill_tokens: int) -> list[dict[str, Any]]:
    """Prints the third table and returns its rows."""
    vocab_size = describe(model).model.vocab_size
    max_model_len = max(32 + new_tokens, prefill_tokens + 1)
    _show(f"\n{model.name}, bf16, {usable_cores()} threads in all; decode: 32 + {new_tokens} tokens")
    _show(f"{'serving':<9}{'requests':>8}   {'layout':<22}{'tokens/s':>10}{'of one rank':>13}   rounds")
    rows = []
    for tp, dp in LAYOUTS:  # one after the other: each engine takes the memory of the whole model
        compared = [ONE_RANK, *(Layout(tp, dp, dispatcher) for dispatcher in DISPATCHERS)]
        with contextlib.ExitStack() as stack:
            engines = {
                layout.name: decode.generate_with(stack.enter_context(start_engine(model, layout, max_model_len)))
                for layout in compared
            }
            for per_replica in REQUESTS_PER_REPLICA:
                workload = Workload(per_replica * dp, 32, new_tokens, vocab_size)
                rows += _serving_rows(model, "decode", workload, decode.measure(engines, workload, num_rounds))
            workload = Workload(dp, prefill_tokens, 1, vocab_size)
            rows += _serving_rows(model, "prefill", workload, prefill_rates(engines, workload, num_rounds))
    return rows


def start_engine(model: Path, layout: Layout, max_model_len: int) -> LLM:
    return LLM(
        model,
        tensor_parallel_size=layout.tp,
        data_parallel_size=layout.dp,
        dispatcher=layout.dispatcher,
        dtype="bfloat16",
        device="cpu",
        max_model_len=max_model_len,
        kv_cache_memory=CACHE_MEMORY,
        packed_cache=0,  # writing a copy would go on while others are measured
    )


def prefill_rates(engines: dict[str, Generate], workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    """Prompt tokens per second of each engine, one rate per round."""

    def measure(generate: Generate) -> Callable[[], float]:
        source = random.Random(1)  # the same prompts for all, and others than decoding had
        num_tokens = workload.batch * workload.prompt_tokens
        return lambda: num_tokens / decode.run_seconds(generate, workload, 1, source)

    measures = {name: measure(generate) for name, generate in engines.items()}
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_seconds(timings: Sequence[Timing]) -> float:
    """Of one call, over calls and ranks."""
    return statistics.median(seconds for timing in timings for seconds in timing.seconds)


def mean_seconds(timings: Sequence[Timing]) -> float:
    """Of one call, over calls and ranks."""
    return statistics.mean(seconds for timing in timings for seconds in timing.seconds)


def share_exchanging(timings: Sequence[Timing]) -> float:
    """Of a call's time, on average over ranks, what is spent inside collectives."""
    return statistics.mean(timing.seconds_in_collectives for timing in timings) / mean_seconds(timings)


def _serving_rows(model: Path, what: str, workload: Workload, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, rates in samples.items():
        ratio = ratio_of_medians(rates, samples[ONE_RANK.name])
        rows.append(
            {
                "table": "serving",
                "model": model.name,
                "what": what,
                "layout": name,
                "workload": asdict(workload),
                "tokens_per_second": statistics.median(rates),
                "ratio_to_one_rank": ratio,
                "samples": rates,
            }
        )
        rounds = " ".join(f"{rate:.1f}" for rate in rates)
        _show(f"{what:<9}{workload.batch:>8}   {name:<22}{statistics.median(rates):>10.1f}{ratio:>13.2f}   {rounds}")
    return rows


def _show(line: str) -> None:
    print(line, flush=True)  # lines come minutes apart


if __name__ == "__main__":
    main()
