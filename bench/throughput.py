"""Tokens per second of moeserve and other engines on the same checkpoints, compared with the machine's limit.

- *cells*: for each model, decoding 1, 8 and 32 requests after prompts of 32 tokens, and prefill of 4 prompts of 512.
  `decode.py` describes the rates.
- *engines*: all decode greedily with the same number of threads on the same prompts, in bf16 unless their name says
  otherwise. moeserve runs in this process, each peer in its own process, which is stopped while it is not measured.
  Before the rounds of a cell, each engine runs once without being counted.
- *limit*: the time to read the weights of a step at the memory bandwidth, or the time for its multiply-adds at the rate
  of bf16 or of bytes, whichever is longer (`costs.py`, `limits.py`). All are measured before and after every sample,
  and averaged.
- *goals*: for each of our engines a multiple of the rate of the best peer of the same bits (bf16, int8 and q8_0, int4
  and q4_0), or a share of the limit if that is lower. `reached` is our rate divided by the goal, so a goal is met from
  1 on. `without` gives the peers of the same bits that were not measured, and the reasons.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Generate, Workload, draw_prompts, rate_measure
from moeserve.bench.engines import ENGINE_NAMES, WEIGHT_FORMATS, Engine, start_all, start_engine
from moeserve.bench.harness import (
    Row,
    add_choices,
    add_models,
    at_least,
    interleave_with_limits,
    make_parser,
    ratios,
)
from moeserve.bench.limits import LimitProbe, MachineLimits
from moeserve.bench.report import show_and_save
from moeserve.models.registry import describe
from moeserve.ops.native import native_kernels, set_num_threads

MODELS = ("mixtral-mini", "deepseek-mini", "qwen3-mini")
BATCHES = (1, 8, 32)
PREFILL_BATCH = 4
PEERS_OF = {  # peers whose weights have the same bits
    "moeserve": ("vllm", "llama.cpp-bf16", "ik_llama.cpp-bf16", "transformers"),
    "moeserve-int8": ("llama.cpp-q8_0", "ik_llama.cpp-q8_0"),
    "moeserve-int4": ("llama.cpp-q4_0", "ik_llama.cpp-q4_0"),
}
# (multiple of the best peer's rate, share of the limit): the lower of the two rates is the goal.
DECODE_GOALS = {  # by batch
    "moeserve": {1: (1.1, 0.93), 8: (1.3, 0.90), 32: (1.8, 0.88)},
    "moeserve-int8": {1: (1.1, 0.75), 8: (1.5, 0.75), 32: (2.5, 0.75)},
    "moeserve-int4": {1: (1.1, 0.70), 8: (1.5, 0.70), 32: (2.5, 0.70)},
}
PREFILL_GOALS = {"moeserve": (1.8, 0.85), "moeserve-int8": (2.5, 0.85), "moeserve-int4": (2.5, 0.85)}
AMX_PREFILL_GOAL = (1.3, 0.85)  # in bf16


@dataclass(frozen=True)
class Cell:
    """One comparison of all engines."""

    kind: Literal["decode", "prefill"]
    workload: Workload

    @property
    def name(self) -> str:
        return f"{self.kind}, batch {self.workload.batch}"

    def goal(self, engine: str) -> tuple[float, float] | None:
        """Return the multiple of the best peer's rate and the share of the limit, one of which to reach."""
        if self.kind == "decode":
            return DECODE_GOALS[engine].get(self.workload.batch)
        kernels = native_kernels()
        is_amx = kernels is not None and kernels.isa() == "amx"
        return AMX_PREFILL_GOAL if is_amx and engine == "moeserve" else PREFILL_GOALS[engine]

    def limit_rate(self, model: Path, engine: str, limits: MachineLimits) -> float:
        """Return the tokens per second of an ideal engine."""
        batch = self.workload.batch
        num_tokens = batch if self.kind == "decode" else batch * self.workload.prompt_tokens
        weights = FORMATS[WEIGHT_FORMATS.get(engine, "bfloat16")]
        work = step_work(model, num_tokens=num_tokens, num_logits=batch, weights=weights)
        return num_tokens / work.seconds(limits)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("throughput", __doc__, rounds=5)
    add_models(parser, MODELS)
    add_choices(parser, "--engine", ENGINE_NAMES, "all that are installed")
    parser.add_argument("--kind", choices=["decode", "prefill"], help="default: both")
    parser.add_argument(
        "--batch", type=at_least(1), action="append", help=f"requests decoded together (default: {BATCHES})"
    )
    parser.add_argument("--prompt-tokens", type=at_least(1), default=32, help="prompt length when decoding")
    parser.add_argument("--new-tokens", type=at_least(2), default=33, help="tokens of the longer decode run")
    parser.add_argument("--prefill-tokens", type=at_least(1), default=512, help="prompt length of prefill")
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    models = [find_checkpoint(name) for name in options.model or MODELS]
    probe = LimitProbe()
    for model in models:
        vocab_size = describe(model).model.vocab_size
        cells = [
            Cell("decode", Workload(batch, options.prompt_tokens, options.new_tokens, vocab_size))
            for batch in options.batch or BATCHES
        ]
        cells.append(Cell("prefill", Workload(PREFILL_BATCH, options.prefill_tokens, 1, vocab_size)))
        cells = [cell for cell in cells if options.kind in (None, cell.kind)]
        with ExitStack() as stack:
            start = functools.partial(
                start_engine,
                model=model,
                stack=stack,
                max_requests=max(cell.workload.batch for cell in cells),
                max_request_tokens=max(cell.workload.prompt_tokens + cell.workload.new_tokens for cell in cells),
            )
            engines, left_out = start_all(options.engine, ENGINE_NAMES, start)
            for cell in cells:
                row = measure(model, cell, engines, options.rounds, probe)
                row |= {"goals": goals_of(cell, row["engines"], left_out), "left_out": left_out}
                show_and_save(options.json, [row])


