"""What a decode step costs with each executor: the same ranks on one host, reached over sockets or through Ray.

    moeserve launch --head 127.0.0.1 --num-cpus 8 -- python -m moeserve.bench.executors [--rounds 7] [--json PATH]

One request is decoded by a tiny model with random weights, so that what carries the steps shows: *mp* runs the first
rank of a replica in the process that plans its steps, and sends them to the others over socket pairs; *ray* has an
actor for each rank, and sends steps through a compiled graph, or by plain calls. A step's time is that of a run with
many new tokens less that of one with a single one, for each token between. *added* is over mp in the same round,
median over rounds.

All engines of a layout are alive at the same time and take turns; those that are not asked sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve import LLM
from moeserve.bench.decode import Generate, Workload, decode_rate, generate_with
from moeserve.bench.harness import add_options, at_least, environment, interleave, write_jsonl

WAYS: dict[str, dict[str, Any]] = {
    "mp": {"executor": "mp"},
    "ray, compiled graph": {"executor": "ray", "ray_compiled_graph": True},
    "ray, plain calls": {"executor": "ray", "ray_compiled_graph": False},
}
LAYOUTS = ((1, 1), (2, 1), (1, 2))  # tp, dp
PROMPT_TOKENS = 16
TINY = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.executors", description="What a decode step costs with each executor."
    )
    parser.add_argument("--new-tokens", type=at_least(2), default=257, help="of the longer run")
    add_options(parser, rounds=7, threads=False)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
        for tp, dp in LAYOUTS:
            row = measure(model, tp, dp, options.new_tokens, options.rounds)
            print(as_text(row), flush=True)
            if options.json:
                write_jsonl(options.json, [row])


def measure(model: Path, tp: int, dp: int, new_tokens: int, num_rounds: int) -> dict[str, Any]:
    """One layout, with all executors."""
    with contextlib.ExitStack() as running:
        steps = {}
        for way, settings in WAYS.items():
            llm = running.enter_context(
                LLM(
                    model,
                    load_format="dummy",
                    tensor_parallel_size=tp,
                    data_parallel_size=dp,
                    num_threads=1,
                    kv_cache_memory="64MiB",
                    max_model_len=512,
                    enable_prefix_caching=False,
                    show_progress=False,
                    **settings,
                )
            )
            workload = Workload(1, PROMPT_TOKENS, new_tokens, llm.config.vocab_size)
            steps[way] = functools.partial(step_seconds, generate_with(llm), workload, random.Random(0))
        interleave(steps, 1)  # not counted
        samples = interleave(steps, num_rounds)
    return {
        "benchmark": "executors",
        "model": model.name,
        "tp": tp,
        "dp": dp,
        "ways": {
            way: {
                "seconds": statistics.median(seconds),
                "added": statistics.median(own - base for own, base in zip(seconds, samples["mp"], strict=True)),
                "rounds": seconds,
            }
            for way, seconds in samples.items()
        },
        "environment": environment(),
    }


def step_seconds(generate: Generate, workload: Workload, source: random.Random) -> float:
    """Of one decode step of one request."""
    return 1 / decode_rate(generate, workload, source)


def as_text(row: Mapping[str, Any]) -> str:
    """A row for people."""
    lines = [f"{row['model']}, tp {row['tp']}, dp {row['dp']}: one decode step"]
    lines.append(f"{'':<24}{'ms':>8}{'added':>8}   rounds")
    for way, figure in row["ways"].items():
        rounds = " ".join(f"{seconds * 1e3:.1f}" for seconds in figure["rounds"])
        lines.append(f"{way:<24}{figure['seconds'] * 1e3:>8.2f}{figure['added'] * 1e3:>8.2f}   {rounds}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
