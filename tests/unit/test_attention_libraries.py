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
from attention_stand_ins import VERSION
from torch import Tensor

from moeserve.config.settings import AttentionChoice
from moeserve.errors import SettingsError
from moeserve.ops import attention, measured, select
from moeserve.ops.attention import flashinfer as flashinfer_attention
from moeserve.ops.attention.flashinfer import open_flashinfer
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.attention.library import AttentionProblem, LibraryAttention, LibraryChoice, StepKind, open_library
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
PROBLEM = AttentionProblem(SHAPE, block_size=16)
LABEL = f"flashinfer {VERSION}"
Chunks = list[tuple[int, int]]  # rows, and length of the context with them


def changed(*, block_size: int = 16, **facts: Any) -> AttentionProblem:
    return AttentionProblem(dataclasses.replace(SHAPE, **facts), block_size)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> attention_stand_ins.FlashInfer:
    package = attention_stand_ins.strict()
    attention_stand_ins.install(monkeypatch, package)
    monkeypatch.setattr(flashinfer_attention, "DECODE_WORKSPACE", attention_stand_ins.SEMAPHORES + 8192)
    return package


def case_of(problem: AttentionProblem, chunks: Chunks, seed: int = 0) -> Case:
    """Return a step whose queries are parts of wider rows. Numbers where no row may read are large."""
    given = problem.shape
    shape = Shape(
        given.num_heads, given.num_kv_heads, given.head_size, given.window, given.has_sinks, scale=given.scale
    )
    return make_case(chunks, shape, block_size=problem.block_size, dtype=given.dtype, seed=seed, unread=100.0)


def attended(case: Case, attend: Callable[..., Tensor]) -> Tensor:
    return attend(case.query_TNH, KeyValueCache(case.key_cache, case.value_cache), case.step, case.sinks_N)


def check(case: Case, attend: Callable[..., Tensor]) -> None:
    given = attended(case, attend)
    assert given.dtype == case.query_TNH.dtype
    assert given.is_contiguous()
    torch.testing.assert_close(given.double(), expected_attention(case)[0], atol=TOLERANCE[given.dtype], rtol=1e-2)


def drawn_problem(
    draw: random.Random, *, block_sizes: list[int], head_sizes: list[int], has_sinks: bool = False
) -> AttentionProblem:
    num_kv_heads, head_size = draw.choice([1, 2, 3]), draw.choice(head_sizes)
    shape = AttentionShape(
        num_heads=num_kv_heads * draw.choice([1, 2, 7]),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=draw.choice([torch.float16, torch.bfloat16]),
        scale=head_size**-0.5 * draw.choice([1.0, 0.7]),
        window=draw.choice([None, None, 1, 5, 100]),
        has_sinks=has_sinks and draw.random() < 0.5,
    )
    return AttentionProblem(shape, draw.choice(block_sizes))


def drawn_chunks(draw: random.Random, *, is_decode: bool) -> Chunks:
    rows = [1 if is_decode else draw.choice([0, 1, 1, 2, 5, 40]) for _ in range(draw.randint(1, 5))]
    return [(each, each + draw.choice([0, 1, 15, 16, 100, 255])) for each in rows]


@pytest.mark.parametrize("seed", range(4))
def test_one_row_per_chunk_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    problem = drawn_problem(draw, block_sizes=[16, 32, 64, 128], head_sizes=[16, 64, 80, 256], has_sinks=True)
    library = open_flashinfer(CPU)
    assert library.why_unavailable(problem, "decode") is None
    attend = library.make_attend(problem, "decode")
    for again in range(2):
        check(case_of(problem, drawn_chunks(draw, is_decode=True), seed + again), attend)
    assert flashinfer.num_decodes == 2


@pytest.mark.parametrize("seed", range(4))
def test_chunks_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    problem = drawn_problem(draw, block_sizes=[1, 7, 16, 256], head_sizes=[64, 128])
    library = open_flashinfer(CPU)
    assert library.why_unavailable(problem, "chunks") is None
    attend = library.make_attend(problem, "chunks")
    for again in range(2):
        check(case_of(problem, drawn_chunks(draw, is_decode=False), seed + again), attend)


def test_padding_changes_no_other_row(flashinfer: attention_stand_ins.FlashInfer) -> None:
    """Graphs are padded with rows in chunks of their own, whose contexts are empty."""
    attend = open_flashinfer(CPU).make_attend(PROBLEM, "decode")
    case = case_of(PROBLEM, [(1, 20), (1, 300), (1, 5)])
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
    choice = LibraryChoice(open_flashinfer(CPU), 16)
    problems = [PROBLEM, PROBLEM, changed(window=4), changed(window=4)]
    layers = [choice.attention(TorchAttention(problem.shape), problem.shape) for problem in problems]
    for seed, chunks in enumerate(([(3, 20), (2, 2)], [(3, 20), (2, 2)], [(40, 40)])):
        case = case_of(PROBLEM, chunks, seed)
        for layer, problem in zip(layers, problems, strict=True):
            windowed = dataclasses.replace(case.shape, window=problem.shape.window)
            check(dataclasses.replace(case, shape=windowed), layer.attend)
    assert (flashinfer.num_plans, flashinfer.num_runs) == (2 * 3, 4 * 3)


