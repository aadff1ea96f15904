"""When DeepEP carries tokens, and in which words it is said that it does not; float8 rows; sizes of buffers."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from deepep_stand_in import Buffer, Config, ElasticBuffer, FirstBuffer, stand_in
from model_context import cpu_context

from moeserve.distributed.groups import group_of_one
from moeserve.errors import SettingsError
from moeserve.moe.dispatch.deepep.communicator import DeepEPShape, from_float8, to_float8
from moeserve.moe.dispatch.deepep.factory import choose_package, open_communicator
from moeserve.moe.dispatch.deepep.support import import_deepep, offered_api, why_shape_unsupported, why_unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LEGACY, ELASTIC = stand_in(Buffer), stand_in(ElasticBuffer)
SHAPE = DeepEPShape(  # DeepSeek-V3 on 32 GPUs
    hidden_size=7168, top_k=8, dtype=torch.bfloat16, num_slots=(9,) * 32, max_tokens_per_rank=8192
)


NODES = tuple(rank // 8 for rank in range(32))


def refusal_of(shape: DeepEPShape, package: ModuleType) -> str | None:
    """With 8 ranks on each host."""
    return why_shape_unsupported(shape, [rank // 8 for rank in range(shape.num_ranks)], package)


class WithoutExpand(ElasticBuffer):
    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int) -> Any:  # type: ignore[override]
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("offered", "api"),
    [
        ([Buffer], "legacy"),
        ([FirstBuffer], "legacy"),
        ([ElasticBuffer], "elastic"),
        ([Buffer, ElasticBuffer], "elastic"),
        ([], None),
    ],
)
def test_what_a_package_offers(offered: list[type], api: str | None) -> None:
    """By what can be called; the newer one, if both are there."""
    package = stand_in(*offered)
    assert offered_api(package) == api
    assert (refusal_of(SHAPE, package) is None) == (api is not None)


def test_a_package_that_lacks_something() -> None:
    package = stand_in(Buffer)
    package.ElasticBuffer = WithoutExpand  # type: ignore[attr-defined]
    assert offered_api(package) == "legacy"
    del package.Buffer
    assert refusal_of(SHAPE, package) == (
        "this deep_ep has no ElasticBuffer.dispatch(async_with_compute_stream=), ElasticBuffer.dispatch(do_cpu_sync=), "
        "ElasticBuffer.dispatch(do_expand=), ElasticBuffer.dispatch(expert_alignment=), "
        "ElasticBuffer.dispatch(num_max_tokens_per_rank=) and no Buffer"
    )


@pytest.mark.parametrize("package", [LEGACY, ELASTIC], ids=["legacy", "elastic"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(num_slots=(288,)), "there is only one rank"),
        (dict(dtype=torch.float16), "it carries torch.bfloat16, and hidden states are torch.float16"),
        (dict(num_slots=(9, 8)), "17 experts with their copies cannot be divided by 2 ranks"),
        (dict(hidden_size=7160), "hidden size 7160 is not a multiple of 16"),
        (dict(hidden_size=2896, is_float8=True), "rows of 2896 values cannot be cut into blocks of 128"),
    ],
)
def test_shapes_for_neither(package: Any, change: dict[str, Any], words: str) -> None:
    assert words in str(refusal_of(replace(SHAPE, **change), package))


@pytest.mark.parametrize(
    ("package", "change", "words"),
    [
        (
            LEGACY,
            dict(hidden_size=2880, num_slots=(9,) * 8),
            "for hidden sizes 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, not 2880",
        ),
        (LEGACY, dict(top_k=12), "send a token to 11 experts at most, not 12"),
        (LEGACY, dict(low_latency_tokens=512), "carry 511 tokens of each rank at most, not 512"),
        (LEGACY, dict(num_slots=(9,) * 6), "no configuration for 6 ranks"),
        (LEGACY, dict(num_slots=(1025,) * 2), "1025 experts on a rank are more than its 1024"),
        (
            LEGACY,
            dict(hidden_size=2880, low_latency_tokens=0),
            "between hosts, hidden size 2880 is not a multiple of 256",
        ),
        (ELASTIC, dict(num_slots=(1,) * 1025), "1025 ranks are more than its 1024"),
        (ELASTIC, dict(num_slots=(129,) * 16), "2064 experts with their copies are more than its 2048"),
        (ELASTIC, dict(num_slots=(257,) * 4), "257 experts on a rank are more than its 256"),
        (ELASTIC, dict(top_k=33), "33 experts for a token are more than its 32"),
    ],
)
def test_shapes_for_one(package: Any, change: dict[str, Any], words: str) -> None:
    assert words in str(refusal_of(replace(SHAPE, **change), package))


@pytest.mark.parametrize(
    ("package", "change"),
    [
        (LEGACY, {}),
        (LEGACY, dict(top_k=12, low_latency_tokens=0)),
        (LEGACY, dict(hidden_size=2880, low_latency_tokens=0, num_slots=(4,) * 8)),  # on one host
        (LEGACY, dict(low_latency_tokens=511)),
        (LEGACY, dict(is_float8=True)),
        (ELASTIC, dict(hidden_size=2880, top_k=32, num_slots=(2,) * 1024)),
        (ELASTIC, dict(num_slots=(9,) * 6)),
    ],
)
def test_shapes_that_can_be(package: Any, change: dict[str, Any]) -> None:
    assert refusal_of(replace(SHAPE, **change), package) is None


def test_ranks_of_several_hosts() -> None:
    """The first interface counts 8 ranks as one host's; the second asks NCCL."""
    words = "require every 8 ranks on one host, and those from 8 on are on several"
    four_on_each = [0] * 8 + [1] * 4 + [2] * 4
    shape = replace(SHAPE, num_slots=(4,) * 16)
    assert words in str(why_shape_unsupported(shape, four_on_each, LEGACY))
    assert why_shape_unsupported(shape, four_on_each, ELASTIC) is None
    assert why_shape_unsupported(shape, [0] * 16, LEGACY) is None
    assert "from 0 on" in str(why_shape_unsupported(replace(SHAPE, num_slots=(4,) * 2), [0, 1], LEGACY))


