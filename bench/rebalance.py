"""The cost and the gain of moving experts between ranks.

Replicas of one rank and one thread each run random prompts through a model with random weights, whose routers prefer
some experts. Two settings are timed: with one redundant expert for each rank and `rebalance="auto"`, before, while and
after experts move; and without redundant experts. In each round, all ranks are started anew for each setting.

- *max over mean*: the load of the fullest rank over the mean of all ranks.
- *gain*: tokens per second after the move over before it; *gain over without*: over those without redundant experts.
  Both are computed within a round, as medians over the rounds. *p99* is over all rounds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import changed_copy, find_checkpoint
from moeserve.bench.harness import Row, at_least, interleave, make_parser, percentile
from moeserve.bench.report import show_and_save
from moeserve.telemetry.expert_load import ranks_max_over_mean

MODEL = "skewed-mini"
HOTTEST = 3.0  # ratio of the longest to the shortest router row
WARM_UP_STEPS = 3
PHASES = ("before", "during", "after")


@dataclass(frozen=True)
class Phase:
    """Consecutive steps."""

    seconds: list[float]  # of each step
    max_over_mean: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("rebalance", __doc__, rounds=5, threads=False)
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 4], help="numbers of replicas")
    parser.add_argument("--tokens", type=at_least(1), default=128, help="tokens of each replica in a step")
    parser.add_argument("--steps", type=at_least(2), default=60, help="steps before the move, with it, and after it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = changed_copy(find_checkpoint(MODEL), Path(folder) / MODEL, skewed)
        for num_ranks in options.ranks:
            measure = partial(run, model, num_ranks, options.tokens, options.steps)
            measures = {name: partial(measure, name == "with") for name in ("without", "with")}
            rounds = interleave(measures, options.rounds)
            row = as_row(rounds["without"], rounds["with"])
            facts = {"benchmark": "rebalance", "ranks": num_ranks, "tokens": options.tokens, "hottest": HOTTEST}
            show_and_save(options.json, [facts | row])


def skewed(name: str, weight: Tensor) -> Tensor:
    """Make router rows longer with the index of the expert: experts with longer rows are chosen more often."""
    return (
        weight * torch.logspace(0, 1, len(weight), base=HOTTEST)[:, None] if name.endswith(".gate.weight") else weight
    )


def run(model: Path, num_ranks: int, num_tokens: int, num_steps: int, balances: bool) -> dict[str, Phase]:
    """Start replicas, and return the phases, which differ only with redundant experts."""
    source, phases = random.Random(0), {}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(
        model, dtype="bfloat16", device="cpu", num_threads=1, data_parallel_size=num_ranks,
        num_redundant_experts=num_ranks if balances else 0, rebalance="auto" if balances else "off",
        kv_cache_memory="64MiB", max_model_len=num_tokens + 1, max_num_batched_tokens=num_tokens, packed_cache=0,
        enable_prefix_caching=False, show_progress=False,
    ) as llm:  # fmt: skip
        vocab_size = llm.config.texts.vocab_size

        def step() -> float:
            prompts = [source.choices(range(vocab_size), k=num_tokens) for _ in range(num_ranks)]
            began = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            return time.perf_counter() - began

        for _ in range(WARM_UP_STEPS):
            step()
        for name in PHASES:
            seconds = [step() for _ in range(num_steps)]
            phases[name] = Phase(seconds, ranks_max_over_mean(llm.expert_load()))  # whose collection begins a move
    return phases


def as_row(without: Sequence[dict[str, Phase]], balanced: Sequence[dict[str, Phase]]) -> Row:
    """Return the figures of several rounds, each without and with rebalancing."""
    phases = {"without": [each["after"] for each in without]} | {
        name: [each[name] for each in balanced] for name in PHASES
    }
    row: Row = {"max_over_mean": {}}
    for name, each in phases.items():
        seconds = [second for phase in each for second in phase.seconds]
        row[name] = {"p50": statistics.median(seconds), "p99": percentile(seconds, 0.99), "steps": len(seconds)}
        row["max_over_mean"][name] = statistics.median(phase.max_over_mean for phase in each)
    for gain, base in (("gain", "before"), ("gain_over_without", "without")):
        pairs = zip(phases[base], phases["after"], strict=True)
        row[gain] = statistics.median(sum(one.seconds) / sum(two.seconds) for one, two in pairs)
    return row