@pytest.mark.parametrize(
    ("kind", "facts", "value"),
    [
        ("decode", dict(dtype=torch.float32), "torch.float32"),
        ("chunks", dict(dtype=torch.float32), "torch.float32"),
        ("decode", dict(block_size=8), "not 8"),
        ("decode", dict(head_size=72), "not 72"),
        ("decode", dict(head_size=272), "not 272"),
        ("chunks", dict(head_size=80), "not 80"),
        ("chunks", dict(has_sinks=True), "no sinks"),
    ],
)
def test_limits(kind: StepKind, facts: dict[str, Any], value: str, flashinfer: attention_stand_ins.FlashInfer) -> None:
    assert value in str(open_flashinfer(CPU).why_unavailable(changed(**facts), kind))


def test_a_package_without_a_function_or_an_argument_of_it(
    flashinfer: attention_stand_ins.FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["flashinfer"]
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper
    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "plan", lambda self, qo_indptr, paged_kv_indptr: None)  # of an older version
        with pytest.raises(LibraryUnusable, match=r"\(1.2.3\) has no .*Wrapper.plan\(causal=\)"):
            open_library("flashinfer", CPU)
    for owner, name in (
        (module, "BatchPrefillWithPagedKVCacheWrapper"),
        (module.decode, "trtllm_batch_decode_with_kv_cache"),
    ):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            with pytest.raises(LibraryUnusable, match=f"has no {name}"):
                open_library("flashinfer", CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(LibraryUnusable, match=r"flashinfer cannot be imported .*pip install flashinfer-python"):
        open_library("flashinfer", CPU)


def test_an_unsupported_gpu(monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(LibraryUnusable, match=r"not made for GPUs of capability 7.5"):
        open_library("flashinfer", torch.device("cuda", 0))


# The choice


@dataclasses.dataclass(frozen=True)
class Constant:
    """A library whose results are all one number."""

    label: str
    number: float
    refused: tuple[StepKind, ...] = ()

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        return f"no {kind}" if kind in self.refused else None

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Any:
        return lambda query_TNH, *others: torch.full_like(query_TNH, self.number)


ZEROS: Any = SimpleNamespace(attend=Constant("own", 0.0).make_attend(PROBLEM, "decode"), rotate_and_write=None)


@pytest.mark.parametrize("refused", [(), ("chunks",), ("decode",), ("chunks", "decode")])
def test_a_library_serves_where_it_can(refused: tuple[StepKind, ...], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layer = LibraryChoice(Constant("a 1", 1.0, refused), 16).attention(ZEROS, SHAPE)
    for kind, chunks in (("decode", [(1, 20), (1, 3)]), ("chunks", [(2, 20), (1, 3)])):
        served = attended(case_of(PROBLEM, chunks), layer.attend)
        assert torch.all(served == (0.0 if kind in refused else 1.0))
        assert (f"no {kind}" in caplog.text) == (kind in refused)


def test_a_step_without_tokens_or_with_an_empty_chunk_is_no_decode_step() -> None:
    own = TorchAttention(SHAPE)
    layer = LibraryAttention(own, lambda *args: pytest.fail("decode"), own.attend)
    assert attended(case_of(PROBLEM, []), layer.attend).shape == (0, 4, 64)
    check(case_of(PROBLEM, [(1, 20), (0, 5)]), layer.attend)


def selected(name: AttentionChoice) -> Backend:
    return select_backend(CPU, torch.bfloat16, name, 16)


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has the kernels of a GPU."""
    monkeypatch.setitem(select.BACKENDS, "cpu", lambda: TRITON)
    monkeypatch.setitem(attention.TABLE, "triton", Implementation(lambda backend, shape: ZEROS))


def test_a_library_serves_only_if_it_is_named(own_kernels: None, flashinfer: attention_stand_ins.FlashInfer) -> None:
    assert selected("triton") is TRITON
    layer = attention.make(selected("flashinfer"), SHAPE)
    check(case_of(PROBLEM, [(1, 20), (1, 3)]), layer.attend)
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
    check(case_of(PROBLEM, [(1, 20), (1, 3)]), attend)
    attended(case_of(PROBLEM, [(4, 20)]), attend)
    assert (flashinfer.num_decodes, flashinfer.num_runs) == (1, 0)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert selected("measured") is TRITON, "it is not installed"


def test_a_named_library_must_be_installed(own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(SettingsError, match=r"attention_backend='flashinfer'.*'triton'"):
        selected("flashinfer")


def test_libraries_need_triton(monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer) -> None:
    monkeypatch.setitem(select.BACKENDS, "cpu", lambda: REFERENCE)
    with pytest.raises(SettingsError, match="triton is not installed"):
        selected("flashinfer")
