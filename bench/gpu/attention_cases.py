"""Cases of attention over paged caches and of rotary embeddings."""

from __future__ import annotations

import dataclasses
import functools
import re
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moeserve.bench.gpu.check import CODES_SLACK, FLOAT32_SLACK, Case, bytes_of, cases_of, crossed
from moeserve.bench.gpu.inputs import Chunks, Source, attended_positions, draw_cache, draw_chosen
from moeserve.bench.gpu.models import BLOCK_SIZE
from moeserve.bench.limits import Work
from moeserve.ops import attention as attention_ops
from moeserve.ops import indexer as indexer_ops
from moeserve.ops import latent_attention as latent_attention_ops
from moeserve.ops import rows as rows_ops
from moeserve.ops.attention.flashinfer import FlashInfer, StepKind, open_flashinfer
from moeserve.ops.attention.float8_rows import decode_rows
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.backend import REFERENCE, TRITON, Backend
from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule
from moeserve.ops.latent_attention import interface as latent
from moeserve.ops.latent_attention.interface import LatentAttentionBackend
from moeserve.ops.libraries import LibraryUnusable
from moeserve.ops.measured import attention_key
from moeserve.ops.rows.interface import Rotation
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, X heads of a fused projection, H head size, F rotated pairs, P elements of
# a latent vector, C positions, K and E parts of a key


class LatentShape(NamedTuple):
    """The latent attention of one layer."""

    num_heads: int
    latent_size: int = 512
    rotary_size: int = 64

    @property
    def vector_size(self) -> int:
        return self.latent_size + self.rotary_size


def attention_shape(num_heads: int, num_kv_heads: int, head_size: int, **more: Any) -> AttentionShape:
    options = {"scale": head_size**-0.5, "dtype": torch.bfloat16} | more
    return AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, **options)


MAX_MODEL_LEN = 40960  # tokens for which the block tables of graphs have room
MOST_TIES = 1e-3  # maximum fraction of selected positions that rounding may change
GROUPED = {
    "Qwen3-30B-A3B": attention_shape(32, 4, 128),
    "Mixtral-8x7B": attention_shape(32, 8, 128),
    "gpt-oss-20b": attention_shape(64, 8, 64, window=128, has_sinks=True),
}
LATENT = {"DeepSeek-V2-Lite": LatentShape(16), "DeepSeek-V3": LatentShape(128)}
SHAPES: dict[str, Any] = {
    **GROUPED,
    **LATENT,
    "GLM-4.5": attention_shape(96, 8, 128),
    "16 heads of 192": attention_shape(16, 16, 192),
    "16 heads of 64": attention_shape(16, 4, 64),
    "16 heads of 128": attention_shape(16, 4, 128),
    "small, windowed": attention_shape(4, 2, 16, window=11, has_sinks=True),
    "small": attention_shape(3, 1, 20),
    "small, for libraries": attention_shape(4, 2, 64, window=11),
    "small, latent": LatentShape(5, latent_size=24, rotary_size=8),
}
CHUNKS: dict[str, Chunks] = {
    "short decode": [(1, 1), (1, 40)],
    "short prompts": [(9, 9), (5, 37), (1, 20)],
    "decode": [(1, 1), (1, 17), (1, 500), (1, 4097), (1, 256), (1, 10000), (0, 3)],
    "prompts": [(700, 700), (300, 1500), (2, 513)],
    "mixed": [(1, 3000), (65, 65), (1, 1), (130, 2178)],
    "long context": [(200, 33000), (70, 70)],
}
MANY = re.compile(r"(\d+) x (\d+) of (\d+)")  # requests, rows of each, length of their contexts
# plain: as by default, also by libraries; float8: keys and values are 8-bit floats, and the reference reads the same
# codes; in order: the kernels of `batch_invariant`
Variant = Literal["plain", "float8", "in order"]
VARIANTS: tuple[Variant, ...] = ("plain", "float8", "in order")
SMALL, SMALL_CHUNKS, SMALL_LATENT = ("small, windowed", "small"), ("short decode", "short prompts"), ["small, latent"]
LARGE_CHUNKS = "decode", "prompts", "mixed"
DECODES = "1 x 1 of 4096", "16 x 1 of 4096", "64 x 1 of 512", "128 x 1 of 4096"


def chunks_of(kind: str) -> Chunks:
    if match := MANY.fullmatch(kind):
        batch, num_rows, context = map(int, match.groups())
        return [(num_rows, context)] * batch
    return CHUNKS[kind]


