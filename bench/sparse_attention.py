"""Sparse attention of one layer with an indexer, by the C++ kernels, at growing contexts.

    python -m moeserve.bench.sparse_attention [--threads 1] [--rounds 7] [--json PATH]

In bf16, with the shapes of three layers: DeepSeek-V3.2 (an indexer of 64 heads of 128 selects 2048 positions for 128
heads over vectors of 576), and both kinds of DeepSeek-V4-Flash (64 heads of 512 attend to the last 128 tokens, and to
512 entries of 4 tokens that an indexer of 64 heads of 128 selects, or to all entries of 128 tokens). A step is one
token or the last 64 tokens of a prompt. Beside DeepSeek-V3.2 stands full attention of one token.

The limit is the bytes that a call must read, at the memory bandwidth measured in the same round, or its multiply-adds
at the measured rate of products, whichever takes longer. These are products of bfloat16 where the processor has
instructions for them, and of float32 elsewhere. With one thread, times are processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeserve.bench.gpu.inputs import Source, num_cache_blocks
from moeserve.bench.harness import Row, call_timer, interleave_beside_limits, make_parser
from moeserve.bench.limits import LimitProbe, Work
from moeserve.bench.report import show_and_save
from moeserve.ops import compressed_attention as compressed_attention_ops
from moeserve.ops import indexer as indexer_ops
from moeserve.ops import latent_attention as latent_attention_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend

NATIVE = select_backend(torch.device("cpu"))
CONTEXTS = (1024, 4096, 16384, 65536)
NUM_ROWS = (1, 64)
INDEX_HEADS, INDEX_SIZE = 64, 128
BLOCK_SIZE = 128
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Layer:
    """The shape of a layer. In a layer with compressed entries, all heads also attend to the last `window` tokens."""

    name: str
    short: str  # in plots
    num_heads: int
    vector_size: int
    value_size: int
    top_k: int | None = None  # None: no indexer
    ratio: int = 1  # tokens of an entry
    window: int = 0

    def num_seen(self, context: int) -> int:
        """Return the entries that a token at the end of a context may attend to."""
        return context // self.ratio

    def num_attended(self, context: int) -> int:
        seen = self.num_seen(context)
        return min(self.window, context) + (seen if self.top_k is None else min(self.top_k, seen))

    def indexer_work(self, context: int, num_rows: int) -> Work:
        """Return the work of the scores of `num_rows` tokens. Tokens that attend to all entries have none."""
        seen = self.num_seen(context)
        scored = seen if self.top_k is not None and seen > self.top_k else 0
        return Work(2 * scored * INDEX_SIZE, 2 * num_rows * scored * INDEX_HEADS * INDEX_SIZE)

    def attention_work(self, num_attended: int, num_rows: int) -> Work:
        operations = 2 * num_rows * num_attended * self.num_heads * (self.vector_size + self.value_size)
        return Work(2 * num_attended * self.vector_size, operations)


LAYERS = (
    Layer("DeepSeek-V3.2", "V3.2", 128, 576, 512, top_k=2048),
    Layer("DeepSeek-V4, entries of 4", "V4 (4)", 64, 512, 512, top_k=512, ratio=4, window=128),
    Layer("DeepSeek-V4, entries of 128", "V4 (128)", 64, 512, 512, ratio=128, window=128),
)
Call = Callable[[int], object]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("sparse_attention", "Sparse attention at growing contexts.", rounds=7)
    options = parser.parse_args(arguments)
    if NATIVE is REFERENCE:
        raise SystemExit("the C++ kernels are not built")
    set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    has_bfloat16 = NATIVE.instruction_set in ("avx512_bf16", "amx", "neon_bf16")  # products of it, and no others
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    probe = LimitProbe(buffer_bytes=1 << 28, matmul_size=1024, dtype=dtype, clock=clock)
    for layer in LAYERS:
        show_and_save(options.json, measure(layer, options.rounds, probe, clock))


@torch.inference_mode()
def measure(layer: Layer, num_rounds: int, probe: LimitProbe, clock: Callable[[], float]) -> list[Row]:
    """Return a row for each context and number of tokens, all measured in alternation with the machine's limits."""
    cases = [(context, num_rows) for context in CONTEXTS for num_rows in NUM_ROWS]
    calls = {case: layer_calls(layer, *case) for case in cases}
    measures = {
        f"{name} {case}": call_timer(call, SAMPLE_SECONDS, clock)
        for case in cases
        for name, call in calls[case].items()
    }
    samples, limits = interleave_beside_limits(measures, num_rounds, probe)
    rows: list[Row] = []
    for context, num_rows in cases:
        work = {
            "indexer": layer.indexer_work(context, num_rows),
            "sparse": layer.attention_work(layer.num_attended(context), num_rows),
            "full": layer.attention_work(context, num_rows),
        }
        row: Row = {"benchmark": "sparse_attention", "layer": layer.name, "short": layer.short}
        row |= {"context": context, "rows": num_rows}
        row |= {"microseconds": {}, "fractions": {}, "samples": {}}
        for name in calls[context, num_rows]:
            seconds = samples[f"{name} {(context, num_rows)}"]
            least = [work[name].seconds(limit) for limit in limits]
            row["samples"][name] = seconds
            row["microseconds"][name] = statistics.median(seconds) / num_rows * 1e6
            row["fractions"][name] = statistics.median(bound / own for bound, own in zip(least, seconds, strict=True))
        rows.append(row)
    return rows


