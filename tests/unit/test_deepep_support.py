"""The choice of DeepEP: packages, machines and shapes that it supports; float8 rows; sizes of buffers."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from build_contexts import cpu_context
from deepep_stand_in import Buffer, Config, ElasticBuffer, stand_in

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.errors import SettingsError
from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPShape, received_rows, to_float8
from moeserve.layers.moe.dispatch.deepep.factory import choose_package, open_communicator, open_deepep
from moeserve.layers.moe.dispatch.deepep.support import offered_api, why_shape_unsupported, why_unsupported
from moeserve.ops.rows.interface import plain_rows
from moeserve.worker.cuda_graphs import graph_sizes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LEGACY, ELASTIC = stand_in(Buffer), stand_in(ElasticBuffer)
SHAPE = DeepEPShape(  # DeepSeek-V3 on 32 GPUs
    hidden_size=7168, top_k=8, dtype=torch.bfloat16, num_slots=(9,) * 32, max_tokens_per_rank=8192
)
NODES = tuple(rank // 8 for rank in range(32))


def reason_for(shape: DeepEPShape, package: ModuleType) -> str | None:
    """Return why the shape is unsupported with 8 ranks on each host."""
    return why_shape_unsupported(shape, [rank // 8 for rank in range(shape.num_ranks)], package)


def test_the_newer_api_is_used() -> None:
    assert [offered_api(package) for package in (LEGACY, ELASTIC, stand_in(Buffer, ElasticBuffer))] == [
        "legacy",
        "elastic",
        "elastic",
    ]
    assert "no ElasticBuffer and no Buffer" in str(reason_for(SHAPE, stand_in()))


def test_an_api_that_the_user_chose() -> None:
    assert offered_api(stand_in(Buffer, ElasticBuffer), "legacy") == "legacy"
    assert offered_api(stand_in(Buffer, ElasticBuffer), "elastic") == "elastic"
    assert offered_api(LEGACY, "elastic") is None
    reason = str(reason_for(replace(SHAPE, api="elastic"), LEGACY))
    assert "no ElasticBuffer" in reason
    assert "no Buffer" not in reason
    # The limits of the legacy kernels hold.
    both = stand_in(Buffer, ElasticBuffer)
    assert reason_for(replace(SHAPE, top_k=12), both) is None
    assert "not 12" in str(reason_for(replace(SHAPE, top_k=12, api="legacy"), both))


@pytest.mark.parametrize(
    ("packages", "change", "mentioned"),
    [
        ([LEGACY, ELASTIC], dict(num_slots=(288,)), "one rank"),
        ([LEGACY, ELASTIC], dict(dtype=torch.float16), "torch.float16"),
        ([LEGACY, ELASTIC], dict(num_slots=(9, 8)), "17 experts"),
        ([LEGACY, ELASTIC], dict(hidden_size=7160), "7160"),
        ([LEGACY, ELASTIC], dict(hidden_size=2896, is_float8=True), "2896"),
        ([LEGACY], dict(hidden_size=2880, num_slots=(9,) * 8), "2880"),
        ([LEGACY], dict(top_k=12), "not 12"),
        ([LEGACY], dict(low_latency_tokens=512), "not 512"),
        ([LEGACY], dict(num_slots=(9,) * 6), "6 ranks"),
        ([LEGACY], dict(hidden_size=2880, low_latency_tokens=0), "2880"),
    ],
)
def test_unsupported_shapes(packages: list[ModuleType], change: dict[str, Any], mentioned: str) -> None:
    for package in packages:
        assert mentioned in str(reason_for(replace(SHAPE, **change), package))


@pytest.mark.parametrize(
    ("package", "change"),
    [
        (LEGACY, {}),
        (LEGACY, dict(top_k=12, low_latency_tokens=0)),
        (LEGACY, dict(hidden_size=2880, low_latency_tokens=0, num_slots=(4,) * 8)),  # on one host
        (LEGACY, dict(low_latency_tokens=511)),
        (LEGACY, dict(is_float8=True)),
        (ELASTIC, dict(hidden_size=2880, top_k=32)),
        (ELASTIC, dict(num_slots=(9,) * 6)),
    ],
)
def test_supported_shapes(package: ModuleType, change: dict[str, Any]) -> None:
    assert reason_for(replace(SHAPE, **change), package) is None


def test_legacy_ranks_must_share_hosts_in_eights() -> None:
    shape, four_on_each = replace(SHAPE, num_slots=(4,) * 16), [0] * 8 + [1] * 4 + [2] * 4
    assert "consecutive" in str(why_shape_unsupported(shape, four_on_each, LEGACY))
    assert why_shape_unsupported(shape, four_on_each, ELASTIC) is None
    assert why_shape_unsupported(shape, [0] * 16, LEGACY) is None


def test_queue_depth_limits_low_latency_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert reason_for(replace(SHAPE, low_latency_tokens=1023), LEGACY) is None
    assert "1024" in str(reason_for(replace(SHAPE, low_latency_tokens=1024), LEGACY))


def gpu(capability: tuple[int, int]) -> Any:
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_capability=lambda device: capability)


def test_machines() -> None:
    assert "cpu" in str(why_unsupported(SHAPE, CPU, NODES, ELASTIC))
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert "cuda:0" in str(why_unsupported(SHAPE, GPU, NODES, ELASTIC))
    with gpu((8, 0)):
        assert "8.0" in str(why_unsupported(SHAPE, GPU, NODES, ELASTIC))
    for capability in ((9, 0), (10, 0)):
        with gpu(capability):
            assert why_unsupported(SHAPE, GPU, NODES, ELASTIC) is None


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_missing_package() -> None:
    assert "deep_ep is not installed" in str(why_unsupported(SHAPE, CPU, NODES))


def test_broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    assert "a_library_that_is_missing" in str(why_unsupported(SHAPE, CPU, NODES))


def group_with(others: Sequence[int] = (), node_of_rank: Sequence[int] = NODES) -> Any:
    """Return rank 1 of a group whose other ranks contribute these values to every minimum, or their negatives."""
    calls: list[int] = []

    def all_reduce_minimum(own: int) -> int:
        calls.append(own)
        return min([own, *(value if len(calls) == 1 else -value for value in others)])

    return SimpleNamespace(rank=3, rank_in_group=1, node_of_rank=node_of_rank, all_reduce_minimum=all_reduce_minimum)


def test_all_ranks_must_use_the_same_api() -> None:
    """Other ranks found no package (0), one with the elastic API (1), or one with the legacy API (2)."""
    choose = functools.partial(choose_package, device=GPU)
    with gpu((9, 0)):
        assert choose(SHAPE, group_with([1]), deep_ep=ELASTIC) is ELASTIC
        assert choose(SHAPE, group_with([2]), deep_ep=LEGACY) is LEGACY
        for others, package in (([2], ELASTIC), ([1], LEGACY), ([0, 1], ELASTIC)):
            with pytest.raises(SettingsError, match="other"):
                choose(SHAPE, group_with(others), deep_ep=package)
        with pytest.raises(SettingsError, match=r"torch\.float16.*all_to_all"):
            choose(replace(SHAPE, dtype=torch.float16), group_with([1]), deep_ep=ELASTIC)


def test_fallback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    group, context = groups_of_one_rank().ep, cpu_context()
    with caplog.at_level(logging.INFO):
        assert open_deepep(SHAPE, group, context, is_required=False, is_deterministic=True) is None
    (message,) = caplog.messages
    assert "all_to_all" in message
    with pytest.raises(SettingsError, match="all_to_all"):
        open_deepep(SHAPE, group, context, is_required=True, is_deterministic=True)


class ProcessGroup(SimpleNamespace):
    """The methods of a process group that buffers call as they are opened."""

    def barrier(self) -> None: ...

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 32


def opened(package: ModuleType, shape: DeepEPShape, group: Any, **options: Any) -> Any:
    process_group = cast(Any, ProcessGroup())
    return open_communicator(package, shape, process_group, group, cpu_context(), **options)


@pytest.mark.parametrize("low_latency_tokens", [0, 128])
def test_sizes_of_the_legacy_buffer(low_latency_tokens: int) -> None:
    """They follow from the buffer's own hints for dispatch, combine and the low-latency kernels."""
    shape = replace(SHAPE, low_latency_tokens=low_latency_tokens, num_slots=(25,) * 32)
    communicator = opened(LEGACY, shape, group_with())
    largest = Config(5)  # of combine
    assert communicator.buffer.num_nvl_bytes == largest.get_nvl_buffer_size_hint(7168 * 2, 32)
    rdma = largest.get_rdma_buffer_size_hint(7168 * 2, 32)
    if low_latency_tokens:
        rdma = max(rdma, Buffer.get_low_latency_rdma_size_hint(128, 7168, 32, 25 * 32))
        assert communicator.buffer.num_qps_per_rank == 25  # a queue pair for each local expert
    assert communicator.buffer.num_rdma_bytes == rdma
    assert communicator.buffer.low_latency_mode == bool(low_latency_tokens)
    assert communicator.num_bytes == communicator.buffer.num_nvl_bytes + rdma
    assert communicator.buffer.explicitly_destroy


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_options_of_the_elastic_buffer(is_deterministic: bool) -> None:
    shape, one_host = replace(SHAPE, is_float8=True), group_with(node_of_rank=(0,) * 32)
    communicator = opened(ELASTIC, shape, one_host, is_deterministic=is_deterministic)
    assert communicator.buffer.made_for == (8192, 7168, 8, True)
    assert communicator.buffer.deterministic == is_deterministic
    assert communicator.num_bytes == communicator.buffer.num_bytes > 0
    # Only small steps without the sort run without waiting for the host.
    assert communicator.is_capturable((128, 3)) == (not is_deterministic)


