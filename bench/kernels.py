"""Attention of one layer by the C++ kernels of the CPU, beside torch and the machine's limit.

Each case is a step of some requests ("8 x 1 of 1024": 8 requests with one row each, at the end of 1024 tokens) in bf16,
as in the benchmark of GPUs. A sample is the mean of many calls, which cycle through 64 MB of inputs, so that these are
not still in the processor's caches. torch and C++ alternate with the machine's limits.

- *attention*: grouped queries at shapes of small models, and latent attention of DeepSeek-V2-Lite (16 heads) and V3
  (128).
- *sparse_attention*: at growing contexts, the indexer of DeepSeek-V3.2 (64 heads of 128 select 2048 positions) and its
  attention to them, beside full attention; and DeepSeek-V4-Flash, whose 64 heads of 512 attend to the last 128 tokens,
  and to 512 entries of 4 tokens that an indexer selects, or to all entries of 128 tokens.
- *linear_attention*: the gated delta rule of Qwen3-Next, Kimi delta attention, and Mamba-2. A call is two steps.
- *limit*: the bytes that a call must move at the memory bandwidth, or its multiply-adds at the rate of matrix products,
  whichever takes longer: of bf16, or of float32 for states and where the processor has no instructions for bf16. With
  one thread, times are processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moeserve.bench.gpu.attention_cases import attend, attend_chosen, choose_entries, latent_attend
from moeserve.bench.gpu.check import Operation, bytes_of, crossed
from moeserve.bench.gpu.entry_cases import attend_to_entries, linear_attention
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.harness import Row, add_choices, call_timer, figures, interleave_with_limits, make_parser
from moeserve.bench.limits import LimitProbe
from moeserve.bench.report import show_and_save
from moeserve.ops.backend import REFERENCE
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend

NATIVE = select_backend(torch.device("cpu"))
CACHE_BYTES, MOST_INPUTS = 64 << 20, 200
SAMPLE_SECONDS = 0.05
CONTEXTS = (1024, 4096, 16384, 65536)
DECODES = [f"{batch} x 1 of {context}" for batch in (1, 8, 32) for context in (64, 1024, 4096)]
PROMPTS = [f"1 x {size} of {size}" for size in (64, 512, 2048)]
LONG = [f"1 x {num_rows} of {context}" for context in CONTEXTS for num_rows in (1, 64)]
LINEAR = crossed(
    ["Qwen3-Next", "Kimi-Linear", "granite-4.0-h-small"], ["1 decodes", "8 decodes", "32 decodes", "prompt of 512"]
)
TABLES: dict[str, list[tuple[Operation, list[tuple[Any, ...]]]]] = {
    "attention": [
        (attend, crossed(["16 heads of 64"], DECODES + PROMPTS, ["plain"])),
        (attend, crossed(["16 heads of 128"], PROMPTS, ["plain"])),
        (latent_attend, crossed(["DeepSeek-V2-Lite"], DECODES + PROMPTS)),
        (latent_attend, crossed(["DeepSeek-V3"], ["1 x 1 of 1024", "8 x 1 of 1024"])),
    ],
    "sparse_attention": [
        (choose_entries, crossed(LONG, [64], [128], [2048])),
        (attend_chosen, crossed(["DeepSeek-V3"], LONG, [2048], [False], [True])),
        (latent_attend, crossed(["DeepSeek-V3"], LONG[::2])),
        (choose_entries, crossed(LONG, [64], [128], [512], [4])),
        (attend_to_entries, [("V4, chosen entries", rows, n, min(512, n // 4)) for n in CONTEXTS for rows in (1, 64)]),
        (attend_to_entries, crossed(["V4, all entries"], [1, 64], CONTEXTS, [0])),
    ],
    "linear_attention": [(linear_attention, LINEAR)],
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("kernels", __doc__, rounds=7)
    add_choices(parser, "--table", TABLES, "all")
    options = parser.parse_args(arguments)
    if NATIVE is REFERENCE:
        raise SystemExit("the C++ kernels are not built")
    set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    has_bfloat16 = NATIVE.instruction_set in ("avx512_bf16", "amx", "neon_bf16")
    for table in options.table or TABLES:
        dtype = torch.bfloat16 if has_bfloat16 and table != "linear_attention" else torch.float32
        probe = LimitProbe(dtype=dtype, clock=clock)
        for operation, shapes in TABLES[table]:
            rows = [row for shape in shapes for row in measure(operation, shape, options.rounds, probe, clock)]
            show_and_save(options.json, [{"benchmark": table} | row for row in rows])


@torch.inference_mode()
def measure(
    operation: Operation, shape: tuple[Any, ...], num_rounds: int, probe: LimitProbe, clock: Callable[[], float]
) -> list[Row]:
    """Return the row of torch, and that of C++."""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    cases = [operation.make(source, *shape)]
    count = min(MOST_INPUTS, max(2, int(CACHE_BYTES / bytes_of(cases[0].inputs))))
    cases += [operation.make(source, *shape) for _ in range(count - 1)]
    work = cases[0].work
    assert work is not None

    def call(calls: Sequence[Callable[[], object]], index: int) -> object:
        return calls[index % count]()

    def rate_of(seconds: Callable[[], float]) -> float:
        return 1 / seconds()

    timers = {
        name: call_timer(partial(call, [case.bind(backend) for case in cases]), SAMPLE_SECONDS, clock)
        for name, backend in {"torch": REFERENCE, "C++": NATIVE}.items()
    }
    measures = {name: partial(rate_of, timer) for name, timer in timers.items()}
    rounds = interleave_with_limits(measures, num_rounds, probe)
    # Work of zero, as of an indexer that selects all entries, has no limit.
    rows = {name: figures(each, lambda limits: 1 / max(1e-12, work.seconds(limits))) for name, each in rounds.items()}
    facts = {"operation": operation.make.__name__, "case": ", ".join(map(str, shape))}
    return [
        facts | {"way": name, "microseconds": 1e6 / row["rate"], "ratio": row["rate"] / rows["torch"]["rate"]} | row
        for name, row in rows.items()
    ]
