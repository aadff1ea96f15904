"""The cost and the gain of moving experts between ranks.

    python -m moeserve.bench.rebalance [--ranks 2 4] [--rounds 5] [--json PATH]

Replicas of one rank and one thread each run random prompts through a model with random weights, whose routers prefer
some experts. Two configurations are timed: with one redundant expert per rank and `rebalance="auto"`, before, during
and after a change of placement; and without redundant experts. In each round, all ranks are started anew for each
configuration. *p99* is over all rounds. *gain* is tokens per second after the change over before it,
*gain_over_without* after the change over without redundant experts; both are computed within a round, as medians over
the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moeserve.bench.checkpoints import small_mixtral_config
from moeserve.bench.harness import Row, at_least, make_parser, percentile
from moeserve.bench.ranks import Ranks, Rebalanced, RunSteps
from moeserve.bench.report import show_and_save

MODEL = small_mixtral_config(hidden_size=512, expert_size=768, num_layers=6, num_experts=16, vocab_size=8192)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("rebalance", "The cost of moving experts, and the gain.", rounds=5, threads=False)
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 4], help="numbers of replicas")
    parser.add_argument("--tokens", type=at_least(1), default=128, help="tokens of each replica in a step")
    parser.add_argument("--steps", type=at_least(2), default=60, help="steps before, and again after")
    parser.add_argument(
        "--hottest", type=float, default=3.0, help="ratio of the longest to the shortest router row; 1: no preference"
    )
    options = parser.parse_args(arguments)
    order = RunSteps(
        num_tokens=options.tokens, num_steps=options.steps, max_steps=20 * options.steps, hottest=options.hottest
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for num_ranks in options.ranks:
            rounds = []
            for index in range(options.rounds):
                alternating = (False, True) if index % 2 else (True, False)
                answers = {balances: run(model, num_ranks, order, balances) for balances in alternating}
                rounds.append((answers[False], answers[True]))
            show_and_save(options.json, [as_row(num_ranks, order, rounds)])


def run(model: Path, num_ranks: int, order: RunSteps, balances: bool) -> Rebalanced:
    """Start ranks, and return the answer of the first rank.

    Args:
        balances: use redundant experts and rebalancing.

    Raises:
        EngineError: a rank has failed.
    """
    with Ranks(
        model,
        data_parallel_size=num_ranks,
        num_redundant_experts=num_ranks if balances else 0,
        load_format="dummy",
        kv_cache_memory="64MiB",
        max_model_len=order.num_tokens,
        max_num_batched_tokens=order.num_tokens,
        rebalance="auto" if balances else "off",
    ) as ranks:
        answer: Rebalanced = ranks.run(order)[0]
        return answer


def as_row(num_ranks: int, order: RunSteps, rounds: Sequence[tuple[Rebalanced, Rebalanced]]) -> Row:
    """Return the row of several rounds, each without and with rebalancing."""
    balanced = [with_it for _, with_it in rounds]
    without = [without_it for without_it, _ in rounds]

    def spread(parts: Sequence[Sequence[float]]) -> dict[str, float]:
        seconds = [each for part in parts for each in part]
        return {"p50": statistics.median(seconds), "p99": percentile(seconds, 0.99), "steps": len(seconds)}

    gains = [sum(each.before.seconds) / sum(each.after.seconds) for each in balanced]
    gains_over_without = [sum(one.after.seconds) / sum(two.after.seconds) for one, two in rounds]
    return {
        "benchmark": "rebalance",
        "ranks": num_ranks,
        "tokens": order.num_tokens,
        "hottest": order.hottest,
        "without": spread([each.after.seconds for each in without]),
        "before": spread([each.before.seconds for each in balanced]),
        "during": spread([each.during for each in balanced]),
        "after": spread([each.after.seconds for each in balanced]),
        "max_over_mean": {
            "without": statistics.median(each.after.max_over_mean for each in without),
            "before": statistics.median(each.before.max_over_mean for each in balanced),
            "after": statistics.median(each.after.max_over_mean for each in balanced),
        },
        "gain": statistics.median(gains),
        "gain_over_without": statistics.median(gains_over_without),
    }


if __name__ == "__main__":
    main()