@cases_of(
    "attention",
    crossed(SMALL, SMALL_CHUNKS, VARIANTS) + crossed(["small, for libraries"], SMALL_CHUNKS, ["plain"], [16, 64]),
    crossed(GROUPED, LARGE_CHUNKS, VARIANTS) + crossed(GROUPED, LARGE_CHUNKS, ["plain"], [64, 256]),
    [(name, kind, each) for each in VARIANTS[:2] for name in GROUPED for kind in (*DECODES, "1 x 4096 of 4096")]
    + crossed(["Qwen3-30B-A3B"], [DECODES[0], DECODES[2]], ["plain"], [16], [MAX_MODEL_LEN]),
)
def attend(
    source: Source, name: str, kind: str, variant: Variant, block_size: int = BLOCK_SIZE, longest: int = 0
) -> Case:
    """Attend to contexts in scattered blocks. Memory that no row may read contains NaN.

    With libraries it contains zeros, by which they multiply, and no chunk is without rows, which they do not support.

    Args:
        longest: tokens for which the block table has room, as in a graph; 0: those of the longest context.
    """
    shape, chunks = dataclasses.replace(SHAPES[name], dtype=source.dtype), chunks_of(kind)
    step_kind: StepKind = "decode" if max(num_rows for num_rows, _ in chunks) == 1 else "chunks"
    libraries = {}
    if variant == "plain" and (package := installed_flashinfer(source.device)):
        library = FlashInfer(package, source.device, block_size)
        if not library.why_not(shape, step_kind):
            libraries[f"flashinfer {package.__version__}"] = TRITON.with_library("flashinfer", library)
    chunks = [chunk for chunk in chunks if chunk[0] or not libraries]
    step = source.step(chunks, block_size)
    if longest:
        unused = step.block_table.new_zeros(len(chunks), longest // block_size - step.block_table.shape[1])
        step = dataclasses.replace(step, block_table=torch.cat([step.block_table, unused], dim=1))
    sizes, unread = (block_size, shape.num_kv_heads, shape.head_size), 0.0 if libraries else torch.nan
    cache = KeyValueCache(*(draw_cache(source, step, *sizes, unread=unread) for _ in range(2)))
    query_TNH = source.normal(len(step.positions), shape.num_heads, shape.head_size)
    sinks_N = source.float32(shape.num_heads, scale=2.0) if shape.has_sinks else None
    inputs = query_TNH, source.encoded(cache) if variant == "float8" else cache, step, sinks_N
    return Case(
        lambda backend: attention_ops.make(backend, shape).attend,
        inputs,
        is_ordered=variant == "in order",
        libraries=libraries,
        work=attention_work(query_TNH, inputs[1], chunks, shape.head_size, shape.window),
        choices=((attention_key(shape, step_kind), len(query_TNH)),) if variant == "plain" else (),
    )


@functools.cache
def installed_flashinfer(device: torch.device) -> ModuleType | None:
    """Return FlashInfer if it can be used on a GPU. Otherwise print the reason."""
    try:
        return open_flashinfer(device) if device.type == "cuda" else None
    except LibraryUnusable as error:
        print(f"flashinfer is left out: {error}", flush=True)
        return None


def attention_work(query_TNH: Tensor, cache: Any, chunks: Chunks, value_size: int, window: int | None = None) -> Work:
    """Return the work of reading each visible position and query once, and of writing results."""
    num_tokens, num_heads, key_size = query_TNH.shape
    blocks = cache.keys if isinstance(cache, KeyValueCache) else cache  # [num_blocks, *heads, block_size, size]
    position_bytes = bytes_of(cache) / (len(blocks) * blocks.shape[-2])
    num_read = sum(context if window is None else min(context, rows - 1 + window) for rows, context in chunks)
    row_size = num_heads * (key_size + value_size)
    num_bytes = num_read * position_bytes + num_tokens * row_size * query_TNH.element_size()
    return Work(num_bytes, 2.0 * row_size * sum(attended_positions(*chunk, window) for chunk in chunks))


@cases_of(
    "rotary embedding and cache writes",
    [("small", 5, 10, False), ("small", 3, 6, True), ("small, windowed", 5, 8, False, True)],
    [
        *[("Mixtral-8x7B", 1, 64, False), ("GLM-4.5", 128, 32, True), ("16 heads of 192", 77, 32, True)],
        *crossed(["gpt-oss-20b"], [4097], [32], [False], [False, True]),
    ],
    crossed(["Mixtral-8x7B"], [64, 8192], [64], [False]),
)
def rotate_and_write(
    source: Source, name: str, num_tokens: int, num_pairs: int, is_interleaved: bool, is_float8: bool = False
) -> Case:
    """Rotate heads or parts of them, and write a cache. For a cache in 8-bit floats, decoded numbers are compared."""
    shape = dataclasses.replace(SHAPES[name], dtype=source.dtype)
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    fused_TXH = source.normal(num_tokens, sum(heads), shape.head_size)
    rotation = draw_rotation(source, num_tokens, num_pairs, is_interleaved)
    step = source.step([(num_tokens, num_tokens + 1)], BLOCK_SIZE)
    step = dataclasses.replace(step, cache_slots=step.cache_slots.masked_fill(step.positions % 5 == 1, -1))
    sizes = BLOCK_SIZE, shape.num_kv_heads, shape.head_size
    cache = KeyValueCache(draw_cache(source, step, *sizes), draw_cache(source, step, *sizes))

    def call(attention: Any, fused_TXH: Tensor, rotation: Rotation, cache: Any, step: StepInputs) -> Any:
        cache = source.encoded(cache) if is_float8 else cache
        query_TNH = attention.rotate_and_write(*fused_TXH.split(heads, dim=1), rotation, cache, step)
        if not is_float8:
            return query_TNH, cache
        pairs = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
        return query_TNH, [decode_rows(*each, torch.float32) for each in pairs]

    return Case(
        lambda backend: partial(call, attention_ops.make(backend, shape)),
        (fused_TXH, rotation, cache, step),
        slack=CODES_SLACK if is_float8 else FLOAT32_SLACK,
        work=Work(2 * fused_TXH.nbytes + bytes_of(rotation), 0.0),
    )


@cases_of("rotary embedding and cache writes", [(5, 3, 16, 8), (3, 4, 20, 6)], [(4097, 64, 64, 32), (77, 16, 192, 32)])
def apply_rope(source: Source, num_tokens: int, num_heads: int, size: int, num_pairs: int) -> Case:
    """Rotate in place, and into other memory."""

    def call(backend: Backend, heads: Tensor, rotation: Rotation) -> Any:
        elsewhere = rows_ops.make(backend).apply_rope(heads[1], rotation, torch.empty_like(heads[1]))
        return elsewhere, rows_ops.make(backend).apply_rope(heads[0], rotation)

    rotation = draw_rotation(source, num_tokens, num_pairs, False)
    return Case(lambda backend: partial(call, backend), (source.normal(2, num_tokens, num_heads, size), rotation))


def draw_rotation(source: Source, num_tokens: int, num_pairs: int, is_interleaved: bool) -> Rotation:
    angles_TF = source.uniform(num_tokens, num_pairs) * 6.3
    return Rotation(angles_TF.cos(), angles_TF.sin(), is_interleaved)


def make_latent(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    return latent_attention_ops.make(
        backend, latent.LatentShape(shape.vector_size**-0.5, shape.latent_size, shape.num_heads)
    )


@cases_of(
    "latent attention",
    crossed(SMALL_LATENT, SMALL_CHUNKS) + crossed(SMALL_LATENT, SMALL_CHUNKS, [True]),
    crossed(LATENT, LARGE_CHUNKS) + crossed(LATENT, LARGE_CHUNKS, [True]),
    crossed(LATENT, (*DECODES, "4 x 64 of 4096")),
)
def latent_attend(source: Source, name: str, kind: str, is_ordered: bool = False) -> Case:
    """Attend with absorbed weights of keys and values. Memory that no row may read contains NaN."""
    shape, step = SHAPES[name], source.step(chunks_of(kind), BLOCK_SIZE)
    cache = draw_cache(source, step, BLOCK_SIZE, shape.vector_size, unread=torch.nan)
    query_TNP = source.normal(len(step.positions), shape.num_heads, shape.vector_size)
    options: Any = dict(
        is_ordered=is_ordered, work=attention_work(query_TNP, cache, chunks_of(kind), shape.latent_size)
    )
    return Case(lambda backend: make_latent(backend, shape).attend, (query_TNP, cache, step), **options)


@cases_of(
    "chosen positions",
    crossed(SMALL_CHUNKS, [3], [20], [8]),
    crossed(LARGE_CHUNKS, [64], [128], [2048]),
    crossed(["1 x 1 of 16384", "1 x 64 of 16384"], [64], [128], [2048]),
)
def choose_entries(source: Source, kind: str, num_heads: int, key_size: int, top_k: int, ratio: int = 1) -> Case:
    """Select positions, or entries of `ratio` tokens, to attend to. Rounding may change a few of them.

    The work is to read all keys and to multiply by them; without more keys than `top_k`, there is none.
    """
    chunks, block_size = chunks_of(kind), BLOCK_SIZE if ratio == 1 else 32 * ratio
    rule, step = IndexerRule(top_k=top_k, tokens_per_entry=ratio), source.step(chunks, block_size)
    num_tokens, keys = len(step.positions), draw_cache(source, step, block_size // ratio, key_size)
    scored = [(num_rows, context // ratio) for num_rows, context in chunks if context // ratio > top_k]
    work = Work(
        keys.element_size() * key_size * sum(seen for _, seen in scored),
        2.0 * num_heads * key_size * sum(num_rows * seen for num_rows, seen in scored),
    )
    inputs = source.normal(num_tokens, num_heads, key_size), source.normal(num_tokens, num_heads), keys, step

    def are_chosen(chosen: ChosenEntries) -> Tensor:
        places_C = torch.arange(chosen.slots_TC.shape[1], device=source.device)
        end = keys.shape[0] * keys.shape[1]  # stands for the slots after the last
        slots_TC = chosen.slots_TC.long().where(places_C < chosen.counts_T[:, None], end)
        return slots_TC.new_zeros(num_tokens, end + 1, dtype=torch.bool).scatter(1, slots_TC, True)[:, :end]

    def defined(chosen: ChosenEntries, *inputs: Any) -> Any:
        expected = are_chosen(indexer_ops.make(REFERENCE, rule)(*inputs))
        num_others = (are_chosen(chosen) ^ expected).sum()
        return chosen.counts_T, num_others <= MOST_TIES * expected.sum()

    return Case(lambda backend: indexer_ops.make(backend, rule), inputs, defined, work=work)


@cases_of(
    "chosen positions",
    crossed(SMALL_LATENT, ["short decode", "short prompts"], [20], [False, True]),
    crossed(["DeepSeek-V3"], ["mixed"], [2048], [False, True]),
    crossed(["DeepSeek-V3"], ["1 x 1 of 16384", "1 x 64 of 16384"], [2048], [False], [True]),
)
def attend_chosen(source: Source, name: str, kind: str, most: int, is_ordered: bool, is_full: bool = False) -> Case:
    """Write vectors, and attend to selected positions, whose number differs between rows unless `is_full`.

    The work counts the positions of one row once: rows of a request mostly select the same ones.
    """
    shape, step = SHAPES[name], source.step(chunks_of(kind), BLOCK_SIZE)
    num_tokens, cache = len(step.positions), draw_cache(source, step, BLOCK_SIZE, shape.vector_size)
    chosen = draw_chosen(source, num_tokens, len(cache) * BLOCK_SIZE, most, is_full)
    query_TNP = source.normal(num_tokens, shape.num_heads, shape.vector_size)
    pairs = 2.0 * float(chosen.counts_T.sum()) * shape.num_heads
    work = Work(most * bytes_of(cache) / cache[..., 0].numel(), pairs * (shape.vector_size + shape.latent_size))
    inputs = query_TNP, source.normal(num_tokens, shape.vector_size), cache, chosen

    def call(attention: Any, query_TNP: Tensor, vectors_TP: Tensor, cache: Tensor, chosen: ChosenEntries) -> Any:
        attention.write(vectors_TP, cache, step)
        return attention.attend_chosen(query_TNP, cache, chosen), cache

    return Case(lambda backend: partial(call, make_latent(backend, shape)), inputs, is_ordered=is_ordered, work=work)


@cases_of(
    "expanded attention",
    crossed(SMALL_LATENT, SMALL_CHUNKS, [16]),
    [*crossed(LATENT, LARGE_CHUNKS, [128]), ("DeepSeek-V2-Lite", "long context", 128)],
)
def expanded_attend(source: Source, name: str, kind: str, head_size: int) -> Case:
    """Attend from all chunks of more than one row, with keys and values expanded for each head."""
    shape, step = SHAPES[name], source.step(chunks_of(kind), BLOCK_SIZE)
    cache = draw_cache(source, step, BLOCK_SIZE, shape.vector_size)
    query_TNQ = source.normal(len(step.positions), shape.num_heads, head_size + shape.rotary_size)
    maps = source.normal(2, shape.num_heads, shape.latent_size, head_size) * shape.latent_size**-0.5

    def call(attention: Any, query_TNQ: Tensor, maps: Tensor, cache: Tensor, step: StepInputs) -> Tensor:
        def expand(latent_CP: Tensor, heads: slice = slice(None)) -> list[Tensor]:
            return [torch.bmm(latent_CP.expand(len(each), -1, -1), each) for each in maps[:, heads]]

        out_TNV = query_TNQ.new_zeros(*query_TNQ.shape[:2], head_size)
        query_TNK, query_TNE = query_TNQ.split([head_size, shape.rotary_size], dim=-1)
        attention.attend_expanded(query_TNK, query_TNE, cache, step, 1, expand, out_TNV)
        return out_TNV

    work = attention_work(query_TNQ, cache, chunks_of(kind), head_size)
    return Case(lambda backend: partial(call, make_latent(backend, shape)), (query_TNQ, maps, cache, step), work=work)


OPERATIONS = [attend, latent_attend, choose_entries, attend_chosen, expanded_attend, rotate_and_write, apply_rope]
