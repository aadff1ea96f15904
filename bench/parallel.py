"""The cost of several ranks on one CPU host: agreement, dispatch, collectives, and serving beside one rank.

    moeserve bench dispatch [--table NAME ...] [--ranks N ...] [--rounds 3] [--json PATH]

- *agreement*: what replicas do before every step: each sends what it would run, and all reach the same decision. Median
  and 99th percentile over all agreements, rounds and replicas.
- *dispatch*: the tokens of one layer go to the ranks of their experts and back, without the experts' computation.
  Random tokens, random experts. *speed-up* is all_to_all over allgather.
- *collectives*: each collective through shared memory and over gloo, as called from Python, on float32, sums also on
  bfloat16. *bytes* are those of the tensor for all_reduce, otherwise what each rank sends to each.
- *serving*: two ranks in each layout and with each dispatcher, with half of the cores each, beside one rank with all of
  them, through `LLM` on the same model. `decode.py` describes the rates. In each line all engines serve equally many
  requests at a time. Three engines are loaded at once: one rank and both dispatchers.

A sample of dispatch and collectives is the median over calls and ranks. Whatever a table compares is measured in
alternation, after a round that is not counted. With more ranks than cores, an exchange waits until every rank has had
its turn on a core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from moeserve import LLM
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.decode import Workload, generate_with, rate_measure
from moeserve.bench.harness import (
    Row,
    at_least,
    environment,
    interleave,
    make_parser,
    percentile,
    ratio_of_medians,
    save,
    show,
)
from moeserve.bench.ranks import (
    Collective,
    DispatcherName,
    DtypeName,
    Ranks,
    TimeAgreements,
    TimeCollective,
    TimeDispatch,
    Timing,
    median_seconds,
    repeated,
)
from moeserve.distributed.connect import TransportName
from moeserve.machine import shown_bytes, usable_cores
from moeserve.models.registry import describe

Table = Literal["agreement", "dispatch", "collectives", "serving"]
DISPATCHERS: tuple[DispatcherName, ...] = get_args(DispatcherName)
OPERATIONS: tuple[Collective, ...] = get_args(Collective)
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
SUMS: tuple[Collective, ...] = ("reduce_scatter", "all_reduce")
TRANSPORTS: dict[str, TransportName] = {"shared memory": "auto", "gloo": "gloo"}

NUM_RANKS = (2, 4)
NUM_AGREEMENTS = 500  # of one sample
TOKENS_PER_RANK = (1, 16, 128, 1024)
HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 2048, 64, 8  # close to DeepSeek-V2-Lite and OLMoE
NUM_BYTES = (64, 2**11, 2**16, 2**21)
SAMPLE_SECONDS = 0.2  # length of one sample of dispatch or of a collective
LAYOUTS = ((2, 1), (1, 2))  # tp, dp
REQUESTS_PER_REPLICA = (1, 8)
PROMPT_TOKENS = 32  # when decoding
CACHE_MEMORY = "256MiB"


@dataclass(frozen=True)
class Layout:
    """The ranks of an engine."""

    tp: int = 1
    dp: int = 1
    dispatcher: Literal["local", "allgather", "all_to_all"] = "local"

    @property
    def name(self) -> str:
        if self.tp * self.dp == 1:
            return "one rank"
        return f"tp {self.tp}, dp {self.dp}, {self.dispatcher}"


ONE_RANK = Layout()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moeserve bench dispatch", "The cost of several ranks.", rounds=3, threads=False)
    parser.add_argument("--model", default="mixtral-small", help="name or folder of the checkpoint that is served")
    parser.add_argument(
        "--table",
        action="append",
        choices=get_args(Table),
        metavar="NAME",
        help=f"measure only this table, repeatable [{', '.join(get_args(Table))}]",
    )
    parser.add_argument(
        "--ranks", type=at_least(2), action="append", help=f"number of ranks, repeatable (default: {NUM_RANKS})"
    )
    parser.add_argument("--new-tokens", type=at_least(2), default=12, help="tokens of the longer decode run")
    parser.add_argument("--prefill-tokens", type=at_least(1), default=512)
    options = parser.parse_args(arguments)

    model = find_checkpoint(options.model)
    torch.set_num_threads(usable_cores())
    machine = environment()  # before any load of our own
    show(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    tables: Sequence[Table] = options.table or get_args(Table)
    measures: dict[Table, Callable[[dict[int, Ranks], int], list[Row]]] = {
        "agreement": measure_agreements,
        "dispatch": measure_dispatches,
        "collectives": measure_collectives,
    }
    rows: list[Row] = []
    for table, measure in measures.items():
        if table in tables:
            with contextlib.ExitStack() as stack:
                ranks = {
                    num_ranks: stack.enter_context(Ranks(model, data_parallel_size=num_ranks))
                    for num_ranks in options.ranks or NUM_RANKS
                }
                rows += measure(ranks, options.rounds)
    if "serving" in tables:
        rows += measure_serving(model, options.rounds, options.new_tokens, options.prefill_tokens)
    save(options.json, [{**row, "environment": machine} for row in rows])


def measure_agreements(ranks: dict[int, Ranks], num_rounds: int) -> list[Row]:
    """Print the table of agreements and return its rows."""
    order = TimeAgreements(num_calls=NUM_AGREEMENTS)
    measures = {f"{num_ranks}": functools.partial(each.run, order) for num_ranks, each in ranks.items()}
    interleave(measures, 1)
    rows = []
    show(f"\nagreement{'replicas':>10}{'median':>12}{'p99':>12}")
    for name, samples in interleave(measures, num_rounds).items():
        microseconds = [second * 1e6 for timings in samples for timing in timings for second in timing.seconds]
        row: Row = {
            "benchmark": "parallel",
            "table": "agreement",
            "num_replicas": int(name),
            "num_agreements": NUM_AGREEMENTS * num_rounds,
            "median_us": statistics.median(microseconds),
            "p99_us": percentile(microseconds, 0.99),
            "samples": [median_seconds(timings) for timings in samples],
        }
        show(f"{'':<9}{name:>10}{row['median_us']:>9.0f} us{row['p99_us']:>9.0f} us")
        rows.append(row)
    return rows


def measure_dispatches(ranks: dict[int, Ranks], num_rounds: int) -> list[Row]:
    """Print the table of dispatchers and return its rows."""
    rows = []
    show(f"\ndispatch and combine, {NUM_EXPERTS} experts, top-{TOP_K}, rows of {HIDDEN_SIZE} values in bf16")
    show(f"{'ranks':>5}{'tokens':>8}   {'dispatcher':<12}{'median':>13}{'speed-up':>9}")
    shape = {"hidden_size": HIDDEN_SIZE, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    for (num_ranks, group), num_tokens in itertools.product(ranks.items(), TOKENS_PER_RANK):
        orders = {
            name: TimeDispatch(dispatcher=name, num_tokens=num_tokens, num_calls=0, **shape) for name in DISPATCHERS
        }
        measures: dict[str, Callable[[], list[Timing]]] = {
            name: repeated(group, order, SAMPLE_SECONDS, 2) for name, order in orders.items()
        }
        samples = interleave(measures, num_rounds)
        seconds = {name: [median_seconds(timings) for timings in each] for name, each in samples.items()}
        for name in DISPATCHERS:
            row: Row = {
                "benchmark": "parallel",
                "table": "dispatch",
                "dispatcher": name,
                "num_ranks": num_ranks,
                "tokens_per_rank": num_tokens,
                "shape": {**shape, "dtype": "bfloat16"},
                "median_us": statistics.median(seconds[name]) * 1e6,
                "ratio": ratio_of_medians(seconds["allgather"], seconds[name]),
                "samples": seconds[name],
            }
            rows.append(row)
            show(f"{num_ranks:>5}{num_tokens:>8}   {name:<12}{row['median_us']:>9.0f} us{row['ratio']:>9.2f}")
    return rows


def measure_collectives(ranks: dict[int, Ranks], num_rounds: int) -> list[Row]:
    """Print the table of collectives and return its rows, one for each transport."""
    rows = []
    show(f"\n{'ranks':>5}   {'collective':<24}{'bytes':>9}{'shared memory':>16}{'gloo':>12}{'speed-up':>10}")
    for (num_ranks, group), operation, dtype, num_bytes in itertools.product(
        ranks.items(), OPERATIONS, DTYPES, NUM_BYTES
    ):
        if dtype != "float32" and operation not in SUMS:
            continue
        facts = {"operation": operation, "dtype": dtype, "num_bytes": num_bytes}
        orders = {
            name: TimeCollective(transport=transport, num_calls=0, **facts)  # type: ignore[arg-type]
            for name, transport in TRANSPORTS.items()
        }
        measures = {name: repeated(group, order, SAMPLE_SECONDS, 3) for name, order in orders.items()}
        interleave(measures, 1)
        samples = {
            name: [median_seconds(timings) for timings in each]
            for name, each in interleave(measures, num_rounds).items()
        }
        medians = {name: statistics.median(each) * 1e6 for name, each in samples.items()}
        ratios = {name: ratio_of_medians(samples["gloo"], each) for name, each in samples.items()}
        show(
            f"{num_ranks:>5}   {f'{operation} {dtype}':<24}{shown_bytes(num_bytes):>9}"
            f"{medians['shared memory']:>13.1f} us{medians['gloo']:>9.0f} us{ratios['shared memory']:>10.1f}"
        )
        rows += [
            {
                "benchmark": "collectives",
                "transport": name,
                "num_ranks": num_ranks,
                **facts,
                "median_us": medians[name],
                "ratio_to_gloo": ratios[name],
                "samples": each,
            }
            for name, each in samples.items()
        ]
    return rows


def measure_serving(model: Path, num_rounds: int, new_tokens: int, prefill_tokens: int) -> list[Row]:
    """Print the table of serving and return its rows."""
    vocab_size = describe(model).model.vocab_size
    max_model_len = max(PROMPT_TOKENS + new_tokens, prefill_tokens + 1)
    show(f"\n{model.name}, bf16, {usable_cores()} threads in all; decode: {PROMPT_TOKENS} + {new_tokens} tokens")
    show(f"{'serving':<9}{'requests':>8}   {'layout':<22}{'tokens/s':>10}{'of one rank':>13}   rounds")
    rows = []
    for tp, dp in LAYOUTS:  # one layout at a time: each engine holds the whole model
        workloads = [
            ("decode", Workload(count * dp, PROMPT_TOKENS, new_tokens, vocab_size)) for count in REQUESTS_PER_REPLICA
        ]
        workloads.append(("prefill", Workload(dp, prefill_tokens, 1, vocab_size)))
        with contextlib.ExitStack() as stack:
            engines = {
                layout.name: generate_with(stack.enter_context(start_engine(model, layout, max_model_len)))
                for layout in [ONE_RANK, *(Layout(tp, dp, dispatcher) for dispatcher in DISPATCHERS)]
            }
            for index, (kind, workload) in enumerate(workloads):
                measures = {
                    name: rate_measure(kind, generate, workload, seed=index) for name, generate in engines.items()
                }
                interleave(measures, 1)
                rows += _serving_rows(model, kind, workload, interleave(measures, num_rounds))
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
        packed_cache=0,  # writing a packed copy would disturb other measurements
    )


def _serving_rows(model: Path, kind: str, workload: Workload, samples: dict[str, list[float]]) -> list[Row]:
    rows = []
    for name, rates in samples.items():
        ratio = ratio_of_medians(rates, samples[ONE_RANK.name])
        rows.append(
            {
                "benchmark": "parallel",
                "table": "serving",
                "model": model.name,
                "what": kind,
                "layout": name,
                "workload": asdict(workload),
                "tokens_per_second": statistics.median(rates),
                "ratio_to_one_rank": ratio,
                "samples": rates,
            }
        )
        rounds = " ".join(f"{rate:.1f}" for rate in rates)
        show(f"{kind:<9}{workload.batch:>8}   {name:<22}{statistics.median(rates):>10.1f}{ratio:>13.2f}   {rounds}")
    return rows


if __name__ == "__main__":
    main()
