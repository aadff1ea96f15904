"""Compares a peer's greedy tokens with transformers in float32.

    python -m moeserve.bench.peers.check NAME ... --model mixtral-mini [--new-tokens 32]

The peer continues a few random prompts. transformers reads each prompt with its continuation; for every token that the
peer chose, the gap is how far its logit lies below the highest one, in standard deviations of that row of logits. In
bf16, near ties give gaps of a small fraction of one; random tokens, as a wrong conversion of weights gives them, have
gaps of about four with a vocabulary of 32000.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.peers.peers import PeerName, start_peer

NUM_PROMPTS = 4
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Agreement:
    """The agreement of a peer's tokens with transformers in float32."""

    share_equal: float  # of the tokens, those with the highest logit
    mean_gap: float  # in standard deviations of the logits
    max_gap: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.peers.check", description="Compare the tokens of peers with transformers."
    )
    parser.add_argument("names", nargs="+", choices=get_args(PeerName), metavar="NAME")
    parser.add_argument("--model", default="mixtral-mini", help="a synthetic checkpoint by name, or a folder")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="folder of the peers' environments")
    options = parser.parse_args(arguments)
    model = find_checkpoint(options.model)
    prompts = draw_prompts(model)
    outputs = {}
    for name in options.names:
        with start_peer(
            name, model, max_request_tokens=PROMPT_TOKENS + options.new_tokens, folder=options.folder
        ) as peer:
            outputs[name] = peer.generate(prompts, options.new_tokens)
    for name, agreement in judge(model, prompts, outputs).items():
        print(
            f"{model.name}, {name}: {agreement.share_equal:.0%} of tokens equal; gap "
            f"{agreement.mean_gap:.3f} on average, {agreement.max_gap:.3f} at most (standard deviations of the logits)"
        )


def draw_prompts(model: Path) -> list[list[int]]:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    source = random.Random(0)
    return [source.choices(range(vocab_size), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def judge(model: Path, prompts: Sequence[Sequence[int]], outputs: dict[str, list[list[int]]]) -> dict[str, Agreement]:
    """Return the agreement of each peer's continuations. Loads the reference model once."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    verdicts = {}
    for name, continuations in outputs.items():
        tokens = torch.tensor([[*prompt, *output] for prompt, output in zip(prompts, continuations, strict=True)])
        start = tokens.shape[1] - len(continuations[0])
        with torch.inference_mode():
            logits = reference(tokens).logits[:, start - 1 : -1]
        chosen = logits.gather(-1, tokens[:, start:, None])[..., 0]
        gaps = (logits.amax(-1) - chosen) / logits.std(-1)
        verdicts[name] = Agreement((gaps == 0).float().mean().item(), gaps.mean().item(), gaps.max().item())
    return verdicts


if __name__ == "__main__":
    main()
