"""A stand-in for the package deep_ep, after its published contract, on CPU tensors and gloo.

Names, shapes, dtypes and errors follow https://github.com/deepseek-ai/DeepEP (deep_ep/buffer.py of 1.x;
deep_ep/buffers/legacy.py, deep_ep/buffers/elastic.py, csrc/elastic/buffer.hpp of 2.x and its documents), with only the
arguments that moeserve passes. Whatever is
not promised is made as bad as possible: unwritten memory holds NaN, rows of an expert have any order, results arrive
only at the wait, and inputs must not change before it. Ranks that call different kernels, which would deadlock, get an
error.
"""

from __future__ import annotations

import io
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
BLOCK = 128
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
QUEUE_DEPTH = 1024

Rows = Tensor | tuple[Tensor, Tensor]  # bfloat16, or float8 with scales


class Refused(RuntimeError):
    """A failed assertion of the package."""


def need(condition: Any, what: str) -> None:
    if not condition:
        raise Refused(what)


@dataclass
class Route:
    """The sources and destinations of the rows of one dispatch."""

    num_tokens: int
    top_k: int
    num_experts: int
    topk_idx: Tensor
    sources: list[tuple[int, int]] = field(default_factory=list)  # of received tokens: rank, token
    places: list[tuple[int, int, int, int]] = field(default_factory=list)  # of pairs: rank, token, k, where it went
    is_waited: bool = False
    is_combined: bool = False


class EventOverlap:
    """An event whose wait delivers the results, and checks that no input has changed."""

    def __init__(self, timeline: list[str], name: str, read: Sequence[Tensor], arrive: Callable[[], None]) -> None:
        self.timeline = timeline
        self.name = name
        self.read = [(tensor, tensor.clone()) for tensor in read]
        self.arrive: Callable[[], None] | None = arrive
        timeline.append(f"{name} issued")

    def current_stream_wait(self) -> None:
        need(all(same(tensor, copy) for tensor, copy in self.read), f"{self.name}: an input changed before the wait")
        if self.arrive is not None:
            self.arrive()
            self.arrive = None
        self.timeline.append(f"{self.name} waited")