class FirstBuffer(Buffer):
    """The first API as it was first published."""

    def dispatch(self, x: Any, *, topk_idx: Any, topk_weights: Any) -> Any: ...  # type: ignore[override]


FIRST = ModuleType("deep_ep")
FIRST.Buffer = FirstBuffer  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_num_seqs", [256, 512])
@pytest.mark.parametrize(
    ("package", "num_ranks", "change", "largest"),
    [
        (LEGACY, 8, {}, 512),
        (LEGACY, 8, dict(low_latency_tokens=0), 512),
        (LEGACY, 16, {}, 128),  # normal kernels between hosts wait
        (LEGACY, 16, dict(low_latency_tokens=511), 511),
        (FIRST, 8, {}, 128),
        (ELASTIC, 8, {}, 512),
        (ELASTIC, 8, dict(low_latency_tokens=0), 512),
        (ELASTIC, 16, {}, 512),
        (ELASTIC, 32, {}, 256),  # twice as many need room for two gigabytes
    ],
)
def test_sizes_of_graphs(
    package: ModuleType, num_ranks: int, change: dict[str, Any], largest: int, max_num_seqs: int
) -> None:
    """Decode steps of DeepSeek-V3 are graphs up to max_num_seqs where the kernels or the room allow it."""
    shape = replace(SHAPE, num_slots=(256 // num_ranks,) * num_ranks, **change)
    group = group_with(node_of_rank=tuple(rank // 8 for rank in range(num_ranks)))
    communicator = opened(package, shape, group, is_deterministic=False)
    sizes = graph_sizes(max_num_seqs, Mesh(tp=1, dp=num_ranks), communicator.is_capturable)
    assert max(sizes) == max(
        size for size in graph_sizes(max_num_seqs, Mesh(tp=1, dp=1), lambda _: True) if size <= largest
    )


def test_no_deterministic_order_between_hosts() -> None:
    """Published kernels refuse it."""
    assert not opened(ELASTIC, SHAPE, group_with(), is_deterministic=True).buffer.deterministic


class WithoutNvlink(ElasticBuffer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        raise AssertionError("No NVLink connection\n  between 0 and 1")


@pytest.mark.parametrize(("is_broken", "others"), [(True, [0]), (True, [1]), (False, [0])])
def test_buffer_that_cannot_be_opened(is_broken: bool, others: list[int]) -> None:
    """Either all ranks use a buffer or none."""
    package = stand_in(ElasticBuffer)
    if is_broken:
        package.ElasticBuffer = WithoutNvlink  # type: ignore[attr-defined]
    reason = "No NVLink connection between 0 and 1" if is_broken else "another rank"
    with pytest.raises(SettingsError, match=f"{reason}.*all_to_all"):
        opened(package, SHAPE, group_with(others))
    assert opened(ELASTIC, SHAPE, group_with([1])) is not None


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_float8(scale: float) -> None:
    """Each value is within 2^-4 of itself, or of the smallest step that the largest value of its block allows."""
    generator = torch.Generator().manual_seed(0)
    rows = (
        torch.randn(7, 384, generator=generator).exp() * torch.randn(7, 384, generator=generator) * scale
    ).bfloat16()
    values, scales = to_float8(rows)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == rows.shape
    assert scales.shape == (7, 3)
    back = plain_rows(received_rows((values, scales), torch.float32))
    largest = rows.float().view(7, 3, 128).abs().amax(dim=2).repeat_interleave(128, dim=1)
    assert ((back - rows).abs() <= rows.abs() * 2**-4 + largest / 448 * 2**-10).all()
    assert values.float().abs().view(7, 3, 128).amax(dim=2).eq(448).all()  # the whole range is used


@pytest.mark.parametrize("num_rows", [0, 2])
def test_float8_of_zeros(num_rows: int) -> None:
    values, scales = to_float8(torch.zeros(num_rows, 256, dtype=torch.bfloat16))
    back = plain_rows(received_rows((values, scales), torch.bfloat16))
    assert torch.equal(back, torch.zeros(num_rows, 256).bfloat16())
