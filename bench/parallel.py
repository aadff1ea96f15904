"""The cost of several ranks on one CPU host: agreement, dispatch, collectives, and serving compared with one rank.

    moeserve bench dispatch [--table NAME ...] [--ranks N ...] [--rounds 3] [--json PATH]

- *agreement*: the exchange before every step, in which replicas send their intents and reach the same decision.
- *dispatch*: the tokens of one layer are sent to the ranks of their experts and back, without the experts' computation.
  Random tokens, random experts. *speed-up* is relative to allgather.
- *collectives*: each collective through shared memory and over gloo, as called from Python, on float32, and sums also
  on bfloat16. *bytes* are sent from each rank to each rank.
- *serving*: two ranks in each layout, with half of the cores each, compared with one rank with all cores, through `LLM`
  on the same model. `decode.py` describes the rates. In each line all engines serve equally many requests at a time. Up
  to four engines are loaded at once: one rank, and two ranks with each of SERVED_DISPATCHERS, or with sliced experts.

A sample is the median over calls and ranks; a 99th percentile is over all calls of all rounds. The entries of a table
are measured alternately, after an uncounted round. With more ranks than cores, an exchange waits until every rank has
been scheduled on a core.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from moeserve import LLM
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.decode import Workload, generate_with, rate_measure
from moeserve.bench.harness import (
    Row,
    add_choices,
    at_least,
    environment,
    interleave,
    make_parser,
    percentile,
    ratio_of_medians,
)
from moeserve.bench.ranks import (
    DISPATCHERS,
    Ranks,
    TimeAgreements,
    TimeCollective,
    Timed,
    TimeDispatch,
    repeated,
)
from moeserve.bench.report import show_and_save
from moeserve.machine import usable_cores
from moeserve.models.registry import describe

NUM_RANKS = (2, 4)
TOKENS_PER_RANK = (1, 16, 128, 1024)
SHAPE = {"hidden_size": 2048, "num_experts": 64, "top_k": 8}  # close to DeepSeek-V2-Lite and OLMoE
OPERATIONS = ("all_to_all", "all_gather", "reduce_scatter")
NUM_BYTES = (64, 2**11, 2**16, 2**21)
SAMPLE_SECONDS = 0.2  # duration of one sample
LAYOUTS = ({"tensor_parallel_size": 2}, {"data_parallel_size": 2})
SERVED_DISPATCHERS = ("all_to_all", "shared_memory")
REQUESTS_PER_REPLICA = (1, 8)
PROMPT_TOKENS = 32  # when decoding
CACHE_MEMORY = "256MiB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moeserve bench dispatch", "The cost of several ranks.", rounds=3, threads=False)
    parser.add_argument("--model", default="mixtral-small", help="name or folder of the checkpoint that is served")
    add_choices(parser, "--table", [*MEASURES, "serving"], "all")
    parser.add_argument(
        "--ranks", type=at_least(2), action="append", help=f"number of ranks, repeatable (default: {NUM_RANKS})"
    )
    parser.add_argument("--new-tokens", type=at_least(2), default=12, help="tokens of the longer decode run")
    parser.add_argument("--prefill-tokens", type=at_least(1), default=512)
    options = parser.parse_args(arguments)

    model = find_checkpoint(options.model)
    torch.set_num_threads(usable_cores())
    machine = environment()  # recorded before the benchmark causes load
    tables = options.table or [*MEASURES, "serving"]
    for table in (table for table in tables if table in MEASURES):
        rows: list[Row] = []
        for num_ranks in options.ranks or NUM_RANKS:
            with Ranks(model, data_parallel_size=num_ranks) as ranks:
                rows += [row | {"num_ranks": num_ranks} for row in MEASURES[table](ranks, options.rounds)]
        show_and_save(options.json, rows, machine)
    if "serving" in tables:
        rows = list(measure_serving(model, options.rounds, options.new_tokens, options.prefill_tokens))
        show_and_save(options.json, rows, machine)


def timed(ranks: Ranks, orders: Mapping[str, Timed], num_rounds: int, base: str) -> Iterator[tuple[str, Row]]:
    """Yield the figures of each order by name. The ratio is its speed-up over `base`."""
    measures = {name: repeated(ranks, order, SAMPLE_SECONDS) for name, order in orders.items()}
    rounds = interleave(measures, num_rounds, warms_up=True)  # seconds of each call, by round and rank
    calls = {name: [list(itertools.chain(*of_ranks)) for of_ranks in each] for name, each in rounds.items()}
    samples = {name: [statistics.median(seconds) for seconds in each] for name, each in calls.items()}
    for name, each in samples.items():
        yield (
            name,
            {
                "median_us": statistics.median(each) * 1e6,
                "p99_us": percentile(itertools.chain(*calls[name]), 0.99) * 1e6,
                "ratio": ratio_of_medians(samples[base], each),
                "samples": each,
            },
        )


def measure_agreements(ranks: Ranks, num_rounds: int) -> Iterator[Row]:
    for _, figures in timed(ranks, {"agreement": TimeAgreements()}, num_rounds, "agreement"):
        yield {"benchmark": "parallel", "table": "agreement", "num_replicas": ranks.num_ranks, **figures}


def measure_dispatches(ranks: Ranks, num_rounds: int) -> Iterator[Row]:
    for num_tokens in TOKENS_PER_RANK:
        orders: dict[str, Timed] = {
            name: TimeDispatch(dispatcher=name, num_tokens=num_tokens, **SHAPE) for name in DISPATCHERS
        }
        facts = {"benchmark": "parallel", "table": "dispatch", "tokens_per_rank": num_tokens, "shape": SHAPE}
        for name, figures in timed(ranks, orders, num_rounds, "allgather"):
            yield {**facts, "dispatcher": name, **figures}


def measure_collectives(ranks: Ranks, num_rounds: int) -> Iterator[Row]:
    for operation, dtype, num_bytes in itertools.product(OPERATIONS, ("float32", "bfloat16"), NUM_BYTES):
        if dtype == "float32" or operation == "reduce_scatter":
            facts: dict[str, Any] = {"operation": operation, "dtype": dtype, "num_bytes": num_bytes}
            orders = {
                "shared memory": TimeCollective(transport="auto", **facts),
                "gloo": TimeCollective(transport="gloo", **facts),
            }
            for name, figures in timed(ranks, orders, num_rounds, "gloo"):
                ratio = figures.pop("ratio")
                yield {"benchmark": "collectives", "transport": name, **facts, **figures, "ratio_to_gloo": ratio}


MEASURES = {"agreement": measure_agreements, "dispatch": measure_dispatches, "collectives": measure_collectives}


def measure_serving(model: Path, num_rounds: int, new_tokens: int, prefill_tokens: int) -> Iterator[Row]:
    vocab_size, shape = describe(model).model.vocab_size, describe(model).model.expert_shape
    for layout in LAYOUTS:  # one layout at a time: each engine holds the whole model
        tp, dp = layout.get("tensor_parallel_size", 1), layout.get("data_parallel_size", 1)
        workloads: list[tuple[Literal["decode", "prefill"], Workload]] = [
            ("decode", Workload(count * dp, PROMPT_TOKENS, new_tokens, vocab_size)) for count in REQUESTS_PER_REPLICA
        ]
        workloads.append(("prefill", Workload(dp, prefill_tokens, 1, vocab_size)))
        engines: dict[str, dict[str, Any]] = {"one rank": {}}
        for dispatcher in SERVED_DISPATCHERS:
            engines[f"tp {tp}, dp {dp}, {dispatcher}"] = layout | {"dispatcher": dispatcher}
        if dp == 1 and shape is not None and tp in shape.slices_alike:
            engines[f"tp {tp}, dp {dp}, slices"] = layout | {"expert_parallel": False}
        with contextlib.ExitStack() as stack:
            generates = {
                name: generate_with(
                    stack.enter_context(
                        LLM(
                            model,
                            dtype="bfloat16",
                            device="cpu",
                            max_model_len=max(PROMPT_TOKENS + new_tokens, prefill_tokens + 1),
                            kv_cache_memory=CACHE_MEMORY,
                            packed_cache=0,  # writing a packed copy would disturb other measurements
                            **settings,
                        )
                    )
                )
                for name, settings in engines.items()
            }
            for index, (kind, workload) in enumerate(workloads):
                measures = {
                    name: rate_measure(kind, generate, workload, seed=index) for name, generate in generates.items()
                }
                samples = interleave(measures, num_rounds, warms_up=True)
                for name, rates in samples.items():
                    yield {
                        "benchmark": "parallel",
                        "table": "serving",
                        "model": model.name,
                        "what": kind,
                        "layout": name,
                        "workload": asdict(workload),
                        "tokens_per_second": statistics.median(rates),
                        "ratio_to_one_rank": ratio_of_medians(rates, samples["one rank"]),
                        "samples": rates,
                    }


if __name__ == "__main__":
    main()
