"""Batch decode speed of moeserve against transformers, in one process and in turns.

    python -m moeserve.bench.decode [--batch 1] [--rounds 5] [--new-tokens 64] [--json PATH]

How each figure is measured:

- *tokens per second*: every request gets a prompt of random token ids and is decoded greedily in bf16. Two runs are
  timed, one of N new tokens and one of 1, and the rate is batch x (N - 1) / (time of N - time of 1): the prompt's
  share and all fixed costs fall out, for both engines alike. No prompt is used twice, so no engine can reuse keys and
  values. The figure is the median over the rounds; in each round both engines run, in alternating order, after one
  round that is not counted. Both use the same number of threads and otherwise their default settings;
  transformers runs `generate` with its KV cache and sdpa attention.
- *limit*: the bytes of weights that one step must read, at the memory bandwidth measured in the same run, or its
  multiply-adds at the measured bf16 matrix rate, whichever takes longer. An expert is read if any request of the batch
  chose it, which for random routing is 1 - (1 - k / E) ** batch of all. Keys and values are left out; with short
  contexts they are under 2 %.

Knows the engines through their public doors only.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import CheckpointName, make_checkpoint
from moeserve.bench.harness import (
    MachineLimits,
    environment,
    interleave,
    measure_limits,
    ratio_of_medians,
    write_jsonl,
)
from moeserve.machine import usable_cores
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

EngineName = Literal["moeserve", "transformers"]
Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts, tokens to add to each -> the tokens added
BYTES_PER_WEIGHT = 2  # both engines run in bf16


@dataclass(frozen=True)
class Workload:
    """What one timed run is given: `batch` prompts of `prompt_tokens` random ids, `new_tokens` more for each."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class StepCost:
    """What one decode step must do, whoever does it."""

    weight_bytes: float
    operations: float  # a multiply-add counts two


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.decode", description="Decode speed of moeserve against transformers."
    )
    parser.add_argument("--model", default="mixtral-mini", help="a synthetic checkpoint by name, or a folder")
    parser.add_argument(
        "--engine", action="append", choices=get_args(EngineName), help="run this one only; may be repeated"
    )
    parser.add_argument("--batch", type=int, default=1, help="requests decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of the longer run, at least 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")
    parser.add_argument("--profile", action="store_true", help="print where each engine's time goes, per operator")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2 or min(options.batch, options.prompt_tokens, options.rounds, options.threads) < 1:
        parser.error("--new-tokens must be at least 2, and all other numbers at least 1")

    torch.set_num_threads(options.threads)
    model = make_checkpoint(options.model) if options.model in get_args(CheckpointName) else Path(options.model)
    if not (model / "config.json").exists():
        parser.error(
            f"--model {options.model}: no such checkpoint; known names are {', '.join(get_args(CheckpointName))}"
        )
    config = json.loads((model / "config.json").read_text())
    workload = Workload(options.batch, options.prompt_tokens, options.new_tokens, config["vocab_size"])
    limits = measure_limits()
    limit = limit_rate(step_cost(model, workload.batch), workload.batch, limits)

    engines: dict[str, Generate] = {
        name: start_engine(name, model, workload) for name in options.engine or get_args(EngineName)
    }
    samples = measure(engines, workload, options.rounds)
    print(_table(model.name, workload, samples, limit, limits))
    if options.json:
        write_jsonl(options.json, _rows(model.name, workload, samples, limit, limits))
    if options.profile:
        for name, generate in engines.items():
            print(f"\n{name}, per operator\n{_profile(generate, workload)}")


def measure(engines: Mapping[str, Generate], workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    """Decode rates of each engine in tokens per second, one per round, after a round that is not counted."""
    # Every engine draws from a generator of its own with one seed, so all see the same prompts in the same order.
    measures: dict[str, Callable[[], float]] = {
        name: functools.partial(_decode_rate, generate, workload, random.Random(0))
        for name, generate in engines.items()
    }
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def step_cost(model: Path, batch: int) -> StepCost:
    """Counts what a decode step must read and compute.

    All weights but the token embedding take part; of the experts, those that some request chose. Reading the KV cache
    is not counted.
    """
    description = describe(model)
    parts = {part.name: part for part in summarize(description, "bfloat16").parts}
    experts = parts.pop("routed experts")
    if not description.model.tie_word_embeddings:
        parts.pop("embedding")
    num_dense = sum(part.num_parameters for part in parts.values())
    share_per_token = experts.num_active / experts.num_parameters
    share_read = 1 - (1 - share_per_token) ** batch
    return StepCost(
        weight_bytes=BYTES_PER_WEIGHT * (num_dense + share_read * experts.num_parameters),
        operations=2 * batch * (num_dense + experts.num_active),
    )


def limit_rate(cost: StepCost, batch: int, limits: MachineLimits) -> float:
    """Tokens per second of an engine that wastes nothing."""
    seconds_reading = cost.weight_bytes / (limits.read_bandwidth * 1e9)
    seconds_computing = cost.operations / (limits.matmul_rate * 1e9)
    return batch / max(seconds_reading, seconds_computing)


def start_engine(name: EngineName, model: Path, workload: Workload) -> Generate:
    """Loads the model and returns what generates with it."""
    match name:
        case "moeserve":
            return _moeserve(model, workload)
        case "transformers":
            return _transformers(model)


def _moeserve(model: Path, workload: Workload) -> Generate:
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        device="cpu",
        num_threads=torch.get_num_threads(),
        max_model_len=workload.prompt_tokens + workload.new_tokens,
    )
    return generate_with(llm)