def measure(
    model: Path, cell: Cell, engines: Mapping[str, Engine[Generate]], num_rounds: int, probe: LimitProbe
) -> Row:
    """Return the row of a cell."""
    for engine in engines.values():  # warm up: read mapped files, start threads, compile kernels
        engine.run(draw_prompts(cell.workload, random.Random(1)), cell.workload.new_tokens)
    measures = {name: rate_measure(cell.kind, engine.run, cell.workload) for name, engine in engines.items()}
    rounds = interleave_with_limits(measures, num_rounds, probe)
    results = {
        name: engines[name].row(each, functools.partial(cell.limit_rate, model, name)) for name, each in rounds.items()
    }
    return {
        "benchmark": "throughput",
        "model": model.name,
        "cell": cell.name,
        "workload": asdict(cell.workload),
        "engines": results,
        "ratios": ratios(results),
    }


def goals_of(cell: Cell, results: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]) -> Row:
    """Return the cell's goal for each of our engines, and the fraction of it that was reached.

    Engines without a goal, or without a peer of the same bits, are left out.
    """
    goals = {}
    for engine, known in PEERS_OF.items():
        goal, peers = cell.goal(engine), [name for name in known if name in results]
        if goal is None or not peers or engine not in results:
            continue
        multiple, of_limit = goal
        best = max(peers, key=lambda name: float(results[name]["rate"]))
        reached = [
            own["rate"] / min(multiple * other["rate"], of_limit * own["limit_rate"])
            for own, other in zip(results[engine]["rounds"], results[best]["rounds"], strict=True)
        ]
        goals[engine] = {
            "best_peer": best,
            "ratio": multiple,
            "of_limit": of_limit,
            "reached": statistics.median(reached),
            "without": {name: left_out.get(name, "not selected") for name in known if name not in results},
        }
    return goals
