"""Random queries and keys of an indexer over scattered blocks, for tests of kernels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.ops.indexer.interface import ChooseEntries, ChosenEntries, IndexerRule
from moeserve.step_inputs import StepInputs

# T tokens, N heads of the indexer, H size of a key


@dataclass(frozen=True)
class Shape:
    """The sizes of an indexer and of its cache."""

    num_heads: int
    head_size: int
    rule: IndexerRule
    block_size: int  # entries


SHAPES = {
    "published": Shape(64, 128, IndexerRule(top_k=64), 16),
    "odd": Shape(5, 36, IndexerRule(top_k=7), 3),
    "compressed": Shape(3, 16, IndexerRule(top_k=9, tokens_per_entry=4), 4),
    "one": Shape(1, 8, IndexerRule(top_k=1), 1),
    "expanded": Shape(3, 16, IndexerRule(top_k=5, tokens_per_entry=3, is_expanded=True), 4),
}


@dataclass(frozen=True)
class Case:
    """Queries and weights of the tokens of a step, and a cache of keys."""

    shape: Shape
    query_TNH: Tensor
    weights_TN: Tensor
    key_cache: Tensor
    step: StepInputs

    @classmethod
    def random(cls, name: str, dtype: torch.dtype, step: StepInputs) -> Case:
        """Return numbers of few values, so that products are exact in any order, and scores are often equal."""
        shape = SHAPES[name]
        generator = torch.Generator().manual_seed(len(name))

        def draw(*sizes: int) -> Tensor:
            return torch.randint(-2, 3, sizes, generator=generator).to(dtype)

        num_tokens, num_blocks = len(step.token_ids), 1 + int(step.block_table.max())
        projected = draw(num_tokens, shape.num_heads * (shape.head_size + 1) + 1)  # queries and weights are views of it
        query, weights = projected[:, 1:].split([shape.num_heads * shape.head_size, shape.num_heads], dim=1)
        keys = draw(num_blocks, shape.block_size, shape.head_size)
        return cls(shape, query.unflatten(1, (shape.num_heads, shape.head_size)), weights, keys, step)

    def run(self, choose: ChooseEntries) -> ChosenEntries:
        return choose(self.query_TNH, self.weights_TN, self.key_cache, self.step)

    def of_rows(self, rows: Tensor, step: StepInputs) -> Case:
        """Return the case of some of its tokens in a step of their own."""
        return dataclasses.replace(self, query_TNH=self.query_TNH[rows], weights_TN=self.weights_TN[rows], step=step)

    def by_hand(self) -> list[list[int]]:
        """Return the slots of each token from the definition, one token and one entry after the other."""
        slots: list[list[int]] = [[] for _ in range(len(self.query_TNH))]
        for span, blocks in zip(self.step.spans, self.step.block_table.tolist(), strict=True):
            for row in range(span.first_row, span.first_row + span.num_rows):
                position = span.context_len - span.num_rows + row - span.first_row
                size = self.shape.block_size
                seen = [
                    blocks[entry // size] * size + entry % size
                    for entry in range((position + 1) // self.shape.rule.tokens_per_entry)
                ]
                products = self.query_TNH[row].double() @ self.key_cache.flatten(0, 1)[seen].double().T
                scores = (self.weights_TN[row].double() @ products.relu()).tolist()
                best = sorted(range(len(seen)), key=lambda entry: (-scores[entry], entry))
                chosen = sorted(best[: self.shape.rule.top_k])
                slots[row] = [seen[entry] for entry in chosen]
                if self.shape.rule.is_expanded:
                    size, num_tokens = size * self.shape.rule.tokens_per_entry, self.shape.rule.tokens_per_entry
                    tokens = [entry * num_tokens + number for entry in chosen for number in range(num_tokens)]
                    tokens += range(len(seen) * num_tokens, position + 1)
                    slots[row] = [blocks[token // size] * size + token % size for token in tokens]
        return slots


def slots_of(chosen: ChosenEntries) -> list[list[int]]:
    """Return the slots of each token as lists."""
    assert torch.equal(chosen.starts, torch.arange(len(chosen.counts_T) + 1, dtype=torch.int32))
    return [slots[:count] for slots, count in zip(chosen.slots_TC.tolist(), chosen.counts_T.tolist(), strict=True)]