def generate_with(llm: LLM) -> Generate:
    """Greedy decoding by moeserve, past the end of sequence."""

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [result.outputs[0].token_ids for result in results]

    return generate


def _transformers(model: Path) -> Generate:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    peer.generation_config.eos_token_id = None  # as ignore_eos: never stop early
    peer.generation_config.pad_token_id = 0  # never used, but generate asks for one

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        prompt_ids = torch.tensor(prompts)
        output_ids = peer.generate(
            prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=num_tokens, do_sample=False
        )
        return output_ids[:, prompt_ids.shape[1] :].tolist()

    return generate


def _decode_rate(generate: Generate, workload: Workload, source: random.Random) -> float:
    long_seconds = run_seconds(generate, workload, workload.new_tokens, source)
    short_seconds = run_seconds(generate, workload, 1, source)
    if long_seconds <= short_seconds:
        raise RuntimeError(
            f"{workload.new_tokens} tokens took {long_seconds:.3g} s and 1 token {short_seconds:.3g} s: too short to "
            "measure here; ask for more new tokens"
        )
    return workload.batch * (workload.new_tokens - 1) / (long_seconds - short_seconds)


def run_seconds(generate: Generate, workload: Workload, num_tokens: int, source: random.Random) -> float:
    """Seconds that a batch of new prompts takes to its last token."""
    prompts = _draw_prompts(workload, source)
    start = time.perf_counter()
    outputs = generate(prompts, num_tokens)
    seconds = time.perf_counter() - start
    if [len(output) for output in outputs] != [num_tokens] * workload.batch:
        raise RuntimeError(f"asked for {workload.batch} x {num_tokens} tokens, got {[len(o) for o in outputs]}")
    return seconds


def _draw_prompts(workload: Workload, source: random.Random) -> list[list[int]]:
    return [source.choices(range(workload.vocab_size), k=workload.prompt_tokens) for _ in range(workload.batch)]


def _profile(generate: Generate, workload: Workload) -> str:
    prompts = _draw_prompts(workload, random.Random(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        generate(prompts, workload.new_tokens)
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40)


def _table(
    model_name: str, workload: Workload, samples: dict[str, list[float]], limit: float, limits: MachineLimits
) -> str:
    lines = [
        f"{model_name}, bf16, batch {workload.batch}, {workload.prompt_tokens} + {workload.new_tokens} tokens, "
        f"{limits.num_threads} threads; {limits.read_bandwidth:.1f} GB/s, {limits.matmul_rate:.0f} GFLOP/s",
        f"{'decode':<14}{'tokens/s':>10}{'of limit':>10}   rounds",
    ]
    for name, rates in samples.items():
        rate = statistics.median(rates)
        rounds = " ".join(f"{sample:.2f}" for sample in rates)
        lines.append(f"{name:<14}{rate:>10.2f}{rate / limit:>10.0%}   {rounds}")
    lines.append(f"{'limit':<14}{limit:>10.2f}")
    if {"moeserve", "transformers"} <= samples.keys():
        ratio = ratio_of_medians(samples["moeserve"], samples["transformers"])
        lines.append(f"moeserve / transformers: {ratio:.2f}")
    return "\n".join(lines)


def _rows(
    model_name: str, workload: Workload, samples: dict[str, list[float]], limit: float, limits: MachineLimits
) -> list[dict[str, Any]]:
    """One row per engine, each complete in itself."""
    machine = environment()
    rows = []
    for name, rates in samples.items():
        rate = statistics.median(rates)
        rows.append(
            {
                "benchmark": "decode",
                "model": model_name,
                "engine": name,
                "workload": asdict(workload),
                "tokens_per_second": rate,
                "samples": rates,
                "limit_tokens_per_second": limit,
                "fraction_of_limit": rate / limit,
                "ratio_to_transformers": (
                    ratio_of_medians(rates, samples["transformers"]) if "transformers" in samples else None
                ),
                "limits": asdict(limits),
                "environment": machine,
            }
        )
    return rows


if __name__ == "__main__":
    main()