def layer_calls(layer: Layer, context: int, num_rows: int) -> dict[str, Call]:
    """Return the operations of a step with `num_rows` tokens at the end of a context."""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    step = source.step([(num_rows, context)], BLOCK_SIZE)
    num_blocks = num_cache_blocks(step)
    calls: dict[str, Call] = {}
    chosen: ChosenEntries | None = None
    if layer.top_k is not None:
        query, weights = source.normal(num_rows, INDEX_HEADS, INDEX_SIZE), source.normal(num_rows, INDEX_HEADS)
        keys = source.normal(num_blocks, BLOCK_SIZE // layer.ratio, INDEX_SIZE)
        choose = indexer_ops.make(NATIVE, IndexerRule(top_k=layer.top_k, tokens_per_entry=layer.ratio))
        chosen = choose(query, weights, keys, step)
        calls["indexer"] = lambda _: choose(query, weights, keys, step)
    heads = source.normal(num_rows, layer.num_heads, layer.vector_size)
    if not layer.window:
        assert chosen is not None
        latent = latent_attention_ops.make(
            NATIVE, LatentShape(layer.vector_size**-0.5, layer.value_size, layer.num_heads)
        )
        vectors, selected = source.normal(num_blocks, BLOCK_SIZE, layer.vector_size), chosen
        calls["sparse"] = lambda _: latent.attend_chosen(heads, vectors, selected)
        if num_rows == 1:
            calls["full"] = lambda _: latent.attend(heads, vectors, step)
        return calls
    shape = CompressedShape(
        num_heads=layer.num_heads,
        whole_num_heads=layer.num_heads,
        head_size=layer.vector_size,
        scale=layer.vector_size**-0.5,
        window=layer.window,
        ratio=layer.ratio,
        index_size=None if chosen is None else INDEX_SIZE,
    )
    sizes = {"num_blocks": num_blocks, "num_window_blocks": num_blocks, "block_size": BLOCK_SIZE}
    cache = CompressedCache.empty(shape, **sizes, dtype=torch.bfloat16, device=torch.device("cpu"))
    cache.vectors.normal_(generator=source.generator)
    attention, sinks = compressed_attention_ops.make(NATIVE, shape), torch.zeros(layer.num_heads)
    calls["sparse"] = lambda _: attention.attend(heads, chosen, sinks, cache, step, step)
    return calls


if __name__ == "__main__":
    main()