class Config:
    """Buffer sizes, all different so that a mix-up shows."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.scale * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else 2 * self.scale * hidden_bytes * num_ranks


class Kernels:
    """The common part of both buffers: the group, and kernels that all ranks launch together."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.timeline: list[str] = []
        self.chance = random.Random(self.rank)
        self.is_destroyed = False
        group.barrier()  # on a device of the group's own choice

    def launch(self, kernel: str, sizes: tuple[Any, ...], value: Any) -> list[Any]:
        """Exchange values in a kernel that all ranks must launch with the same sizes."""
        need(not self.is_destroyed, "the buffer was destroyed")
        values = exchange(self.group, (kernel, sizes, value))
        for other, (its_kernel, its_sizes, _) in enumerate(values):
            need(
                (its_kernel, its_sizes) == (kernel, sizes),
                f"{kernel}{sizes} on rank {self.rank} deadlocks with {its_kernel}{its_sizes} on rank {other}",
            )
        return [its_value for _, _, its_value in values]

    def check_rows(self, x: Rows, num_tokens: int) -> int:
        """Check rows and return their width."""
        values = x[0] if isinstance(x, tuple) else x
        need(values.dim() == 2 and values.is_contiguous(), "x must be [num_tokens, hidden] and contiguous")
        need(len(values) == num_tokens, f"{len(values)} rows of x and {num_tokens} of topk_idx")
        hidden = values.shape[1]
        need(hidden * values.element_size() % 16 == 0, "the row size is not a multiple of 16 bytes")
        if isinstance(x, tuple):
            need(values.dtype == FLOAT8, f"x is {values.dtype}, not {FLOAT8}")
            need(x[1].dtype == torch.float32, f"scales are {x[1].dtype}, not torch.float32")
            need(x[1].shape == (num_tokens, hidden // BLOCK), f"scales are {tuple(x[1].shape)}")
        else:
            need(values.dtype == torch.bfloat16, f"x is {values.dtype}, not torch.bfloat16")
        return hidden

    def check_topk(self, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int) -> None:
        need(topk_idx.dtype == torch.int64, f"topk_idx is {topk_idx.dtype}, not torch.int64")
        need(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx must be [num_tokens, num_topk], contiguous")
        need(num_experts % self.num_ranks == 0, f"{num_experts} experts on {self.num_ranks} ranks")
        need(((topk_idx >= -1) & (topk_idx < num_experts)).all(), "topk_idx names no expert")
        for chosen in topk_idx.tolist():
            real = [expert for expert in chosen if expert >= 0]
            need(len(set(real)) == len(real), f"a token has an expert twice: {chosen}")
        if topk_weights is not None:
            need(topk_weights.dtype == torch.float32, f"topk_weights is {topk_weights.dtype}, not torch.float32")
            need(
                topk_weights.shape == topk_idx.shape and topk_weights.is_contiguous(), "topk_weights has another shape"
            )

    def own_experts(self, num_experts: int) -> range:
        num_local = num_experts // self.num_ranks
        return range(self.rank * num_local, (self.rank + 1) * num_local)

    def destroy(self) -> None:
        self.launch("destroy", (), None)
        self.is_destroyed = True


class Buffer(Kernels):
    """The first API."""

    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        *,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group)
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.num_qps_per_rank = num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.is_fresh = True  # no normal kernel has run
        self.cleaned_for: tuple[int, int, int] | None = None  # since the last normal kernel
        self.num_cleaned = 0
        self.alive: list[weakref.ref[Tensor]] = []

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(5)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * 4 * num_experts + num_ranks

    def destroy(self) -> None:
        need(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        super().destroy()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        self.check_topk(topk_idx, None, num_experts)
        return *self.layout(topk_idx, num_experts), None

    def layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor]:
        rank_of_pair = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.num_ranks))
        is_in_rank = torch.stack([(rank_of_pair == rank).any(dim=1) for rank in range(self.num_ranks)], dim=1)
        of_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_in_rank.sum(dim=0).int(), None, of_expert.int(), is_in_rank

    def dispatch(
        self,
        x: Rows,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        async_finish: bool,
    ) -> tuple[Rows, Tensor, Tensor, list[int], tuple[Any, ...], EventOverlap]:
        num_experts, top_k = len(num_tokens_per_expert), topk_idx.shape[1]
        self.check_topk(topk_idx, topk_weights, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        given = (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank)
        for got, expected in zip(given, self.layout(topk_idx, num_experts), strict=True):
            need(got is expected is None or same(got, expected), "the layout is not that of topk_idx")
        need(self.num_nvl_bytes >= 3 * hidden * 2 * self.num_ranks, "the NVLink buffer is too small for dispatch")
        self.cleaned_for, self.is_fresh = None, False
        values = self.launch(
            "dispatch", (num_experts, top_k, hidden, isinstance(x, tuple)), (copied(x), topk_idx, topk_weights)
        )
        own = self.own_experts(num_experts)
        route = Route(len(topk_idx), top_k, num_experts, topk_idx)
        rows, ids, weights = [], [], []
        for source, (its_rows, its_ids, its_weights) in enumerate(values):
            for token, chosen in enumerate(its_ids.tolist()):
                if any(expert in own for expert in chosen):
                    route.sources.append((source, token))
                    rows.append(tuple(part[token] for part in its_rows))
                    ids.append([expert - own.start if expert in own else -1 for expert in chosen])
                    weights.append(
                        [w if e in own else 0.0 for w, e in zip(its_weights[token].tolist(), chosen, strict=True)]
                    )
        num_received = len(route.sources)
        received = garbage(x, num_received)
        recv_topk_idx = torch.full((num_received, top_k), 2**40)
        recv_topk_weights = torch.full((num_received, top_k), torch.nan)

        def arrive() -> None:
            fill(received, range(num_received), rows)
            recv_topk_idx.copy_(torch.tensor(ids, dtype=torch.int64).view(-1, top_k))
            recv_topk_weights.copy_(torch.tensor(weights).view(-1, top_k))
            route.is_waited = True

        counts = [sum(local in chosen for chosen in ids) for local in range(len(own))]
        self.timeline.append("host waited")  # for the counts
        assert async_finish
        event = EventOverlap(self.timeline, "dispatch", [*tensors(x), topk_idx, topk_weights], arrive)
        return received, recv_topk_idx, recv_topk_weights, counts, (route,), event

    def combine(self, x: Tensor, handle: tuple[Any, ...], *, async_finish: bool) -> tuple[Tensor, None, EventOverlap]:
        need(len(handle) == 1, "not a handle of dispatch")
        route: Route = handle[0]
        hidden = self.check_rows(x, len(route.sources))
        check_route(route)
        need(self.num_nvl_bytes >= 5 * hidden * 2 * self.num_ranks, "the NVLink buffer is too small for combine")
        self.cleaned_for, self.is_fresh = None, False
        values = self.launch("combine", (route.num_experts, route.top_k, hidden), (x.clone(), route.sources))
        combined = torch.full((route.num_tokens, hidden), torch.nan, dtype=torch.bfloat16)

        def arrive() -> None:
            total = torch.zeros(route.num_tokens, hidden)
            for rows, sources in values:
                for row, (source, token) in zip(rows, sources, strict=True):
                    if source == self.rank:
                        total[token] += row.float()
            combined.copy_(total)

        assert async_finish
        return combined, None, EventOverlap(self.timeline, "combine", [x], arrive)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self.cleaned_for = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self.launch("clean", self.cleaned_for, None)
        self.num_cleaned += 1
        self.timeline.append("cleaned")

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        async_finish: bool,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, None]:
        need(isinstance(x, Tensor), "x is a tensor: these kernels cast it themselves")
        self.check_topk(topk_idx, None, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        limit, top_k = num_max_dispatch_tokens_per_rank, topk_idx.shape[1]
        self.check_low_latency(limit, hidden, num_experts, top_k)
        need(len(x) <= limit, f"{len(x)} tokens, and the limit is {limit}")
        values = self.launch(
            "low_latency_dispatch", (limit, num_experts, top_k, hidden, use_fp8), (x.clone(), topk_idx)
        )
        own = self.own_experts(num_experts)
        route = Route(len(topk_idx), top_k, num_experts, topk_idx)
        rows: dict[tuple[int, int], Tensor] = {}
        counts = []
        for local, expert in enumerate(own):
            pairs = [
                (source, token, chosen.index(expert))
                for source, (_, its_ids) in enumerate(values)
                for token, chosen in enumerate(its_ids.tolist())
                if expert in chosen
            ]
            self.chance.shuffle(pairs)
            counts.append(len(pairs))
            for slot, (source, token, k) in enumerate(pairs):
                route.places.append((source, token, k, local * limit * self.num_ranks + slot))
                rows[local, slot] = values[source][0][token]
        slots = torch.full((len(own), limit * self.num_ranks, hidden), torch.nan, dtype=torch.bfloat16)
        received: Rows = slots
        if use_fp8:
            scales = torch.full((len(own), hidden // BLOCK, slots.shape[1]), torch.nan).transpose(1, 2)
            received = (slots.to(FLOAT8), scales)
        recv_count = torch.full((len(own),), -(10**6), dtype=torch.int32)

        def arrive() -> None:
            for (local, slot), row in rows.items():
                if isinstance(received, tuple):
                    received[0][local, slot], received[1][local, slot] = quantised(row)
                else:
                    received[local, slot] = row
            recv_count.copy_(torch.tensor(counts))
            route.is_waited = True

        assert async_finish
        self.remember_result(tensors(received)[0])
        event = EventOverlap(self.timeline, "low_latency_dispatch", [x, topk_idx], arrive)
        return received, recv_count, (route, limit, num_experts), event, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...], *, async_finish: bool
    ) -> tuple[Tensor, EventOverlap, None]:
        need(len(handle) == 3, "not a handle of these kernels")
        route, limit, num_experts = handle
        need(x.dim() == 3 and x.dtype == torch.bfloat16 and x.is_contiguous(), "x must be bfloat16 and contiguous")
        num_local, hidden = num_experts // self.num_ranks, x.shape[2]
        need(x.shape[:2] == (num_local, limit * self.num_ranks), f"x is {tuple(x.shape)}")
        self.check_topk(topk_idx, topk_weights, num_experts)
        self.check_low_latency(limit, hidden, num_experts, route.top_k)
        need(same(topk_idx, route.topk_idx), "these are not the experts that were dispatched to")
        check_route(route)
        sent = x.flatten(0, 1)[[place for *_, place in route.places]], [pair for *pair, _ in route.places]
        values = self.launch("low_latency_combine", (limit, num_experts, route.top_k, hidden), sent)
        combined = torch.full((route.num_tokens, hidden), torch.nan, dtype=torch.bfloat16)

        def arrive() -> None:
            outputs = {
                (token, k): row
                for rows, pairs in values
                for row, (source, token, k) in zip(rows, pairs, strict=True)
                if source == self.rank
            }
            total = torch.zeros(route.num_tokens, hidden)
            for (token, k), row in sorted(outputs.items(), key=lambda item: item[0]):
                total[token] += row.float() * topk_weights[token, k]
            combined.copy_(total)

        assert async_finish
        self.remember_result(combined)
        return combined, EventOverlap(self.timeline, "low_latency_combine", [x, topk_idx, topk_weights], arrive), None

    def check_low_latency(self, limit: int, hidden: int, num_experts: int, top_k: int) -> None:
        need(self.low_latency_mode, "the buffer was not made for low latency")
        need(hidden in HIDDEN_SIZES, f"Unsupported hidden: {hidden}")
        need(top_k <= 11, f"top-k of {top_k}")
        need((limit + 1) * 2 <= QUEUE_DEPTH, f"{limit} tokens are too many for the queues")
        hint = self.get_low_latency_rdma_size_hint(limit, hidden, self.num_ranks, num_experts)
        need(hint <= self.num_rdma_bytes, f"the RDMA buffer of {self.num_rdma_bytes} bytes needs {hint}")
        need(self.num_qps_per_rank >= num_experts // self.num_ranks, "fewer queue pairs than local experts")
        need(self.is_fresh or self.cleaned_for == (limit, hidden, num_experts), "the buffer is dirty")

    def remember_result(self, result: Tensor) -> None:
        self.alive = [known for known in self.alive if known() is not None]
        need(len(self.alive) < 2, "more than two results of low-latency kernels are held")
        self.alive.append(weakref.ref(result))


@dataclass
class EPHandle:
    """The published field that a caller may read; the rest is in the route."""

    psum_num_recv_tokens_per_expert: Tensor
    num_allocated_rows: int
    route: Route


class ElasticBuffer(Kernels):
    """The second API, with expanded rows."""

    def __init__(
        self,
        group: Any,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        deterministic: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group)
        self.made_for = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = 2**21 * (1 + num_max_tokens_per_rank * hidden // 2**18)
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy

    def destroy(self) -> None:
        need(self.explicitly_destroy, "explicitly_destroy was not set")
        super().destroy()

    def dispatch(
        self,
        x: Rows,
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        async_with_compute_stream: bool,
        do_cpu_sync: bool,
        do_expand: bool,
    ) -> tuple[Rows, None, Tensor, EPHandle, EventOverlap]:
        assert do_expand
        assert expert_alignment == 1
        limit, is_exact = num_max_tokens_per_rank, do_cpu_sync
        self.check_topk(topk_idx, topk_weights, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        top_k, is_float8 = topk_idx.shape[1], isinstance(x, tuple)
        need(hidden % (32 if is_float8 else 16) == 0, "the row size is not a multiple of 32 bytes")
        need(len(topk_idx) >= 1, "no tokens are not supported")
        need(len(topk_idx) <= limit, f"{len(topk_idx)} tokens, and the limit is {limit}")
        needed, made_for = (limit, hidden, top_k, not is_float8), (*self.made_for[:3], not self.made_for[3])
        need(all(a <= b for a, b in zip(needed, made_for, strict=True)), f"{needed} is more than {made_for}")
        values = self.launch(
            "dispatch", (num_experts, top_k, hidden, limit, is_exact), (copied(x), topk_idx, topk_weights)
        )
        own = self.own_experts(num_experts)
        route = Route(len(topk_idx), top_k, num_experts, topk_idx.clone())
        rows, weights, counts = [], [], []
        for expert in own:
            pairs = [
                (source, token, chosen.index(expert))
                for source, (_, its_ids, _) in enumerate(values)
                for token, chosen in enumerate(its_ids.tolist())
                if expert in chosen
            ]
            if not self.deterministic:
                self.chance.shuffle(pairs)
            counts.append(len(pairs))
            for source, token, k in pairs:
                route.places.append((source, token, k, len(rows)))
                rows.append(tuple(part[token] for part in values[source][0]))
                weights.append(float(values[source][2][token, k]))
        if is_exact:
            self.timeline.append("host waited")  # for the counts
        num_rows = len(rows) if is_exact else self.num_ranks * limit * min(top_k, len(own))
        received = garbage(x, num_rows)
        recv_topk_weights = torch.full((num_rows,), torch.nan)
        ends = torch.full((len(own),), -(10**6), dtype=torch.int32)

        def arrive() -> None:
            fill(received, range(len(rows)), rows)
            recv_topk_weights[: len(rows)] = torch.tensor(weights)
            ends.copy_(torch.tensor(counts).cumsum(0))
            route.is_waited = True

        assert async_with_compute_stream
        handle = EPHandle(ends, num_rows, route)
        event = EventOverlap(self.timeline, "dispatch", [*tensors(x), topk_idx, topk_weights], arrive)
        return received, None, recv_topk_weights, handle, event

    def combine(
        self, x: Tensor, handle: EPHandle, *, async_with_compute_stream: bool
    ) -> tuple[Tensor, None, EventOverlap]:
        need(isinstance(handle, EPHandle), "not a handle of dispatch")
        route = handle.route
        hidden = self.check_rows(x, handle.num_allocated_rows)
        check_route(route)
        on_rank: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for source, token, k, place in route.places:
            on_rank.setdefault((source, token), []).append((k, x[place]))
        of_token = [[row for _, row in sorted(rows, key=lambda pair: pair[0])] for rows in on_rank.values()]
        sent = [*map(added, of_token)], [*on_rank]
        values = self.launch("combine", (route.num_experts, route.top_k, hidden), sent)
        combined = torch.full((route.num_tokens, hidden), torch.nan, dtype=torch.bfloat16)

        def arrive() -> None:
            for token in range(route.num_tokens):
                parts = [
                    row
                    for rows, tokens in values
                    for row, of_token in zip(rows, tokens, strict=True)
                    if of_token == (self.rank, token)
                ]
                combined[token] = added([torch.zeros(hidden, dtype=torch.bfloat16), *parts])

        assert async_with_compute_stream
        return combined, None, EventOverlap(self.timeline, "combine", [x], arrive)


def stand_in(*offers: type) -> ModuleType:
    """Return the package with these classes."""
    module = ModuleType("deep_ep")
    for offered in offers:
        setattr(module, offered.__name__, offered)
    return module


def check_route(route: Route) -> None:
    """Check that a dispatch is combined once, after its wait."""
    need(route.is_waited, "combine of a dispatch that was not waited for")
    need(not route.is_combined, "combined twice")
    route.is_combined = True


def added(rows: list[Tensor]) -> Tensor:
    """Add rows in float32 and round once."""
    total = torch.zeros(rows[0].shape)
    for row in rows:
        total += row.float()
    return total.to(torch.bfloat16)


def quantised(row: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row in float8 and the scales of its blocks."""
    blocks = row.float().view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1).clamp(1e-4) / 448
    return (blocks / scales[:, None]).to(FLOAT8).flatten(), scales


def tensors(x: Rows) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def copied(x: Rows) -> tuple[Tensor, ...]:
    return tuple(part.clone() for part in tensors(x))


def garbage(like: Rows, num_rows: int) -> Rows:
    """Return unwritten rows."""

    def of_one(x: Tensor) -> Tensor:
        return torch.full((num_rows, x.shape[1]), torch.nan).to(x.dtype)

    return (of_one(like[0]), of_one(like[1])) if isinstance(like, tuple) else of_one(like)


def fill(x: Rows, places: Sequence[int], rows: list[tuple[Tensor, ...]]) -> None:
    for place, row in zip(places, rows, strict=True):
        for part, value in zip(tensors(x), row, strict=True):
            part[place] = value


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return true if two tensors are equal bit by bit."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def exchange(group: Any, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    written = io.BytesIO()
    torch.save(value, written)
    own = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(own)])]).wait()
    most = max(int(size) for size in sizes)
    gathered = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
    group.allgather([gathered], [torch.cat([own, own.new_zeros(most - len(own))])]).wait()
    parts = [each[: int(size)] for each, size in zip(gathered, sizes, strict=True)]
    return [torch.load(io.BytesIO(part.numpy().tobytes())) for part in parts]
