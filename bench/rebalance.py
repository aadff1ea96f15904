"""What moving experts between ranks costs while it goes on, and what it gains.

    python -m moeserve.bench.rebalance [--ranks 2 4] [--rounds 5] [--json PATH]

Replicas of one rank, each on one thread, run prompts of random tokens through a model of random weights whose routers
prefer some experts. With a slot for a redundant expert on each rank and `rebalance="auto"`, steps are timed as they
are, then while a better placement is planned and experts move, and then as they are afterwards; without both, as they
are. In a round all ranks are started anew for each. *p99* is over all rounds together; *gain* is tokens per second
afterwards over those before, and *gain_over_without* over those without, in the same round; both are medians over
rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.harness import add_options, at_least, environment, write_jsonl
from moeserve.bench.parallel import percentile
from moeserve.bench.rebalance_rank import Ran, RunSteps
from moeserve.config.environment import environment_of_rank
from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.group import start_store
from moeserve.machine import usable_cores
from moeserve.models.registry import read_facts
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all, wait_for_messages
from moeserve.worker.protocol import RankStart, rank_name

MODEL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.rebalance", description="What moving experts costs and gains."
    )
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 4], help="numbers of replicas")
    parser.add_argument("--tokens", type=at_least(1), default=128, help="of each replica in a step")
    parser.add_argument("--steps", type=at_least(2), default=60, help="before, and afterwards")
    parser.add_argument(
        "--hottest", type=float, default=3.0, help="length of the longest router row; 1: none is longer"
    )
    add_options(parser, rounds=5, threads=False)
    options = parser.parse_args(arguments)
    order = RunSteps(
        num_tokens=options.tokens, num_steps=options.steps, most_steps=20 * options.steps, hottest=options.hottest
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for num_ranks in options.ranks:
            rounds = []
            for number in range(options.rounds):
                order_of_runs = (False, True) if number % 2 else (True, False)  # the first may have the cooler machine
                ran = {balances: run(model, num_ranks, order, balances) for balances in order_of_runs}
                rounds.append((ran[False], ran[True]))
            row = as_row(num_ranks, order, rounds)
            print(as_text(row), flush=True)
            if options.json:
                write_jsonl(options.json, [row])


def run(model: Path, num_ranks: int, order: RunSteps, balances: bool) -> Ran:
    """What the first of some ranks saw, which were started for it. EngineError when one has died.

    Args:
        balances: whether there are redundant experts, and experts move.
    """
    settings = parse_settings(
        {
            "data_parallel_size": num_ranks,
            "num_threads": 1,
            "num_redundant_experts": num_ranks if balances else 0,
            "load_format": "dummy",
            "kv_cache_memory": "64MiB",
            "max_model_len": order.num_tokens,
            "max_num_batched_tokens": order.num_tokens,
            "rebalance": "auto" if balances else "off",
        }
    )
    config = resolve(settings, read_facts(model), MachineFacts(num_cores=usable_cores()))
    store = start_store()
    children: list[WatchedProcess[Ran]] = [
        start_process(
            "moeserve.bench.rebalance_rank:work",
            rank_name(config, rank),
            RankStart(config=config, rank=rank, store_host="127.0.0.1", store_port=store.port),
            Ran,
            environment=environment_of_rank(config, usable_cores()),
        )
        for rank in range(num_ranks)
    ]
    try:
        for child in children:
            child.channel.send(order)
        told: dict[str, Ran] = {}
        while len(told) < len(children):
            wait_for_messages(children, None)
            for child in children:
                for ran in child.receive():
                    told[child.name] = ran
            if any(child.failures() for child in children if child.name not in told):
                raise as_error(root_cause(collect_failures(children)), "while steps were timed")
        return told[children[0].name]
    finally:
        end_all(children)


def as_row(num_ranks: int, order: RunSteps, both: Sequence[tuple[Ran, Ran]]) -> dict[str, Any]:
    """Of rounds, each without and with balancing."""
    rounds = [with_it for _, with_it in both]

    def of_steps(parts: Sequence[Sequence[float]]) -> dict[str, float]:
        seconds = [each for part in parts for each in part]
        return {"p50": statistics.median(seconds), "p99": percentile(seconds, 0.99), "steps": len(seconds)}

    gains = [sum(ran.before.seconds) / sum(ran.after.seconds) for ran in rounds]
    gains_over_without = [sum(without.after.seconds) / sum(with_it.after.seconds) for without, with_it in both]
    return {
        "benchmark": "rebalance",
        "ranks": num_ranks,
        "tokens": order.num_tokens,
        "hottest": order.hottest,
        "without": of_steps([without.after.seconds for without, _ in both]),
        "before": of_steps([ran.before.seconds for ran in rounds]),
        "during": of_steps([ran.during for ran in rounds]),
        "after": of_steps([ran.after.seconds for ran in rounds]),
        "max_over_mean": {
            "without": statistics.median(without.after.max_over_mean for without, _ in both),
            "before": statistics.median(ran.before.max_over_mean for ran in rounds),
            "after": statistics.median(ran.after.max_over_mean for ran in rounds),
        },
        "gain": statistics.median(gains),
        "gains": gains,
        "gain_over_without": statistics.median(gains_over_without),
        "gains_over_without": gains_over_without,
        "layers_switched": rounds[0].num_layers_switched,
        "bytes_moved": rounds[0].bytes_moved,
        "environment": environment(),
    }


def as_text(row: dict[str, Any]) -> str:
    without, before, during, after = row["without"], row["before"], row["during"], row["after"]
    balance = row["max_over_mean"]
    return (
        f"{row['ranks']} ranks, {row['tokens']} tokens each: fullest over mean {balance['without']:.2f} without, "
        f"{balance['before']:.2f} before, {balance['after']:.2f} afterwards\n"
        f"  tokens/s: x {row['gain_over_without']:.2f} over without {_shown(row['gains_over_without'])}, "
        f"x {row['gain']:.2f} over before {_shown(row['gains'])}\n"
        f"  step p50 ms: {without['p50'] * 1e3:.1f} without, {before['p50'] * 1e3:.1f} before, "
        f"{during['p50'] * 1e3:.1f} meanwhile, {after['p50'] * 1e3:.1f} afterwards\n"
        f"  step p99 ms: {before['p99'] * 1e3:.1f} before, {during['p99'] * 1e3:.1f} meanwhile "
        f"(x {during['p99'] / before['p99']:.2f}, {during['steps']} steps), {after['p99'] * 1e3:.1f} afterwards\n"
        f"  {row['layers_switched']} layers switched, {row['bytes_moved'] / 2**20:.0f} MiB moved"
    )


def _shown(gains: Sequence[float]) -> str:
    return "(" + ", ".join(f"{gain:.2f}" for gain in gains) + ")"


if __name__ == "__main__":
    main()
