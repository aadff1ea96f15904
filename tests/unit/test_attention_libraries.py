"""Attention by external libraries, with stand-ins: results, limits, and the choice among libraries."""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve.config.settings import AttentionChoice
from moeserve.errors import SettingsError
from moeserve.ops import attention, measured, select
from moeserve.ops.attention import flashinfer as flashinfer_attention
from moeserve.ops.attention.flashinfer import FlashInfer, FlashInferAttention, StepKind, open_flashinfer
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.attention.reference import TorchAttention
from moeserve.ops.backend import REFERENCE, TRITON, Backend, Implementation
from moeserve.ops.libraries import LibraryUnusable
from moeserve.ops.select import select_backend
from moeserve.step_inputs import ChunkSpan

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from attention_cases import Case, Shape, expected_attention, make_case
from paged_steps import same_bytes

# T tokens, N query heads, G key-value heads, H head size

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, scale=0.125)
Chunks = list[tuple[int, int]]  # rows, and length of the context with them


def changed(**facts: Any) -> AttentionShape:
    return dataclasses.replace(SHAPE, **facts)


def opened(block_size: int = 16) -> FlashInfer:
    return FlashInfer(open_flashinfer(CPU), CPU, block_size)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> attention_stand_ins.FlashInfer:
    package = attention_stand_ins.strict()
    attention_stand_ins.install(monkeypatch, package)
    monkeypatch.setattr(flashinfer_attention, "DECODE_WORKSPACE", attention_stand_ins.SEMAPHORES + 8192)
    return package


def case_of(given: AttentionShape, chunks: Chunks, seed: int = 0, *, block_size: int = 16) -> Case:
    """Return a step whose queries are parts of wider rows. Numbers where no row may read are large."""
    shape = Shape(
        given.num_heads, given.num_kv_heads, given.head_size, given.window, given.has_sinks, scale=given.scale
    )
    return make_case(chunks, shape, block_size=block_size, dtype=given.dtype, seed=seed, unread=100.0)


def attended(case: Case, attend: Callable[..., Tensor]) -> Tensor:
    return attend(case.query_TNH, KeyValueCache(case.key_cache, case.value_cache), case.step, case.sinks_N)


def check(case: Case, attend: Callable[..., Tensor]) -> None:
    given = attended(case, attend)
    assert given.dtype == case.query_TNH.dtype
    assert given.is_contiguous()
    torch.testing.assert_close(given.double(), expected_attention(case)[0], atol=TOLERANCE[given.dtype], rtol=1e-2)


def drawn_shape(draw: random.Random, *, head_sizes: list[int], has_sinks: bool = False) -> AttentionShape:
    num_kv_heads, head_size = draw.choice([1, 2, 3]), draw.choice(head_sizes)
    return AttentionShape(
        num_heads=num_kv_heads * draw.choice([1, 2, 7]),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=draw.choice([torch.float16, torch.bfloat16]),
        scale=head_size**-0.5 * draw.choice([1.0, 0.7]),
        window=draw.choice([None, None, 1, 5, 100]),
        has_sinks=has_sinks and draw.random() < 0.5,
    )


def drawn_chunks(draw: random.Random, *, is_decode: bool) -> Chunks:
    rows = [1 if is_decode else draw.choice([0, 1, 1, 2, 5, 40]) for _ in range(draw.randint(1, 5))]
    return [(each, each + draw.choice([0, 1, 15, 16, 100, 255])) for each in rows]


@pytest.mark.parametrize("seed", range(4))
def test_one_row_per_chunk_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    shape = drawn_shape(draw, head_sizes=[16, 64, 80, 256], has_sinks=True)
    block_size = draw.choice([16, 32, 64, 128])
    library = opened(block_size)
    assert library.why_not(shape, "decode") is None
    attend = library.make_attend(shape, "decode")
    for again in range(2):
        check(case_of(shape, drawn_chunks(draw, is_decode=True), seed + again, block_size=block_size), attend)
    assert flashinfer.num_decodes == 2


@pytest.mark.parametrize("seed", range(4))
def test_chunks_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    shape, block_size = drawn_shape(draw, head_sizes=[64, 128]), draw.choice([1, 7, 16, 256])
    library = opened(block_size)
    assert library.why_not(shape, "chunks") is None
    attend = library.make_attend(shape, "chunks")
    for again in range(2):
        check(case_of(shape, drawn_chunks(draw, is_decode=False), seed + again, block_size=block_size), attend)


