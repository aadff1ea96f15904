"""What quantising costs in quality: how far the next token's probabilities move from those of bf16 weights.

    python -m moeserve.bench.quality [--model FOLDER] [--json PATH]

The bf16 model continues a few openings by sampling, so that the text is its own. Then each format computes the
probabilities of every next token of the same texts. Reported is the mean over positions of the Kullback-Leibler
divergence from bf16's distribution, in nats over the whole vocabulary, and how often the likeliest token is the same.
float32 is measured too: what bf16 itself costs says how small a divergence can be to mean anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.api.default_model import default_model
from moeserve.bench.harness import environment, write_jsonl
from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.group import single
from moeserve.machine import usable_cores
from moeserve.models.registry import read_facts
from moeserve.protocol import Chunk, StepPlan
from moeserve.worker.loading import load_model
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.step_replay import EagerSteps, StepContext

# L positions, V vocabulary

Variant = Literal["float32", "int8", "int4"]
VARIANTS: dict[Variant, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
OPENINGS = (
    "The history of the city begins with",
    "To bake bread, you need",
    "In physics, energy is",
    "Once upon a time, a fox",
    "def quicksort(values):\n",
    "The capital of France is",
    "Dear Sir or Madam,",
    "Scientists have found that",
)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Difference:
    """Of one variant from bf16."""

    mean_divergence: float  # nats
    share_same: float  # of positions at which the likeliest token is the same
    num_positions: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.quality", description="What quantising costs.")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint with a tokenizer; none: the default model")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each text")
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")
    options = parser.parse_args(arguments)
    model = options.model or default_model()
    differences = compare(model, own_texts(model, options.tokens))
    print(f"{model.name}, from bf16, mean over {next(iter(differences.values())).num_positions} positions")
    print(f"{'':8} {'divergence':>12} {'same token':>12}")
    for name, difference in differences.items():
        print(f"{name:8} {difference.mean_divergence:12.5f} {difference.share_same:12.1%}")
    if options.json:
        rows = [
            {
                "benchmark": "quality",
                "model": model.name,
                "variant": name,
                **vars(difference),
                "environment": environment(),
            }
            for name, difference in differences.items()
        ]
        write_jsonl(options.json, rows)


def own_texts(model: Path, num_tokens: int) -> list[list[int]]:
    """Token ids of openings and of what the bf16 model makes of them."""
    llm = LLM(model=str(model), dtype="bfloat16", max_model_len=num_tokens + 64)
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, seed=0, ignore_eos=True)
    results = llm.generate(list(OPENINGS), params)
    llm.shutdown()
    return [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in results]


def compare(model: Path, texts: list[list[int]]) -> dict[Variant, Difference]:
    """Each variant against bf16, over all positions of all texts."""
    expected = list(log_probabilities(model, texts, {"dtype": "bfloat16"}))
    return {
        name: difference(expected, log_probabilities(model, texts, settings)) for name, settings in VARIANTS.items()
    }


@torch.inference_mode()
def log_probabilities(model: Path, texts: list[list[int]], settings: dict[str, str]) -> Iterator[Tensor]:
    """Of each text, [L, V] float32: of every next token."""
    facts = read_facts(model)
    config = resolve(parse_settings(dict(settings)), facts, MachineFacts(num_cores=usable_cores()))
    loaded = load_model(config, single(), show_progress=False).model
    num_blocks = -(-max(map(len, texts)) // BLOCK_SIZE)
    replay = EagerSteps(loaded, loaded.make_caches(num_blocks, BLOCK_SIZE))
    context = StepContext(
        mesh=single().mesh, tp_rank=0, block_size=BLOCK_SIZE, max_blocks=num_blocks, device=torch.device("cpu")
    )
    runner = ModelRunner(loaded, context, replay)
    for text in texts:
        plan = StepPlan(step=0, chunks=[Chunk(token_ids=text, start=0, block_ids=list(range(num_blocks)), sample=None)])
        hidden_LD = replay(runner.build_inputs(plan, (len(text),)))
        yield loaded.logits(hidden_LD).float().log_softmax(-1)


def difference(expected: Sequence[Tensor], given: Iterator[Tensor]) -> Difference:
    """The divergence of `given` from `expected`, log-probabilities [L, V] of each text."""
    divergences, same = [], []
    for expected_LV, given_LV in zip(expected, given, strict=True):
        divergences.append((expected_LV.exp() * (expected_LV - given_LV)).sum(-1))
        same.append(expected_LV.argmax(-1) == given_LV.argmax(-1))
    divergence_P, same_P = torch.cat(divergences), torch.cat(same)
    return Difference(divergence_P.mean().item(), same_P.float().mean().item(), len(divergence_P))


if __name__ == "__main__":
    main()
