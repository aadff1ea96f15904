"""The time of a decode step with each executor: the same ranks on one host, over socket pairs or through Ray.

    moeserve launch --head 127.0.0.1 --num-cpus 8 -- python -m moeserve.bench.executors [--rounds 7] [--json PATH]

One request is decoded by a tiny model with random weights, so that sending the steps dominates. With *mp*, the process
that schedules a replica's steps runs its first rank, and sends steps to the other ranks over socket pairs. With *ray*,
each rank is an actor, and steps are sent through a compiled graph or by plain calls. The time of a step follows from
the decode rate (`decode.py`). *added* is the time in addition to mp in the same round; the median over the rounds.

All engines of a layout are loaded at once and measured alternately; idle engines sleep.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeserve import LLM
from moeserve.bench.checkpoints import small_mixtral_config
from moeserve.bench.decode import Workload, generate_with, rate_measure
from moeserve.bench.harness import Row, at_least, interleave, make_parser
from moeserve.bench.report import show_and_save

EXECUTORS: dict[str, dict[str, Any]] = {
    "mp": {"executor": "mp"},
    "ray, compiled graph": {"executor": "ray", "ray_compiled_graph": True},
    "ray, plain calls": {"executor": "ray", "ray_compiled_graph": False},
}
LAYOUTS = ((1, 1), (2, 1), (1, 2))  # tp, dp
PROMPT_TOKENS = 16
TINY = small_mixtral_config(hidden_size=128, expert_size=256, num_layers=2, num_experts=8, vocab_size=1024)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("executors", "The time of a decode step with each executor.", rounds=7, threads=False)
    parser.add_argument("--new-tokens", type=at_least(2), default=257, help="tokens of the longer run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
        for tp, dp in LAYOUTS:
            row = measure(model, tp, dp, options.new_tokens, options.rounds)
            show_and_save(options.json, [row])


def measure(model: Path, tp: int, dp: int, new_tokens: int, num_rounds: int) -> Row:
    """Return the row of one layout, with all executors."""
    with contextlib.ExitStack() as running:
        rates: dict[str, Callable[[], float]] = {}
        for name, settings in EXECUTORS.items():
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
            workload = Workload(1, PROMPT_TOKENS, new_tokens, llm.config.texts.vocab_size)
            rates[name] = rate_measure("decode", generate_with(llm), workload)
        rounds = interleave(rates, num_rounds, warms_up=True)
        samples = {name: [1 / rate for rate in each] for name, each in rounds.items()}
    return {
        "benchmark": "executors",
        "model": model.name,
        "tp": tp,
        "dp": dp,
        "ways": {
            name: {
                "seconds": statistics.median(seconds),
                "added": statistics.median(own - base for own, base in zip(seconds, samples["mp"], strict=True)),
                "rounds": seconds,
            }
            for name, seconds in samples.items()
        },
    }


if __name__ == "__main__":
    main()
