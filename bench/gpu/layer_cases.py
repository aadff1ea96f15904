"""Cases of attention over paged caches, and of the graph of a decode step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu.check import CODES_SLACK, Case, Operation, compare, in_order
from moeserve.bench.gpu.costs import (
    ATTENTION_SHAPES,
    LATENT_SHAPES,
    Chunks,
    LatentShape,
    Work,
    attention_shape,
    attention_work,
)
from moeserve.bench.gpu.inputs import Source, context_places, draw_cache, num_cache_blocks
from moeserve.bench.gpu.libraries import installed_libraries
from moeserve.ops.float8_rows import decode_rows
from moeserve.ops.indexer import ChosenEntries, IndexerRule
from moeserve.ops.interfaces import AttentionBackend, Kernels, KeyValueCache, LatentAttentionBackend, Rotation
from moeserve.ops.libraries.interface import AttentionProblem, StepKind
from moeserve.ops.libraries.measured import attention_key
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, H head size, P elements of a latent vector, C positions

BLOCK_SIZE = 16
MOST_TIES = 1e-3  # maximum fraction of selected positions that rounding may change
ATTENTION = ATTENTION_SHAPES | {
    "small, windowed": attention_shape(4, 2, 16, window=11, has_sinks=True),
    "small": attention_shape(3, 1, 20),
    "small, for libraries": attention_shape(4, 2, 64, window=11),
}
LATENT = LATENT_SHAPES | {"small": LatentShape(5, latent_size=24, rotary_size=8)}
CHUNKS: dict[str, Chunks] = {
    "short decode": [(1, 1), (1, 40)],
    "short prompts": [(9, 9), (5, 37), (1, 20)],
    "decode": [(1, 1), (1, 17), (1, 500), (1, 4097), (1, 256), (1, 10000), (0, 3)],
    "prompts": [(700, 700), (300, 1500), (2, 513)],
    "mixed": [(1, 3000), (65, 65), (1, 1), (130, 2178)],
    "long context": [(200, 33000), (70, 70)],
    "prompt of 4096": [(4096, 4096)],
    "4 chunks of 64": [(64, 4096)] * 4,
    **{
        f"decode {num} x {context}": [(1, context)] * num
        for num, context in ((1, 4096), (16, 4096), (64, 512), (128, 4096))
    },
}
# A model with grouped-query attention, and with shared experts that run in the side stream.
MODEL: dict[str, Any] = dict(
    architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", hidden_act="silu", rms_norm_eps=1e-6,
    max_position_embeddings=64, rope_theta=1e4, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
    sliding_window=None, use_sliding_window=False, tie_word_embeddings=False, num_hidden_layers=1,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "small": dict(
        vocab_size=20, hidden_size=48, intermediate_size=32, moe_intermediate_size=24, num_experts=5,
        shared_expert_intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2,
    ),
    "2048 wide": dict(
        vocab_size=1024, hidden_size=2048, intermediate_size=1024, moe_intermediate_size=768, num_experts=8,
        shared_expert_intermediate_size=2048, num_attention_heads=32, num_key_value_heads=4, num_experts_per_tok=4,
    ),
}  # fmt: skip


def attend(
    source: Source,
    name: str,
    kind: str,
    block_size: int = BLOCK_SIZE,
    *,
    beside: bool = False,
    is_float8: bool = False,
    is_ordered: bool = False,
) -> Case:
    """Attend to contexts in scattered blocks. Memory that no row may read contains NaN.

    Args:
        beside: compare with libraries, which multiply unread positions by zero and do not support chunks without rows.
        is_float8: keys and values are 8-bit floats; the reference reads the same codes.
        is_ordered: use the kernels of `batch_invariant`.
    """
    chunks = [chunk for chunk in CHUNKS[kind] if chunk[0] or not beside]
    shape, step = dataclasses.replace(ATTENTION[name], dtype=source.dtype), source.step(chunks, block_size)
    blocks, offsets = context_places(step, block_size)
    sizes = num_cache_blocks(step), shape.num_kv_heads, block_size, shape.head_size
    options: Any = dict(places=(blocks, slice(None), offsets), unread=0.0 if beside else torch.nan)
    cache = KeyValueCache(*(source.scattered(*sizes, **options) for _ in range(2)))
    cache = source.encoded(cache) if is_float8 else cache
    query_TNH = source.normal(len(step.positions), shape.num_heads, shape.head_size)
    sinks_N = source.normal(shape.num_heads, dtype=torch.float32, scale=2.0) if shape.has_sinks else None
    inputs = (query_TNH, cache, step, sinks_N)
    problem, is_decode = AttentionProblem(shape, block_size), step.max_rows_per_chunk == 1
    step_kind: StepKind = "decode" if is_decode else "chunks"
    case = Case(
        lambda backend, *inputs: backend.attend(*inputs),
        inputs,
        made=lambda kernels: (in_order(kernels) if is_ordered else kernels).make_attention(shape),
        others={
            library.label: partial(library.make_attend(problem, step_kind), *inputs)
            for library in (installed_libraries(source.device) if beside else ())
            if not library.why_unavailable(problem, step_kind)
        },
        work=attention_work(shape, chunks, is_float8=is_float8),
        choices=() if is_float8 or is_ordered else ((attention_key(shape, step_kind), len(query_TNH)),),
    )
    if len(set(chunks)) > 1:
        return case
    (num_rows, context), batch = chunks[0], len(chunks)
    seen = min(context, shape.window or context) if is_decode else context
    query = query_TNH.view(batch, num_rows, shape.num_heads, -1).transpose(1, 2)
    keys, values = (source.normal(batch, shape.num_kv_heads, seen, shape.head_size) for _ in range(2))
    return dataclasses.replace(
        case,
        beside={
            "torch SDPA": partial(
                functional.scaled_dot_product_attention, query, keys, values, is_causal=not is_decode, enable_gqa=True
            )
        },
        note="torch's attention is without sinks, and in prefill without the window" if shape.has_sinks else "",
    )


def attend_float8(source: Source, name: str, kind: str) -> Case:
    return attend(source, name, kind, is_float8=True)


def attend_in_order(source: Source, name: str, kind: str) -> Case:
    return attend(source, name, kind, is_ordered=True)


def attend_beside_libraries(source: Source, name: str, kind: str, block_size: int) -> Case:
    return attend(source, name, kind, block_size, beside=True)


def rotate_and_write(
    source: Source,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    num_pairs: int,
    is_interleaved: bool,
    is_float8: bool = False,
) -> Case:
    """Rotate heads or parts of them, and write a cache. For a cache in 8-bit floats, decoded numbers are compared."""
    shape = attention_shape(num_heads, num_kv_heads, size, dtype=source.dtype)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    fused_TXH = source.normal(num_tokens, sum(heads), size)
    angles_TF = source.uniform(num_tokens, num_pairs) * 6.3
    rotation = Rotation(angles_TF.cos(), angles_TF.sin(), is_interleaved)
    step = source.step([(num_tokens, num_tokens + 1)], BLOCK_SIZE)
    step = dataclasses.replace(step, cache_slots=step.cache_slots.masked_fill(step.positions % 5 == 1, -1))

    def call(
        backend: AttentionBackend, fused_TXH: Tensor, rotation: Rotation, cache: KeyValueCache, step: StepInputs
    ) -> Any:
        cache = source.encoded(cache) if is_float8 else cache
        query_TNH, key_TGH, value_TGH = fused_TXH.split(heads, dim=1)
        return backend.rotate_and_write(query_TNH, key_TGH, value_TGH, rotation, cache, step), cache

    def decoded(results: tuple[Tensor, KeyValueCache], *_: Any) -> Any:
        query_TNH, cache = results
        pairs = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
        return query_TNH, [decode_rows(codes, scales, torch.float32) for codes, scales in pairs if scales is not None]

    inputs = fused_TXH, rotation, draw_cache(source, shape, step, BLOCK_SIZE), step
    work = Work(2 * fused_TXH.nbytes + 2 * angles_TF.nbytes + 8 * num_tokens)
    case = Case(call, inputs, lambda kernels: kernels.make_attention(shape), work=work)
    return dataclasses.replace(case, defined=decoded, slack=CODES_SLACK) if is_float8 else case


def apply_rope(source: Source, num_tokens: int, num_heads: int, size: int, num_pairs: int) -> Case:
    """Rotate in place, and into other memory."""
    heads_TNH, angles_TF = source.normal(2, num_tokens, num_heads, size), source.uniform(num_tokens, num_pairs) * 6.3
    rotation = Rotation(angles_TF.cos(), angles_TF.sin(), is_interleaved=False)

    def call(kernels: Kernels, heads: Tensor, rotation: Rotation) -> Any:
        elsewhere = kernels.apply_rope(heads[1], rotation, torch.empty_like(heads[1]))
        return elsewhere, kernels.apply_rope(heads[0], rotation)

    return Case(call, (heads_TNH, rotation))


def latent_write(source: Source, name: str, kind: str) -> Case:
    shape, step = LATENT[name], source.step(CHUNKS[kind], BLOCK_SIZE)
    size = shape.latent_size + shape.rotary_size
    cache = torch.ones_like(source.normal(num_cache_blocks(step), BLOCK_SIZE, size))

    def call(backend: LatentAttentionBackend, vectors_TP: Tensor, cache: Tensor, step: StepInputs) -> Tensor:
        backend.write(vectors_TP, cache, step)
        return cache

    inputs = source.normal(len(step.positions), size), cache, step
    return Case(call, inputs, lambda kernels: latent_backend(kernels, shape, size))


def latent_attend(source: Source, name: str, kind: str) -> Case:
    """Attend with absorbed weights of keys and values. Memory that no row may read contains NaN."""
    shape, step = LATENT[name], source.step(CHUNKS[kind], BLOCK_SIZE)
    size = shape.latent_size + shape.rotary_size
    places = context_places(step, BLOCK_SIZE)
    cache = source.scattered(num_cache_blocks(step), BLOCK_SIZE, size, places=places, unread=torch.nan)
    query_TNP = source.normal(len(step.positions), shape.num_heads, size)
    case = Case(
        lambda backend, *inputs: backend.attend(*inputs),
        (query_TNP, cache, step),
        lambda kernels: latent_backend(kernels, shape, size),
        work=attention_work(shape, CHUNKS[kind]),
    )
    if len(set(CHUNKS[kind])) > 1:
        return case
    (num_rows, context), batch = CHUNKS[kind][0], len(CHUNKS[kind])
    dense = source.normal(batch, 1, context, size)
    query = query_TNP.view(batch, num_rows, shape.num_heads, size).transpose(1, 2)
    torch_call = partial(
        functional.scaled_dot_product_attention, query, dense, dense[..., : shape.latent_size], enable_gqa=True
    )
    note = "torch's attention is without the causal mask" if num_rows > 1 else ""
    return dataclasses.replace(case, beside={"torch SDPA": torch_call}, note=note)


def latent_backend(kernels: Kernels, shape: LatentShape, size: int) -> LatentAttentionBackend:
    return kernels.make_latent_attention(size**-0.5, shape.latent_size, shape.num_heads)


def choose_entries(source: Source, kind: str, num_heads: int, key_size: int, top_k: int) -> Case:
    """Select positions to attend to. Rounding may change a few of them."""
    rule, step = IndexerRule(top_k=top_k), source.step(CHUNKS[kind], BLOCK_SIZE)
    num_tokens = len(step.positions)
    keys = source.normal(num_cache_blocks(step), BLOCK_SIZE, key_size)
    inputs = source.normal(num_tokens, num_heads, key_size), source.normal(num_tokens, num_heads), keys, step

    def are_chosen(chosen: ChosenEntries) -> Tensor:
        places_C = torch.arange(chosen.slots_TC.shape[1], device=source.device)
        tokens, places = torch.nonzero(places_C < chosen.counts_T[:, None], as_tuple=True)
        mask = torch.zeros(num_tokens, len(keys) * BLOCK_SIZE, dtype=torch.bool, device=source.device)
        mask[tokens, chosen.slots_TC[tokens, places].long()] = True
        return mask

    def defined(chosen: ChosenEntries, *inputs: Any) -> Any:
        expected = are_chosen(TORCH_KERNELS.make_indexer(rule)(*inputs))
        num_others = (are_chosen(chosen) ^ expected).sum()
        return chosen.counts_T, num_others <= MOST_TIES * expected.sum()

    return Case(lambda choose, *inputs: choose(*inputs), inputs, lambda kernels: kernels.make_indexer(rule), defined)


def attend_chosen(source: Source, name: str, num_tokens: int, most: int) -> Case:
    """Attend to selected positions, whose number differs between rows."""
    shape = LATENT[name]
    size = shape.latent_size + shape.rotary_size
    query_TNP, cache = source.normal(num_tokens, shape.num_heads, size), source.normal(most, BLOCK_SIZE, size)
    chosen = ChosenEntries.new(query_TNP, most)
    chosen.slots_TC.copy_(source.integers(0, most * BLOCK_SIZE, num_tokens, most))
    chosen.counts_T.copy_(source.integers(1, most + 1, num_tokens))
    chosen.starts.copy_(torch.arange(num_tokens + 1))
    return Case(
        lambda backend, *inputs: backend.attend_chosen(*inputs),
        (query_TNP, cache, chosen),
        lambda kernels: latent_backend(kernels, shape, size),
    )


def expanded_attend(source: Source, name: str, kind: str, head_size: int) -> Case:
    """Attend from all chunks of more than one row, with keys and values expanded for each head."""
    shape, step = LATENT[name], source.step(CHUNKS[kind], BLOCK_SIZE)
    cache = source.normal(num_cache_blocks(step), BLOCK_SIZE, shape.latent_size + shape.rotary_size)
    query_TNQ = source.normal(len(step.positions), shape.num_heads, head_size + shape.rotary_size)
    maps = source.normal(2, shape.num_heads, shape.latent_size, head_size) * shape.latent_size**-0.5

    def call(
        backend: LatentAttentionBackend, query_TNQ: Tensor, maps: Tensor, cache: Tensor, step: StepInputs
    ) -> Tensor:
        def expand(latent_CL: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
            keys, values = maps[:, heads]
            latent_nCL = latent_CL.expand(len(keys), -1, -1)
            return torch.bmm(latent_nCL, keys), torch.bmm(latent_nCL, values)

        out_TNV = query_TNQ.new_zeros(*query_TNQ.shape[:2], head_size)
        query_TNK, query_TNE = query_TNQ.split([head_size, shape.rotary_size], dim=-1)
        backend.attend_expanded(query_TNK, query_TNE, cache, step, 1, expand, out_TNV)
        return out_TNV

    made = partial(latent_backend, shape=shape, size=query_TNQ.shape[-1])
    return Case(call, (query_TNQ, maps, cache, step), made)


def replay(source: Source, name: str) -> Case:
    """Capture a decode step of a model with padding, and replay it with other steps.

    The results are True for each step whose replay gives the same results as the kernels without a graph.
    """
    from moeserve.bench.gpu.launches import make_model  # needs msgspec, which other cases do without
    from moeserve.distributed.mesh import Mesh
    from moeserve.layers.cache import CacheSize
    from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture
    from moeserve.worker.step_replay import StepContext

    def call(kernels: Kernels) -> Tensor:
        if kernels.name == "torch":
            return torch.ones(2, dtype=torch.bool)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL | MODELS[name]))
            model = make_model(Path(folder), kernels, source.dtype, source.device)
        for weight in model.parameters():
            weight.copy_(
                source.normal(*weight.shape, scale=0.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0)
            )
        caches = model.make_caches(CacheSize(8, BLOCK_SIZE))
        context = StepContext(
            mesh=Mesh(tp=1, dp=1), tp_rank=0, block_size=BLOCK_SIZE, max_blocks=4, device=source.device
        )
        graphs = CudaGraphs(model, caches, context, (2,), TorchCapture(torch.cuda.Stream()))
        are_equal = []
        for contexts in ((20, 40), (37, 5)):
            for cache in caches:
                for part in cache.tensors:
                    part.copy_(source.normal(*part.shape))
            step = source.step([(1, length) for length in contexts], BLOCK_SIZE)
            step = dataclasses.replace(step, token_ids=source.integers(0, MODELS[name]["vocab_size"], 2))
            expected_TD = model(step, caches).float()
            settings, _ = source.settings(2)
            padded = dataclasses.replace(
                step, settings=settings, padding=torch.zeros(2, dtype=torch.bool, device=source.device)
            )
            are_equal.append(compare(graphs(padded).hidden_TD, expected_TD) <= 1)
        return torch.tensor(are_equal)

    return Case(torch.inference_mode()(call), ())


def crossed(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*choices))


SMALL_CHUNKS, LARGE_CHUNKS = ("short decode", "short prompts"), ("decode", "prompts", "mixed")
TIMED_CHUNKS = [name for name in CHUNKS if name.startswith("decode ")]
LIBRARY_BLOCK_SIZES = (16, 64, 256)
ATTENTION_CASES = {
    "graphs": [Operation(replay, [("small",)], [("2048 wide",)])],
    "attention": [
        Operation(
            attend,
            crossed(("small, windowed", "small"), SMALL_CHUNKS),
            crossed(ATTENTION_SHAPES, LARGE_CHUNKS),
        ),
        Operation(
            attend_float8,
            crossed(("small, windowed", "small"), SMALL_CHUNKS),
            crossed(ATTENTION_SHAPES, LARGE_CHUNKS),
            crossed(ATTENTION_SHAPES, (*TIMED_CHUNKS, "prompt of 4096")),
        ),
        Operation(
            attend_in_order,
            [("small, windowed", "short prompts"), ("small", "short decode")],
            crossed(ATTENTION_SHAPES, LARGE_CHUNKS),
        ),
    ],
    "latent attention": [
        Operation(
            latent_attend,
            crossed(["small"], SMALL_CHUNKS),
            crossed(LATENT_SHAPES, LARGE_CHUNKS),
            crossed(LATENT_SHAPES, (*TIMED_CHUNKS, "4 chunks of 64")),
        ),
        Operation(latent_write, crossed(["small"], SMALL_CHUNKS), crossed(LATENT_SHAPES, LARGE_CHUNKS)),
    ],
    "chosen positions": [
        Operation(choose_entries, crossed(SMALL_CHUNKS, [3], [20], [8]), crossed(LARGE_CHUNKS, [64], [128], [2048])),
        Operation(attend_chosen, [("small", 3, 20)], [("DeepSeek-V3", 33, 2048)]),
    ],
    "expanded attention": [
        Operation(
            expanded_attend,
            crossed(["small"], SMALL_CHUNKS, [16]),
            crossed(LATENT_SHAPES, (*LARGE_CHUNKS, "long context"), [128]),
        )
    ],
    "rotary embedding and cache writes": [
        Operation(
            rotate_and_write,
            [(5, 3, 1, 16, 8, False), (3, 4, 2, 20, 6, True), (5, 4, 2, 16, 8, False, True)],
            [
                *[(1, 32, 8, 128, 64, False), (4097, 64, 8, 64, 32, False), (4097, 64, 8, 64, 32, False, True)],
                *[(128, 96, 8, 128, 32, True), (77, 16, 16, 192, 32, True)],
            ],
            [(64, 32, 8, 128, 64, False), (8192, 32, 8, 128, 64, False)],
        ),
        Operation(apply_rope, [(5, 3, 16, 8), (3, 4, 20, 6)], [(4097, 64, 64, 32), (77, 16, 192, 32)]),
    ],
    "attention of other libraries": [
        Operation(
            attend_beside_libraries,
            crossed(["small, for libraries"], SMALL_CHUNKS, LIBRARY_BLOCK_SIZES),
            crossed(ATTENTION_SHAPES, LARGE_CHUNKS, LIBRARY_BLOCK_SIZES),
            crossed(ATTENTION_SHAPES, (*TIMED_CHUNKS, "prompt of 4096"), [BLOCK_SIZE]),
        )
    ],
}
