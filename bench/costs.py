"""The minimum memory traffic and arithmetic of a model's step, by weight format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeserve.bench.limits import Work
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

UNQUANTIZED = ("norms", "routers")
UNQUANTIZED_BITS = 16


@dataclass(frozen=True)
class WeightFormat:
    """Bits per weight in memory, including scales."""

    bits: float  # projections and experts
    head_bits: float  # output head
    multiplies_bytes: bool = False  # rows are quantised too

    def bits_of(self, part: str, head: str) -> float:
        if part in UNQUANTIZED:
            return UNQUANTIZED_BITS
        return self.head_bits if part == head else self.bits


FORMATS = {
    "bfloat16": WeightFormat(16, 16),
    "int8": WeightFormat(8, 8, True),
    "int4": WeightFormat(4.95, 8, True),
    "mxfp4": WeightFormat(4.25, 16, True),
    "fp8": WeightFormat(8 + 32 / 128**2, 16),  # ignores the few 16-bit weights of latent attention
    "q8_0": WeightFormat(8.5, 8.5, True),
    "q4_0": WeightFormat(4.5, 6.5625, True),  # llama.cpp stores the head as q6_K
}


def step_work(model: Path, *, num_tokens: int, num_logits: int, weights: WeightFormat = FORMATS["bfloat16"]) -> Work:
    """Return the work of one step over `num_tokens` tokens, of which `num_logits` rows reach the output head.

    All weights but the token embedding are read. Of the experts, only those that some token is routed to are read: with
    random routing, a fraction 1 - (1 - k / E) ** num_tokens. Keys, values and attention itself are left out; with short
    contexts they are below 2%.
    """
    description = describe(model)
    parts = summarize(description, "bfloat16").parts
    head = "embedding" if description.model.tie_word_embeddings else "output head"
    num_bits = operations = 0.0
    for part in parts:
        if part.name == "embedding" and part.name != head:
            continue
        share_read = 1 - (1 - part.num_active / part.num_parameters) ** num_tokens
        num_bits += weights.bits_of(part.name, head) * share_read * part.num_parameters
        operations += 2 * part.num_active * (num_logits if part.name == head else num_tokens)
    return Work(num_bits / 8, operations, weights.multiplies_bytes)
