"""Attention by other libraries, in stand-ins for them: its numbers, what is refused, and which library is chosen."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import attention_stand_ins
import pytest
import torch
from attention_stand_ins import VERSION, Refused
from torch import Tensor

from moeserve.config.settings import AttentionName
from moeserve.errors import SettingsError
from moeserve.ops import attention_peers, attention_times, backend, flashinfer_attention, varlen_attention
from moeserve.ops.attention import TorchAttention
from moeserve.ops.attention_peers import (
    AttentionPeers,
    Peer,
    PeerAttention,
    PeerUnusable,
    open_attention_peers,
    open_peer,
)
from moeserve.ops.attention_times import (
    OWN,
    AttentionProblem,
    StepKind,
    fastest,
    load_times,
    save_times,
    times_path,
)
from moeserve.ops.flashinfer_attention import ChunkAttention, open_flashinfer
from moeserve.ops.varlen_attention import Varlen
from moeserve.step_inputs import StepInputs

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from paged_steps import NUM_SPARE_BLOCKS, make_step, same_bytes, scatter_blocks

# T tokens, N query heads, G key-value heads, H head size

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PROBLEM = AttentionProblem(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, block_size=16, scale=0.125)
LABEL = f"flashinfer {VERSION}"
Chunks = list[tuple[int, int]]  # rows, and length of the context with them


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> attention_stand_ins.FlashInfer:
    package = attention_stand_ins.strict()
    attention_stand_ins.install(monkeypatch, package)
    monkeypatch.setattr(flashinfer_attention, "DECODE_WORKSPACE", attention_stand_ins.SEMAPHORES + 8192)
    return package


def varlen(implementation: Any) -> Varlen:
    return Varlen(attention_stand_ins.Varlen(implementation).varlen_attn_out, implementation)


@dataclasses.dataclass(frozen=True)
class Case:
    """One step over caches that hold large numbers wherever no row may look."""

    step: StepInputs
    query_TNH: Tensor
    key_cache: Tensor
    value_cache: Tensor
    sinks_N: Tensor | None

    def attended_by(self, attend: Callable[..., Tensor]) -> Tensor:
        return attend(self.query_TNH, self.key_cache, self.value_cache, self.step, self.sinks_N)

    def expected(self, problem: AttentionProblem) -> Tensor:
        reference = TorchAttention(scale=problem.scale, window=problem.window)
        tensors = (self.query_TNH.float(), self.key_cache.float(), self.value_cache.float())
        return reference.attend(*tensors, self.step, self.sinks_N)


def make_case(problem: AttentionProblem, chunks: Chunks, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    size, dtype = problem.block_size, problem.dtype
    block_ids = scatter_blocks(chunks, size, seed)
    step = make_step(chunks, block_ids, size)
    shape = (sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, problem.num_kv_heads, size, problem.head_size)
    caches = torch.full((2, *shape), 100.0, dtype=dtype)
    for ids, (_, context_len) in zip(block_ids, chunks, strict=True):
        places = torch.arange(context_len)
        blocks = torch.tensor(ids, dtype=torch.int64)[places // size]
        for cache in caches:
            drawn = torch.randn(context_len, problem.num_kv_heads, problem.head_size, generator=generator)
            cache[blocks, :, places % size] = drawn.to(dtype)
    query = torch.randn(len(step.token_ids), problem.num_heads, problem.head_size, generator=generator).to(dtype)
    sinks = torch.randn(problem.num_heads, generator=generator) * 2 if problem.has_sinks else None
    return Case(step, query, caches[0], caches[1], sinks)


def check(case: Case, problem: AttentionProblem, attend: Callable[..., Tensor]) -> None:
    attended = case.attended_by(attend)
    assert attended.dtype == problem.dtype
    assert attended.is_contiguous()
    torch.testing.assert_close(attended.float(), case.expected(problem), atol=TOLERANCE[problem.dtype], rtol=1e-2)


def drawn_problem(draw: random.Random, *, block_sizes: list[int], head_sizes: list[int]) -> AttentionProblem:
    num_kv_heads, head_size = draw.choice([1, 2, 3]), draw.choice(head_sizes)
    return AttentionProblem(
        num_heads=num_kv_heads * draw.choice([1, 2, 7]),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=draw.choice([torch.float16, torch.bfloat16]),
        block_size=draw.choice(block_sizes),
        scale=head_size**-0.5 * draw.choice([1.0, 0.7]),
        window=draw.choice([None, None, 1, 5, 100]),
    )


def drawn_chunks(draw: random.Random, *, is_decode: bool) -> Chunks:
    rows = [1 if is_decode else draw.choice([0, 1, 1, 2, 5, 40]) for _ in range(draw.randint(1, 5))]
    return [(each, each + draw.choice([0, 1, 15, 16, 100, 255])) for each in rows]


@pytest.mark.parametrize("seed", range(12))
def test_one_row_per_chunk_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    problem = drawn_problem(draw, block_sizes=[16, 32, 64, 128], head_sizes=[16, 64, 80, 256])
    problem = dataclasses.replace(problem, has_sinks=draw.random() < 0.5)
    peer = open_flashinfer(CPU)
    assert peer.refusal(problem, "decode") is None
    attend = peer.attend(problem, "decode")
    for again in range(2):  # the workspace is as it was
        check(make_case(problem, drawn_chunks(draw, is_decode=True), seed + again), problem, attend)
    assert flashinfer.num_decodes == 2


@pytest.mark.parametrize("seed", range(12))
def test_chunks_by_flashinfer(seed: int, flashinfer: attention_stand_ins.FlashInfer) -> None:
    draw = random.Random(seed)
    problem = drawn_problem(draw, block_sizes=[1, 7, 16, 256], head_sizes=[64, 128])
    peer = open_flashinfer(CPU)
    assert peer.refusal(problem, "chunks") is None
    attend = peer.attend(problem, "chunks")
    for again in range(2):
        check(make_case(problem, drawn_chunks(draw, is_decode=False), seed + again), problem, attend)


@pytest.mark.parametrize("implementation", ["FA2", "FA3"])
@pytest.mark.parametrize("seed", range(8))
def test_steps_of_any_kind_by_varlen(seed: int, implementation: str) -> None:
    draw = random.Random(seed)
    block_sizes = [256, 512] if implementation == "FA2" else [1, 7, 16, 256]
    problem = drawn_problem(draw, block_sizes=block_sizes, head_sizes=[8, 64, 136])
    peer = varlen(implementation)
    kinds: list[tuple[StepKind, bool]] = [("decode", True), ("chunks", False)]
    for kind, is_decode in kinds:
        assert peer.refusal(problem, kind) is None
        check(make_case(problem, drawn_chunks(draw, is_decode=is_decode), seed), problem, peer.attend(problem, kind))


@pytest.mark.parametrize("name", ["flashinfer", "FA3"])
def test_queries_may_be_a_part_of_wider_rows(name: str, flashinfer: attention_stand_ins.FlashInfer) -> None:
    peer: Peer = open_flashinfer(CPU) if name == "flashinfer" else varlen(name)
    kinds: list[tuple[StepKind, Chunks]] = [("decode", [(1, 20), (1, 5)]), ("chunks", [(1, 20), (5, 5)])]
    for kind, chunks in kinds:
        case = make_case(PROBLEM, chunks)
        wide = torch.randn(len(case.query_TNH), 10, 64).to(PROBLEM.dtype)
        wide[:, 3:7] = case.query_TNH
        attend = peer.attend(PROBLEM, kind)
        expected = case.attended_by(attend)
        assert same_bytes(dataclasses.replace(case, query_TNH=wide[:, 3:7]).attended_by(attend), expected)


@pytest.mark.parametrize("name", ["flashinfer", "FA3"])
def test_padding_changes_no_other_row(name: str, flashinfer: attention_stand_ins.FlashInfer) -> None:
    """As graphs are padded: rows in chunks of their own, whose contexts are empty."""
    peer: Peer = open_flashinfer(CPU) if name == "flashinfer" else varlen(name)
    attend = peer.attend(PROBLEM, "decode")
    case = make_case(PROBLEM, [(1, 20), (1, 300), (1, 5)])
    expected = case.attended_by(attend)
    step = case.step
    padded = dataclasses.replace(
        step,
        row_starts=torch.arange(6, dtype=torch.int32),
        context_lens=torch.cat([step.context_lens, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.cat([step.block_table, torch.zeros(2, step.block_table.shape[1], dtype=torch.int32)]),
        spans=step.spans + tuple(dataclasses.replace(step.spans[0], first_row=row, context_len=0) for row in (3, 4)),
    )
    query = torch.cat([case.query_TNH, case.query_TNH[:2]])
    attended = dataclasses.replace(case, step=padded, query_TNH=query).attended_by(attend)
    assert same_bytes(attended[:3], expected)


def test_a_step_is_planned_once_for_all_layers_of_a_shape(flashinfer: attention_stand_ins.FlashInfer) -> None:
    peers = AttentionPeers("flashinfer", [open_flashinfer(CPU)], {}, 16)
    own = TorchAttention(scale=PROBLEM.scale, window=None)
    layers = [peers.beside(own, PROBLEM) for _ in range(3)]
    other = dataclasses.replace(PROBLEM, window=4)
    layers_with_window = [peers.beside(own, other) for _ in range(2)]
    for number, chunks in enumerate(([(3, 20), (2, 2)], [(3, 20), (2, 2)], [(40, 40)])):
        case = make_case(PROBLEM, chunks, seed=number)
        for layer in layers:
            check(case, PROBLEM, layer.attend)
        for layer in layers_with_window:
            check(case, other, layer.attend)
    assert flashinfer.num_plans == 2 * 3
    assert flashinfer.num_runs == 5 * 3


def test_the_stand_in_refuses_what_the_package_does(flashinfer: attention_stand_ins.FlashInfer) -> None:
    """Or the tests above would say little."""
    case = make_case(PROBLEM, [(3, 20)])
    wrapper = flashinfer.as_module().BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(64, dtype=torch.uint8), kv_layout="HND"
    )
    with pytest.raises(Refused, match="not initialized"):
        wrapper.run(case.query_TNH, (case.key_cache, case.value_cache))
    attend = ChunkAttention(wrapper, PROBLEM)
    case.attended_by(attend)
    with pytest.raises(Refused, match="planned for"):
        wrapper.run(case.query_TNH.half(), (case.key_cache.half(), case.value_cache.half()))
    with pytest.raises(Refused, match="does not match"):
        wrapper.run(case.query_TNH[1:], (case.key_cache, case.value_cache))
    peer = open_flashinfer(CPU)
    decode = peer.attend(dataclasses.replace(PROBLEM, block_size=17), "decode")
    with pytest.raises(Refused, match="Invalid page_size: 17"):
        make_case(dataclasses.replace(PROBLEM, block_size=17), [(1, 20)]).attended_by(decode)


def test_the_varlen_stand_in_has_the_signature_of_torch() -> None:
    varlen_attn_out = getattr(pytest.importorskip("torch.nn.attention.varlen"), "varlen_attn_out", None)
    if varlen_attn_out is None:
        pytest.skip("this torch has no varlen_attn_out")
    real = inspect.signature(varlen_attn_out).parameters
    stand_in = inspect.signature(attention_stand_ins.Varlen("FA2").varlen_attn_out).parameters
    assert [(each.name, each.kind, each.default) for each in real.values()] == [
        (each.name, each.kind, each.default) for each in stand_in.values()
    ]


@pytest.mark.parametrize("implementation", ["FA2", "FA3"])
def test_torch_takes_what_varlen_is_given(implementation: Any) -> None:
    """Its own function on tensors without memory: arguments, types and shapes, no numbers."""
    try:
        real = open_peer("varlen", CPU)
    except PeerUnusable as error:
        pytest.skip(str(error))
    assert isinstance(real, Varlen)
    peer = Varlen(real._varlen_attn_out, implementation)
    for kind, chunks in (("decode", [(1, 20), (1, 5)]), ("chunks", [(3, 20), (5, 5)])):
        case = make_case(PROBLEM, chunks)
        step = dataclasses.replace(
            case.step,
            row_starts=case.step.row_starts.to("meta"),
            context_lens=case.step.context_lens.to("meta"),
            block_table=case.step.block_table.to("meta"),
        )
        query, keys, values = (each.to("meta") for each in (case.query_TNH, case.key_cache, case.value_cache))
        attended = peer.attend(PROBLEM, cast(StepKind, kind))(query, keys, values, step)
        assert attended.shape == query.shape
        assert attended.dtype == query.dtype


@pytest.mark.parametrize(
    ("changed", "kinds", "words"),
    [
        (dict(dtype=torch.float32), ("decode", "chunks"), "computes in 16 bits, not in torch.float32"),
        (dict(block_size=8), ("decode",), "16, 32, 64 or 128 positions, not 8"),
        (dict(head_size=72), ("decode",), "multiples of 16 up to 256, not 72"),
        (dict(head_size=272), ("decode",), "multiples of 16 up to 256, not 272"),
        (dict(head_size=80), ("chunks",), "64, 128 or 256 values, not 80"),
        (dict(has_sinks=True), ("chunks",), "no sinks in chunks"),
    ],
)
def test_what_flashinfer_cannot(
    changed: dict[str, Any], kinds: tuple[StepKind, ...], words: str, flashinfer: attention_stand_ins.FlashInfer
) -> None:
    peer, problem = open_flashinfer(CPU), dataclasses.replace(PROBLEM, **changed)
    for kind in kinds:
        assert words in str(peer.refusal(problem, kind))


@pytest.mark.parametrize(
    ("implementation", "changed", "words"),
    [
        ("FA3", dict(dtype=torch.float32), "computes in 16 bits, not in torch.float32"),
        ("FA3", dict(has_sinks=True), "no sinks"),
        ("FA3", dict(head_size=20), "multiples of 8 up to 256, not 20"),
        ("FA2", dict(block_size=16), "blocks of multiples of 256 positions, not 16"),
    ],
)
def test_what_varlen_cannot(implementation: str, changed: dict[str, Any], words: str) -> None:
    problem = dataclasses.replace(PROBLEM, **changed)
    assert words in str(varlen(implementation).refusal(problem, "decode"))
    assert varlen("FA3").refusal(PROBLEM, "decode") is None


def without(**lacking: str) -> ModuleType:
    module = attention_stand_ins.strict().as_module()
    for where, name in lacking.items():
        delattr(module if where == "top" else module.decode, name)
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (without(inner="trtllm_batch_decode_with_kv_cache"), r"\(1.2.3\) has no trtllm_batch_decode_with_kv_cache"),
        (without(top="BatchPrefillWithPagedKVCacheWrapper"), "has no BatchPrefillWithPagedKVCacheWrapper"),
    ],
)
def test_a_package_that_lacks_something(module: ModuleType, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module.decode)
    with pytest.raises(PeerUnusable, match=words):
        open_peer("flashinfer", CPU)


def test_an_older_package(flashinfer: attention_stand_ins.FlashInfer) -> None:
    """Its functions are there, and cannot be called so."""
    module = sys.modules["flashinfer"]

    def plan(self: Any, qo_indptr: Tensor, paged_kv_indptr: Tensor) -> None:
        raise AssertionError("never called")

    module.BatchPrefillWithPagedKVCacheWrapper.plan = plan  # type: ignore[attr-defined]
    with pytest.raises(PeerUnusable, match=r"has no BatchPrefillWithPagedKVCacheWrapper.plan\(causal=\)"):
        open_peer("flashinfer", CPU)


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(PeerUnusable, match=r"flashinfer cannot be imported .*pip install flashinfer-python"):
        open_peer("flashinfer", CPU)


@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_a_gpu_that_a_library_is_not_made_for(
    name: str, monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(PeerUnusable, match=r"not made for GPUs of capability 7.5"):
        open_peer(name, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("capability", "is_installed", "active", "implementation", "activated"),
    [
        ((9, 0), True, None, "FA3", ["FA3"]),
        ((9, 0), True, "FA3", "FA3", []),
        ((9, 0), False, None, "FA2", []),
        ((8, 0), True, None, "FA2", []),
    ],
)
def test_the_third_flash_attention_is_used_where_it_can_be(
    capability: tuple[int, int],
    is_installed: bool,
    active: str | None,
    implementation: str,
    activated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    now = [active]
    calls: list[str] = []

    def activate(name: str) -> None:
        calls.append(name)
        now.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: now[-1])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    found = SimpleNamespace(find_spec=lambda name: object() if is_installed else None)
    monkeypatch.setattr(varlen_attention, "importlib", SimpleNamespace(util=found))
    peer = open_peer("varlen", torch.device("cuda", 0))
    assert isinstance(peer, Varlen)
    assert peer.implementation == implementation
    assert peer.label == f"varlen {torch.__version__} {implementation}"
    assert calls == activated


# Which one attends.


@dataclasses.dataclass(frozen=True)
class Named:
    """A library that answers with a number of its own."""

    label: str
    number: float
    refused: tuple[StepKind, ...] = ()

    def refusal(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        return f"{kind} is too hard for it" if kind in self.refused else None

    def attend(self, problem: AttentionProblem, kind: StepKind) -> Any:
        return lambda query_TNH, *others: torch.full_like(query_TNH, self.number)


def answers(peers: AttentionPeers, problem: AttentionProblem = PROBLEM) -> tuple[float, float]:
    """Whose number a decode step gets, and one of chunks; 0: ours."""
    own = cast(Any, Named("own", 0.0))
    own_backend = SimpleNamespace(attend=own.attend(problem, "decode"), write=None, turn_and_write=None)
    chosen = peers.beside(cast(Any, own_backend), problem)
    cases = [make_case(problem, chunks) for chunks in ([(1, 20), (1, 3)], [(2, 20), (1, 3)])]
    decode, chunks = (float(case.attended_by(chosen.attend).mean()) for case in cases)
    return decode, chunks


def test_a_library_that_was_asked_for_attends_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert answers(AttentionPeers("flashinfer", [Named("a 1", 1.0)], {}, 16)) == (1.0, 1.0)
    caplog.clear()
    assert answers(AttentionPeers("flashinfer", [Named("a 1", 1.0, ("chunks",))], {}, 16)) == (1.0, 0.0)
    key = "bfloat16 4 heads and 2 of keys x 64, blocks of 16"
    assert [record.getMessage() for record in caplog.records] == [
        f"a 1 attends ({key}, decode)",
        f"our kernels attend ({key}, chunks): a 1 cannot, as chunks is too hard for it",
    ]
    assert answers(AttentionPeers("flashinfer", [Named("a 1", 1.0, ("chunks", "decode"))], {}, 16)) == (0.0, 0.0)


def test_what_is_chosen_is_said_once_for_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    peers = AttentionPeers("flashinfer", [Named("a 1", 1.0, ("chunks",))], {}, 16)
    for _ in range(3):
        answers(peers)
    assert len(caplog.records) == 2


def test_without_a_library_that_can_a_layer_has_our_own_backend() -> None:
    own = TorchAttention(scale=1.0, window=None)
    refused = AttentionPeers("flashinfer", [Named("a 1", 1.0, ("decode", "chunks"))], {}, 16)
    assert refused.beside(own, PROBLEM) is own
    assert isinstance(AttentionPeers("flashinfer", [Named("a 1", 1.0)], {}, 16).beside(own, PROBLEM), PeerAttention)


def test_the_fastest_by_measurements_attends() -> None:
    times = {
        PROBLEM.key: {
            "decode": {OWN: 3.0, "a 1": 2.0, "b 1": 1.0},
            "chunks": {OWN: 1.0, "a 1": 2.0, "b 1": 3.0},
        }
    }
    both = [Named("a 1", 1.0), Named("b 1", 2.0)]
    assert answers(AttentionPeers("measured", both, times, 16)) == (2.0, 0.0)
    assert answers(AttentionPeers("measured", both[:1], times, 16)) == (1.0, 0.0)
    assert answers(AttentionPeers("measured", [Named("a 1", 1.0, ("decode",)), both[1]], times, 16)) == (2.0, 0.0)
    newer = [Named("a 1", 1.0), Named("b 2", 2.0)]
    assert answers(AttentionPeers("measured", newer, times, 16)) == (1.0, 0.0), "another version was not measured"
    window = dataclasses.replace(PROBLEM, window=7)
    assert answers(AttentionPeers("measured", both, times, 16), window) == (0.0, 0.0), "another shape neither"


def test_a_step_without_tokens_is_ours() -> None:
    own = TorchAttention(scale=1.0, window=None)
    layer = PeerAttention(own, lambda *args: pytest.fail("decode"), lambda *args: pytest.fail("chunks"))
    assert make_case(PROBLEM, []).attended_by(layer.attend).shape == (0, 4, 64)


def test_chunks_without_rows_are_no_decode_step() -> None:
    peers = AttentionPeers("flashinfer", [Named("a 1", 1.0, ("chunks",))], {}, 16)
    own = TorchAttention(scale=PROBLEM.scale, window=None)
    case = make_case(PROBLEM, [(1, 20), (0, 5)])
    attended = case.attended_by(peers.beside(own, PROBLEM).attend)
    torch.testing.assert_close(attended.float(), case.expected(PROBLEM), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("seconds", "usable", "expected"),
    [
        ({}, ["a"], OWN),
        ({OWN: 1.0}, ["a"], OWN),
        ({"a": 1.0}, ["a"], OWN),  # ours was not measured: nobody knows
        ({OWN: 1.0, "a": 0.5}, ["a"], "a"),
        ({OWN: 1.0, "a": 0.5}, [], OWN),
        ({OWN: 1.0, "a": 0.96}, ["a"], OWN),  # noise
        ({OWN: 1.0, "a": 0.5, "b": 0.4}, ["a", "b"], "b"),
        ({OWN: 1.0, "a": 0.5, "b": 0.4}, ["a"], "a"),
        ({OWN: 1.0, "b": 0.5, "a": 0.5}, ["b", "a"], "a"),
        ({OWN: 0.1, "a": 0.5}, [OWN, "a"], OWN),
    ],
)
def test_fastest(seconds: dict[str, float], usable: list[str], expected: str) -> None:
    assert fastest(seconds, usable) == expected


def test_a_file_of_times_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "times.json"
    assert load_times(path) == {}
    save_times(path, PROBLEM, {"decode": {"b 1": 2.0, OWN: 1.0}})
    other = dataclasses.replace(PROBLEM, window=128, has_sinks=True)
    save_times(path, other, {"decode": {OWN: 3.0}, "chunks": {OWN: 4.0}})
    save_times(path, PROBLEM, {"decode": {OWN: 5.0}})
    assert load_times(path) == {
        "bfloat16 4 heads and 2 of keys x 64, blocks of 16": {"decode": {OWN: 5.0}},
        "bfloat16 4 heads and 2 of keys x 64, blocks of 16, window 128, sinks": {
            "decode": {OWN: 3.0},
            "chunks": {OWN: 4.0},
        },
    }
    assert list(path.parent.iterdir()) == [path]


def test_every_part_of_a_shape_has_times_of_its_own() -> None:
    changes: list[dict[str, Any]] = [
        dict(num_heads=8),
        dict(num_kv_heads=4),
        dict(head_size=128),
        dict(dtype=torch.float16),
        dict(block_size=32),
        dict(window=7),
        dict(has_sinks=True),
    ]
    assert len({PROBLEM.key, *(dataclasses.replace(PROBLEM, **changed).key for changed in changes)}) == 8
    assert dataclasses.replace(PROBLEM, scale=1.0).key == PROBLEM.key


# What is opened when an engine starts.


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(backend, "of", lambda device: "triton")
    monkeypatch.setattr(attention_times, "TIMES_FOLDER", tmp_path)
    return times_path(CPU)


def test_without_measurements_no_library_is_imported(
    as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer
) -> None:
    monkeypatch.setattr(attention_peers, "open_peer", lambda name, device: pytest.fail(f"{name} was opened"))
    assert open_attention_peers("measured", CPU, 16) is None
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 1.0, LABEL: 2.0}})
    assert open_attention_peers("measured", CPU, 16) is None, "ours is the fastest of all"
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 2.0, LABEL: 1.0}})
    assert open_attention_peers("triton", CPU, 16) is None, "only ours was asked for"


def test_a_library_that_was_measured_to_be_faster_is_opened(
    as_on_a_gpu: Path, flashinfer: attention_stand_ins.FlashInfer
) -> None:
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 2.0, LABEL: 1.0}, "chunks": {OWN: 1.0, LABEL: 2.0}})
    peers = open_attention_peers("measured", CPU, 16)
    assert peers is not None
    layer = peers.beside(TorchAttention(scale=PROBLEM.scale, window=None), PROBLEM)
    for chunks in ([(1, 20), (1, 3)], [(4, 20), (1, 3)]):
        check(make_case(PROBLEM, chunks), PROBLEM, layer.attend)
    assert (flashinfer.num_decodes, flashinfer.num_runs) == (1, 0)


def test_the_second_fastest_is_opened_too(as_on_a_gpu: Path, flashinfer: attention_stand_ins.FlashInfer) -> None:
    """It serves where the fastest cannot, or is no longer installed."""
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 3.0, LABEL: 2.0, "gone 1": 1.0}})
    peers = open_attention_peers("measured", CPU, 16)
    assert peers is not None
    assert isinstance(peers.beside(TorchAttention(scale=1.0, window=None), PROBLEM), PeerAttention)


def test_one_that_was_faster_and_is_gone_is_told(
    as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 2.0, LABEL: 1.99, "gone 1": 0.5}})
    assert open_attention_peers("measured", CPU, 16) is None
    save_times(as_on_a_gpu, PROBLEM, {"decode": {OWN: 2.0, LABEL: 1.0}})
    assert open_attention_peers("measured", CPU, 16) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "our kernels attend, though gone was measured to be faster on this GPU: there is no 'gone'; there are "
        "flashinfer, varlen"
    )
    assert second.startswith("our kernels attend, though flashinfer was measured to be faster on this GPU: flashinfer")


@pytest.mark.parametrize("wanted", ["flashinfer", "varlen"])
def test_one_that_was_asked_for_must_be_there(
    wanted: AttentionName, as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(SettingsError, match=f"attention_backend='{wanted}' cannot be: .*. Use 'triton' or 'auto'"):
        open_attention_peers(wanted, CPU, 16)


def test_without_triton_no_library_attends(
    monkeypatch: pytest.MonkeyPatch, flashinfer: attention_stand_ins.FlashInfer
) -> None:
    monkeypatch.setattr(backend, "of", lambda device: "torch")
    assert open_attention_peers("measured", CPU, 16) is None
    with pytest.raises(SettingsError, match="triton is not installed"):
        open_attention_peers("flashinfer", CPU, 16)


def test_another_flash_attention_that_torch_was_told_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(PeerUnusable, match="torch was told to call FA4"):
        open_peer("varlen", CPU)