def test_padding_changes_no_other_row(flashinfer: attention_stand_ins.FlashInfer) -> None:
    """Graphs are padded with rows in chunks of their own, whose contexts are empty."""
    attend = opened().make_attend(SHAPE, "decode")
    case = case_of(SHAPE, [(1, 20), (1, 300), (1, 5)])
    expected = attended(case, attend)
    step = case.step
    padded = dataclasses.replace(
        step,
        row_starts=torch.arange(6, dtype=torch.int32),
        context_lens=torch.cat([step.context_lens, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.cat([step.block_table, torch.zeros(2, step.block_table.shape[1], dtype=torch.int32)]),
        spans=step.spans + tuple(ChunkSpan(row, 1, 0) for row in (3, 4)),
    )
    query = torch.cat([case.query_TNH, case.query_TNH[:2]])
    given = attended(dataclasses.replace(case, step=padded, query_TNH=query), attend)
    assert same_bytes(given[:3], expected)


def test_a_step_is_planned_once_for_all_layers_of_a_shape(flashinfer: attention_stand_ins.FlashInfer) -> None:
    library = opened()
    shapes = [SHAPE, SHAPE, changed(window=4), changed(window=4)]
    layers = [library.attention(TorchAttention(shape), shape) for shape in shapes]
    for seed, chunks in enumerate(([(3, 20), (2, 2)], [(3, 20), (2, 2)], [(40, 40)])):
        case = case_of(SHAPE, chunks, seed)
        for layer, shape in zip(layers, shapes, strict=True):
            windowed = dataclasses.replace(case.shape, window=shape.window)
            check(dataclasses.replace(case, shape=windowed), layer.attend)
    assert (flashinfer.num_plans, flashinfer.num_runs) == (2 * 3, 4 * 3)


@pytest.mark.parametrize(
    ("kind", "facts", "value"),
    [
        ("decode", dict(dtype=torch.float32), "torch.float32"),
        ("chunks", dict(dtype=torch.float32), "torch.float32"),
        ("decode", {"block_size": 8}, "not 8"),
        ("decode", dict(head_size=72), "not 72"),
        ("decode", dict(head_size=272), "not 272"),
        ("chunks", dict(head_size=80), "not 80"),
        ("chunks", dict(has_sinks=True), "no sinks"),
    ],
)
def test_limits(kind: StepKind, facts: dict[str, Any], value: str, flashinfer: attention_stand_ins.FlashInfer) -> None:
    library = opened(facts.pop("block_size", 16))
    assert value in str(library.why_not(changed(**facts), kind))


def test_a_package_without_a_function_or_an_argument_of_it(
    flashinfer: attention_stand_ins.FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["flashinfer"]
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper
    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "plan", lambda self, qo_indptr, paged_kv_indptr: None)  # of an older version
        with pytest.raises(LibraryUnusable, match=r"\(1.2.3\) has no .*Wrapper.plan\(causal=\)"):
            open_flashinfer(CPU)
    for owner, name in (
        (module, "BatchPrefillWithPagedKVCacheWrapper"),
        (module.decode, "trtllm_batch_decode_with_kv_cache"),
    ):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            with pytest.raises(LibraryUnusable, match=f"has no .*{name}"):
                open_flashinfer(CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(LibraryUnusable, match=r"flashinfer cannot be imported .*pip install flashinfer-python"):
        open_flashinfer(CPU)


def test_an_unsupported_gpu(monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(LibraryUnusable, match=r"not made for GPUs of capability 7.5"):
        open_flashinfer(torch.device("cuda", 0))


# The choice


ZEROS: Any = SimpleNamespace(
    attend=lambda query_TNH, *others: torch.zeros_like(query_TNH), rotate_and_write=lambda *args: None
)


@pytest.mark.parametrize(
    ("facts", "refused"),
    [({}, ""), (dict(has_sinks=True), "chunks"), (dict(head_size=80), "chunks"), (dict(window=-4), "decode chunks")],
)
def test_the_library_serves_where_it_can(
    facts: dict[str, Any],
    refused: str,
    flashinfer: attention_stand_ins.FlashInfer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    shape = changed(**facts)
    layer = opened().attention(ZEROS, shape)
    for kind, chunks in (("decode", [(1, 20), (1, 3)]), ("chunks", [(2, 20), (1, 3)])):
        case = case_of(dataclasses.replace(shape, window=None), chunks)
        assert torch.all(attended(case, layer.attend) == 0) == (kind in refused)
        assert (f", {kind}) runs on our kernels" in caplog.text) == (kind in refused)


def test_a_step_without_tokens_or_with_an_empty_chunk_is_no_decode_step() -> None:
    own = TorchAttention(SHAPE)
    layer = FlashInferAttention(own, lambda *args: pytest.fail("decode"), own.attend)
    assert attended(case_of(SHAPE, []), layer.attend).shape == (0, 4, 64)
    check(case_of(SHAPE, [(1, 20), (0, 5)]), layer.attend)


def selected(name: AttentionChoice) -> Backend:
    return select_backend(CPU, torch.bfloat16, name, 16)


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has the kernels of a GPU."""
    monkeypatch.setitem(select.BACKENDS, "cpu", lambda dtype: TRITON)
    monkeypatch.setitem(attention.TABLE, "triton", Implementation(lambda backend, shape: ZEROS))


def test_a_library_serves_only_if_it_is_named(own_kernels: None, flashinfer: attention_stand_ins.FlashInfer) -> None:
    assert selected("triton") is TRITON
    layer = attention.make(selected("flashinfer"), SHAPE)
    check(case_of(SHAPE, [(1, 20), (1, 3)]), layer.attend)
    assert (flashinfer.num_decodes, flashinfer.num_runs) == (1, 0)


def test_a_measured_library_serves_the_steps_for_which_it_was_mostly_the_fastest(
    own_kernels: None, flashinfer: attention_stand_ins.FlashInfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MEASURED_FOLDER", tmp_path)
    assert selected("measured") is TRITON, "there is no table"
    key = measured.attention_key(SHAPE, "decode")
    faster = [(key, 1, "triton"), (key, 16, "flashinfer"), (key, 64, "flashinfer")]
    measured.save_table(tmp_path / "CPU.json", [*faster, (measured.attention_key(SHAPE, "chunks"), 9, "triton")])
    attend = attention.make(selected("measured"), SHAPE).attend
    check(case_of(SHAPE, [(1, 20), (1, 3)]), attend)
    attended(case_of(SHAPE, [(4, 20)]), attend)
    assert (flashinfer.num_decodes, flashinfer.num_runs) == (1, 0)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert selected("measured") is TRITON, "it is not installed"


def test_a_named_library_must_be_installed(own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(SettingsError, match=r"attention_backend='flashinfer'.*'triton'"):
        selected("flashinfer")


def test_libraries_need_triton(monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer) -> None:
    monkeypatch.setitem(select.BACKENDS, "cpu", lambda dtype: REFERENCE)
    with pytest.raises(SettingsError, match="triton is not installed"):
        selected("flashinfer")
