"""The quality lost by quantization: the divergence of next-token probabilities from those of bf16 weights.

The bf16 model continues some openings by sampling. Each format then computes the probabilities of every next token of
the same texts. The results are the mean Kullback-Leibler divergence from bf16 over all positions, in nats over the
whole vocabulary, and the fraction of positions with the same most likely token. float32 is included to show how far
bf16 itself is from exact results, and therefore which divergences are significant.

int4 is measured twice: as `quantization="int4"` quantises weights, and as `moeserve quantize` does, with importances.
If the environment of llama.cpp is installed (`moeserve bench peers`), its Q4_K_M file of the same weights is run by
moeserve, too, so that only the weights differ.

The default model's weights were once quantized to 4 bits (GGUF's Q4_1), and int4 recovers their values. The benchmark
therefore also measures a copy whose weights are moved at random within the steps of these 4 bits, as if they had never
been rounded. It is compared with its own bf16 results, on the same texts.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.api.default_model import default_model
from moeserve.api.quantize import quantize
from moeserve.bench.checkpoints import changed_copy, find_checkpoint
from moeserve.bench.harness import make_parser
from moeserve.bench.peers.environments import is_installed, peers_folder
from moeserve.bench.peers.peers import make_gguf
from moeserve.bench.report import show_and_save
from moeserve.config.environment import cache_folder
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.machine import usable_cores
from moeserve.models.registry import read_facts
from moeserve.worker.loading import load_model
from moeserve.worker.texts import hidden_states

# L positions, V vocabulary, P positions of all texts

VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "KV cache in fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
QUANTIZED = "int4 with importances"
PEER = "llama.cpp's Q4_K_M"
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
MOVED = re.compile(r"(_proj|w[123])\.weight$")


@dataclass(frozen=True)
class Difference:
    """The difference of one variant from bf16."""

    mean_divergence: float  # nats
    share_same: float  # of positions with the same most likely token
    num_positions: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("quality", __doc__, rounds=None, threads=False)
    parser.add_argument("--model", help="checkpoint with a tokenizer (default: the default model)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each text")
    options = parser.parse_args(arguments)
    model = default_model() if options.model is None else find_checkpoint(options.model)
    texts = generated_texts(model, options.tokens)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        models = [model] if options.model else [model, move_weights(model, Path(folder) / f"{model.name}, moved")]
        rows = [
            {"benchmark": "quality", "model": each.name, "variant": variant} | vars(difference)
            for each in models
            for variant, difference in compare(each, texts, Path(folder)).items()
        ]
    show_and_save(options.json, rows)


def move_weights(model: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint whose matrices are moved by up to half a step of 4 bits. Return its folder.

    A step is a fifteenth of the range of 32 neighbouring inputs. The embedding, which is also the head, is unchanged.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(name: str, weight: Tensor) -> Tensor:
        if not MOVED.search(name):
            return weight
        groups = weight.float().unflatten(1, (-1, 32))
        steps = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        return (groups + steps * (torch.rand(groups.shape, generator=generator) - 0.5)).flatten(1)

    return changed_copy(model, folder, moved)


def generated_texts(model: Path, num_tokens: int) -> list[list[int]]:
    """Return the token ids of the openings with the bf16 model's continuations."""
    with LLM(model=str(model), dtype="bfloat16", max_model_len=num_tokens + 64) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=num_tokens, seed=0, ignore_eos=True)
        results = llm.generate(list(OPENINGS), params)
    return [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in results]


def compare(model: Path, texts: list[list[int]], folder: Path) -> dict[str, Difference]:
    """Compare each variant with bf16, over all positions of all texts.

    Args:
        folder: for files of quantised weights.
    """
    expected = list(log_probabilities(model, {"dtype": "bfloat16"}, texts))
    variants = {name: (model, settings) for name, settings in VARIANTS.items()}
    quantize(model, folder / f"{model.name}-int4")
    variants[QUANTIZED] = folder / f"{model.name}-int4", {}
    if is_installed("llama.cpp", peers_folder()):
        variants[PEER] = make_gguf(model, "q4_k_m"), {}
    return {name: difference(expected, log_probabilities(*of, texts)) for name, of in variants.items()}


@torch.inference_mode()
def log_probabilities(model: Path, settings: dict[str, str], texts: list[list[int]]) -> Iterator[Tensor]:
    """Yield the log-probabilities of every next token of each text, [L, V] float32."""
    facts = read_facts(model)
    config = resolve(parse_settings(dict(settings)), facts, MachineFacts(num_cores=usable_cores()))
    loaded = load_model(config, groups_of_one_rank(), show_progress=False).model
    for hidden_LD in hidden_states(loaded, config, texts):
        yield loaded.logits(hidden_LD).float().log_softmax(-1)


def difference(expected: Sequence[Tensor], actual: Iterator[Tensor]) -> Difference:
    """Return the divergence of `actual` from `expected`; both are log-probabilities [L, V] of each text."""
    divergences, same = [], []
    for expected_LV, actual_LV in zip(expected, actual, strict=True):
        divergences.append((expected_LV.exp() * (expected_LV - actual_LV)).sum(-1))
        same.append(expected_LV.argmax(-1) == actual_LV.argmax(-1))
    divergence_P, same_P = torch.cat(divergences), torch.cat(same)
    return Difference(divergence_P.mean().item(), same_P.float().mean().item(), len(divergence_P))
