"""Attention of one token to the positions that an indexer selects, with the C++ kernels, at growing context lengths.

    python -m moeserve.bench.sparse_attention [--threads 1] [--rounds 15] [--json PATH]

One layer in bf16 with the shapes of DeepSeek-V3.2: an indexer of 64 heads of size 128, and 128 heads over latent
vectors of size 576, of which 2048 are selected. The indexer reads all keys of a context, so its time grows with the
context. The time of attention to the selected positions should not. Attention to all positions, which grows far more,
is included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from moeserve.bench.gpu.inputs import Source, num_cache_blocks
from moeserve.bench.harness import Row, call_timer, interleave, make_parser
from moeserve.bench.report import show_and_save
from moeserve.ops.indexer import IndexerRule
from moeserve.ops.select import select_kernels
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS

KERNELS = select_kernels(torch.device("cpu"))
CONTEXTS = (8192, 16384, 32768, 65536)
TOP_K = 2048
INDEX_HEADS, INDEX_SIZE, NUM_HEADS, VECTOR_SIZE, LATENT_SIZE = 64, 128, 128, 576, 512
BLOCK_SIZE = 16
SAMPLE_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("sparse_attention", "Attention of one token to selected positions.", rounds=15)
    options = parser.parse_args(arguments)
    if KERNELS is TORCH_KERNELS:
        raise SystemExit("the C++ kernels are not built")
    set_num_threads(options.threads)
    show_and_save(options.json, measure(options.rounds))


@torch.inference_mode()
def measure(num_rounds: int) -> list[Row]:
    """Return a row for each context length, all measured alternately."""
    measures = {
        f"{name} {context}": call_timer(call, SAMPLE_SECONDS)
        for context in CONTEXTS
        for name, call in calls(context).items()
    }
    samples = interleave(measures, num_rounds, warms_up=True)
    rows: list[Row] = []
    for context in CONTEXTS:
        own = {name: samples[f"{name} {context}"] for name in ("indexer", "chosen", "all")}
        times = {name: statistics.median(seconds) * 1e3 for name, seconds in own.items()}
        rows.append({"benchmark": "sparse_attention", "context": context, "milliseconds": times, "samples": own})
    return rows


def calls(context_len: int) -> dict[str, Callable[[int], object]]:
    """Return the indexer, and both kinds of attention of one token at the end of a context."""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    step = source.step([(1, context_len)], BLOCK_SIZE)
    num_blocks = num_cache_blocks(step)
    query, weights = source.normal(1, INDEX_HEADS, INDEX_SIZE), source.normal(1, INDEX_HEADS)
    keys, vectors = (source.normal(num_blocks, BLOCK_SIZE, size) for size in (INDEX_SIZE, VECTOR_SIZE))
    attention_query = source.normal(1, NUM_HEADS, VECTOR_SIZE)
    choose = KERNELS.make_indexer(IndexerRule(top_k=TOP_K))
    attention = KERNELS.make_latent_attention(VECTOR_SIZE**-0.5, LATENT_SIZE, NUM_HEADS)
    chosen = choose(query, weights, keys, step)
    return {
        "indexer": lambda _: choose(query, weights, keys, step),
        "chosen": lambda _: attention.attend_chosen(attention_query, vectors, chosen),
        "all": lambda _: attention.attend(attention_query, vectors, step),
    }


if __name__ == "__main__":
    main()