def test_deeper_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert refusal_of(replace(SHAPE, low_latency_tokens=1023), LEGACY) is None
    assert "1023 tokens" in str(refusal_of(replace(SHAPE, low_latency_tokens=1024), LEGACY))


def test_ids_of_another_type() -> None:
    package = stand_in(ElasticBuffer)
    package.topk_idx_t = torch.int32  # type: ignore[attr-defined]
    assert "type torch.int32, not torch.int64" in str(refusal_of(SHAPE, package))


def test_machines() -> None:
    assert why_unsupported(SHAPE, CPU, NODES, ELASTIC) == "it runs on CUDA devices, and this rank's is cpu"
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert why_unsupported(SHAPE, GPU, NODES, ELASTIC) == "it runs on CUDA devices, and this rank's is cuda:0"
    with gpu((8, 0)):
        words = "its kernels need compute capability 9.0, and cuda:0 has 8.0"
        assert why_unsupported(SHAPE, GPU, NODES, ELASTIC) == words
    for capability in ((9, 0), (10, 0)):
        with gpu(capability):
            assert why_unsupported(SHAPE, GPU, NODES, ELASTIC) is None


def gpu(capability: tuple[int, int]) -> Any:
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_capability=lambda device: capability)


def test_a_package_that_is_not_there() -> None:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("it is installed here")
    refusal = why_unsupported(SHAPE, CPU, NODES)
    assert refusal is not None
    assert refusal.startswith("the package deep_ep is not installed (pip install sgl-deep-ep")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("assert False, 'Duplicate NCCL runtime'", "cannot be imported: AssertionError: Duplicate NCCL runtime"),
        ("import a_library_that_is_missing", "cannot be imported: ModuleNotFoundError: No module named 'a_library"),
    ],
)
def test_a_package_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: str
) -> None:
    """Its own checks of libraries and drivers raise what they like."""
    (tmp_path / "deep_ep.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    assert words in str(why_unsupported(SHAPE, CPU, NODES))


def test_what_is_set_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its default, torch would keep what its kernels use until the end of a capture."""
    (tmp_path / "deep_ep.py").write_text("import os\nseen = os.environ.get('EP_AVOID_RECORD_STREAM')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", "")  # so that it is taken back after the test
    monkeypatch.delenv("EP_AVOID_RECORD_STREAM")
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    assert import_deepep().seen == "1"
    monkeypatch.delitem(sys.modules, "deep_ep")
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", "0")
    assert import_deepep().seen == "0"  # what somebody has said stays
    monkeypatch.delitem(sys.modules, "deep_ep")


def test_choosing() -> None:
    """By name: an error. Otherwise all_to_all, and the log says why. Ranks agree."""
    with gpu((9, 0)):
        assert choose_package(SHAPE, agreeing([1]), GPU, is_required=True, deep_ep=ELASTIC) is ELASTIC
        assert choose_package(SHAPE, agreeing([2]), GPU, is_required=True, deep_ep=LEGACY) is LEGACY
        with pytest.raises(SettingsError, match="packages on other ranks offer another API"):
            choose_package(SHAPE, agreeing([2]), GPU, is_required=True, deep_ep=ELASTIC)
        with pytest.raises(SettingsError, match="packages on other ranks offer another API"):
            choose_package(SHAPE, agreeing([1]), GPU, is_required=True, deep_ep=LEGACY)
        with pytest.raises(SettingsError, match="dispatcher='deepep' cannot be used: another rank cannot use it"):
            choose_package(SHAPE, agreeing([0, 1]), GPU, is_required=True, deep_ep=ELASTIC)
        with pytest.raises(SettingsError, match=r"33 experts for a token are more than its 32\. Use 'all_to_all'"):
            choose_package(replace(SHAPE, top_k=33), agreeing([1]), GPU, is_required=True, deep_ep=ELASTIC)


def agreeing(others: Sequence[int]) -> Any:
    """A group whose other ranks found no package (0), one with an elastic buffer (1) or with the first one (2)."""

    asked: list[int] = []

    def all_reduce_minimum(own: int) -> int:
        asked.append(own)
        return min(own, *(found if len(asked) == 1 else -found for found in others))

    return SimpleNamespace(rank=3, node_of_rank=NODES, all_reduce_minimum=all_reduce_minimum)


def test_falling_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_package(SHAPE, group_of_one("ep"), CPU, is_required=False, deep_ep=LEGACY) is None
    assert caplog.messages == [
        "rank 0: DeepEP is not used: it runs on CUDA devices, and this rank's is cpu. Using all_to_all"
    ]


class OfGroup(SimpleNamespace):
    """A process group as far as buffers ask it before they communicate."""

    def barrier(self) -> None: ...

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 32


def ep(others: Sequence[int] = (), node_of_rank: Sequence[int] = (0,) * 32) -> Any:
    """The group, of which other ranks have opened a buffer (1) or have not (0)."""

    def all_reduce_minimum(own: int) -> int:
        return min(own, *others) if others else own

    return SimpleNamespace(rank=3, rank_in_group=1, node_of_rank=node_of_rank, all_reduce_minimum=all_reduce_minimum)


def opened(package: ModuleType, shape: DeepEPShape, group: Any, **options: Any) -> Any:
    return open_communicator(
        package, shape, cast(Any, OfGroup()), group, cpu_context(), **(dict(is_required=True) | options)
    )


@pytest.mark.parametrize("buffer", [Buffer, FirstBuffer])
@pytest.mark.parametrize("low_latency_tokens", [0, 128])
def test_sizes_of_the_first_buffer(buffer: type[Buffer], low_latency_tokens: int) -> None:
    """By its own hints: of dispatch and combine, and of the low-latency kernels."""
    shape = replace(SHAPE, low_latency_tokens=low_latency_tokens, num_slots=(25,) * 32)
    communicator = opened(stand_in(buffer), shape, ep())
    most = Config(5)  # that of combine
    assert communicator.buffer.num_nvl_bytes == most.get_nvl_buffer_size_hint(7168 * 2, 32)
    rdma = most.get_rdma_buffer_size_hint(7168 * 2, 32)
    if low_latency_tokens:
        rdma = max(rdma, Buffer.get_low_latency_rdma_size_hint(128, 7168, 32, 25 * 32))
        assert communicator.buffer.num_qps_per_rank == 25  # a queue pair for each local expert
    assert communicator.buffer.num_rdma_bytes == rdma
    assert communicator.buffer.low_latency_mode == bool(low_latency_tokens)
    assert communicator.num_bytes == communicator.buffer.num_nvl_bytes + rdma
    assert communicator.buffer.explicitly_destroy == (buffer is Buffer)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_what_the_elastic_buffer_is_made_for(is_deterministic: bool) -> None:
    shape = replace(SHAPE, is_float8=True)
    communicator = opened(ELASTIC, shape, ep(), is_deterministic=is_deterministic)
    assert communicator.buffer.made_for == (8192, 7168, 8, True)
    assert communicator.buffer.deterministic == is_deterministic
    assert communicator.num_bytes == communicator.buffer.num_bytes > 0
    # only without the sort that asks the host, and only small steps, which do not ask it either
    assert communicator.is_capturable((128, 3)) == (not is_deterministic)
    assert not communicator.is_capturable((129, 3))


def test_an_order_of_rows_that_repeats_is_not_asked_for_between_hosts() -> None:
    """Published kernels for several hosts refuse it."""
    assert not opened(ELASTIC, SHAPE, ep(node_of_rank=NODES), is_deterministic=True).buffer.deterministic


class WithoutNvlink(ElasticBuffer):
    @functools.wraps(ElasticBuffer.__init__)  # by which it is known
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        raise AssertionError("No NVLink connection\n  between 0 and 1")


UNOPENED = stand_in()
UNOPENED.ElasticBuffer = WithoutNvlink  # type: ignore[attr-defined]
REASON = "its buffer cannot be opened: AssertionError: No NVLink connection between 0 and 1"


@pytest.mark.parametrize(
    ("package", "others", "reason"),
    [(UNOPENED, [0], REASON), (UNOPENED, [1], REASON), (ELASTIC, [0], "another rank cannot use it; see its log")],
)
def test_a_buffer_that_cannot_be_opened(
    package: ModuleType, others: list[int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its constructor is the first to see what connections there are: all ranks use it, or none does."""
    with pytest.raises(SettingsError, match=f"dispatcher='deepep' cannot be used: {reason}. Use 'all_to_all'"):
        opened(package, SHAPE, ep(others))
    with caplog.at_level(logging.INFO):
        assert opened(package, SHAPE, ep(others), is_required=False) is None
    assert caplog.messages == [f"rank 3: DeepEP is not used: {reason}. Using all_to_all"]
    assert opened(ELASTIC, SHAPE, ep([1])) is not None


@pytest.mark.parametrize(
    ("limit", "tokens_per_rank", "is_low_latency"),
    [(8, (8, 0), True), (8, (0, 9), False), (8, (0, 0), True), (0, (0, 0), False), (0, (1, 1), False)],
)
def test_which_steps_are_small(limit: int, tokens_per_rank: tuple[int, ...], is_low_latency: bool) -> None:
    """All ranks' tokens count, which all of them know."""
    assert replace(SHAPE, low_latency_tokens=limit).is_low_latency(tokens_per_rank) == is_low_latency


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_float8(scale: float) -> None:
    """Within 2^-4 of each value, or of the least steps that the largest value of its block leaves."""
    generator = torch.Generator().manual_seed(0)
    rows = (
        torch.randn(7, 384, generator=generator).exp() * torch.randn(7, 384, generator=generator) * scale
    ).bfloat16()
    values, scales = to_float8(rows)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == rows.shape
    assert scales.shape == (7, 3)
    back = from_float8((values, scales), torch.float32)
    largest = rows.float().view(7, 3, 128).abs().amax(dim=2).repeat_interleave(128, dim=1)
    assert ((back - rows).abs() <= rows.abs() * 2**-4 + largest / 448 * 2**-10).all()
    assert values.float().abs().view(7, 3, 128).amax(dim=2).eq(448).all()  # all of its range is used
    scales_as_columns = scales.t().contiguous().t()  # as those of slots lie in memory
    in_slots = from_float8((values[None], scales_as_columns[None]), torch.float32)
    assert torch.equal(in_slots, back[None])


def test_float8_of_nothing() -> None:
    values, scales = to_float8(torch.zeros(2, 256, dtype=torch.bfloat16))
    assert not from_float8((values, scales), torch.bfloat16).any()
    values, scales = to_float8(torch.zeros(0, 256, dtype=torch.bfloat16))
    assert from_float8((values, scales), torch.bfloat16).shape == (0, 256)
    assert scales.shape == (0, 2)
