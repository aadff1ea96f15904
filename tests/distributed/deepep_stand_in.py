"""A stand-in for the package deep_ep, after its published contract, on CPU tensors and gloo.

Names, shapes, dtypes and limits follow https://github.com/deepseek-ai/DeepEP (deep_ep/buffer.py of 1.x;
deep_ep/buffers/legacy.py, deep_ep/buffers/elastic.py, csrc/elastic/buffer.hpp of 2.x and its documents), with only the
arguments that moeserve passes. Whatever is not promised is made as bad as possible: unwritten memory holds NaN, rows of
an expert have any order, results arrive only at the wait, and inputs must not change before it. Ranks that call
different kernels, which would deadlock, get an error. The two APIs share their ranks and checks, so
they are in one file.
"""

from __future__ import annotations

import io
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
Pair = tuple[int, int, int]  # source rank, token, k


@dataclass
class Route:
    """A dispatch: the choices of this rank's tokens, and the pairs whose rows it received, in their order."""

    topk_idx: Tensor
    num_experts: int
    pairs: list[Pair]
    rows_of_pairs: list[int]  # of normal kernels: all rows, those without a pair at the end
    is_waited: bool = False
    is_combined: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.topk_idx)

    def begin_combine(self) -> None:
        assert self.is_waited, "combine of a dispatch that was not waited for"
        assert not self.is_combined, "combined twice"
        self.is_combined = True


class EventOverlap:
    """An event whose wait delivers the results, and checks that no input has changed."""

    def __init__(self, timeline: list[str], name: str, read: Sequence[Tensor], arrive: Callable[[], None]) -> None:
        self.timeline = timeline
        self.name = name
        self.read = [(tensor, tensor.clone()) for tensor in read]
        self.arrive: Callable[[], None] | None = arrive
        timeline.append(f"{name} issued")

    def current_stream_wait(self) -> None:
        assert all(same(tensor, copy) for tensor, copy in self.read), f"{self.name}: an input changed before the wait"
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

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.timeline: list[str] = []
        self.chance: random.Random | None = random.Random(self.rank)  # None: rows of an expert keep their order
        self.explicitly_destroy = explicitly_destroy
        self.is_destroyed = False
        group.barrier()  # on a device of the group's own choice

    def launch(self, kernel: str, sizes: tuple[Any, ...], value: Any) -> list[Any]:
        """Exchange values in a kernel that all ranks must launch with the same sizes."""
        assert not self.is_destroyed
        values = exchange(self.group, (kernel, sizes, value))
        assert all(each[:2] == (kernel, sizes) for each in values), "a deadlock: " + str([v[:2] for v in values])
        return [its_value for _, _, its_value in values]

    def event(self, name: str, read: Sequence[Tensor], arrive: Callable[[], None]) -> EventOverlap:
        return EventOverlap(self.timeline, name, read, arrive)

    def check_rows(self, x: Rows, num_tokens: int) -> int:
        """Check rows and return their width."""
        values = tensors(x)[0]
        hidden = values.shape[-1]
        assert values.shape == (num_tokens, hidden)
        assert values.is_contiguous()
        assert hidden * values.element_size() % 16 == 0
        if isinstance(x, tuple):
            assert (values.dtype, x[1].dtype) == (FLOAT8, torch.float32)
            assert x[1].shape == (num_tokens, hidden // BLOCK)
        else:
            assert values.dtype == torch.bfloat16
        return hidden

    def check_topk(self, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int) -> None:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.num_ranks == 0
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        for chosen in topk_idx.tolist():
            real = [expert for expert in chosen if expert >= 0]
            assert len(set(real)) == len(real), "a token has an expert twice"
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.shape == topk_idx.shape
            assert topk_weights.is_contiguous()

    def own_experts(self, num_experts: int) -> range:
        num_local = num_experts // self.num_ranks
        return range(self.rank * num_local, (self.rank + 1) * num_local)

    def pairs_of(self, expert: int, choices: Sequence[Tensor]) -> list[Pair]:
        """Return the pairs of an expert among the choices of all ranks."""
        pairs = [
            (source, token, chosen.index(expert))
            for source, its_ids in enumerate(choices)
            for token, chosen in enumerate(its_ids.tolist())
            if expert in chosen
        ]
        if self.chance is not None:
            self.chance.shuffle(pairs)
        return pairs

    def returned(self, kernel: str, sizes: tuple[Any, ...], sent: Iterable[tuple[Pair, Tensor]]) -> list[Any]:
        """Send rows back to the ranks of their tokens. Return (token, k, row) of those that come to this rank."""
        values = self.launch(kernel, sizes, [(pair, row.clone()) for pair, row in sent])
        return [(token, k, row) for rows in values for (source, token, k), row in rows if source == self.rank]

    def destroy(self) -> None:
        assert self.explicitly_destroy
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
        super().__init__(group, explicitly_destroy)
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.num_qps_per_rank = num_qps_per_rank
        self.is_fresh = True  # no normal kernel has run
        self.cleaned_for: tuple[int, int, int] | None = None  # since the last normal kernel
        self.num_cleaned = 0
        self.alive: list[weakref.ref[Tensor]] = []

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS
        return Config(3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS
        return Config(5)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * 4 * num_experts + num_ranks

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        self.check_topk(topk_idx, None, num_experts)
        rank_of_pair = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.num_ranks))
        is_in_rank = torch.stack([(rank_of_pair == rank).any(dim=1) for rank in range(self.num_ranks)], dim=1)
        of_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_in_rank.sum(dim=0).int(), None, of_expert.int(), is_in_rank, None

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
        num_worst_tokens: int = 0,
    ) -> tuple[Rows, Tensor, Tensor, list[int], tuple[Any, ...], EventOverlap]:
        assert async_finish
        assert not num_worst_tokens or self.num_ranks <= 8, "only within a host"
        num_experts, top_k = len(num_tokens_per_expert), topk_idx.shape[1]
        self.check_topk(topk_idx, topk_weights, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        given = (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, None)
        assert all(map(same, given, self.get_dispatch_layout(topk_idx, num_experts)))
        assert self.num_nvl_bytes >= 3 * hidden * 2 * self.num_ranks
        self.cleaned_for, self.is_fresh = None, False
        sizes = (num_experts, top_k, hidden, isinstance(x, tuple), num_worst_tokens)
        values = self.launch("dispatch", sizes, (tensors(x), topk_idx, topk_weights))
        own = self.own_experts(num_experts)
        tokens, rows, ids, weights = [], [], [], []
        for source, (its_rows, its_ids, its_weights) in enumerate(values):
            for token, chosen in enumerate(its_ids.tolist()):
                if any(expert in own for expert in chosen):
                    tokens.append((source, token, 0))
                    rows.append(tuple(part[token] for part in its_rows))
                    ids.append([expert - own.start if expert in own else -1 for expert in chosen])
                    its = its_weights[token].tolist()
                    weights.append([w if e in own else 0.0 for w, e in zip(its, chosen, strict=True)])
        num_rows = num_worst_tokens or len(tokens)
        assert len(tokens) <= num_rows
        route = Route(topk_idx, num_experts, tokens, [*range(num_rows)])
        received = garbage(x, num_rows)
        recv_topk_idx = torch.full((num_rows, top_k), 2**40)
        recv_topk_weights = torch.full((num_rows, top_k), torch.nan)

        def arrive() -> None:
            fill(received, rows)
            recv_topk_idx[: len(tokens)] = torch.tensor(ids, dtype=torch.int64).view(-1, top_k)
            recv_topk_idx[len(tokens) :] = -1
            recv_topk_weights[: len(tokens)] = torch.tensor(weights).view(-1, top_k)
            route.is_waited = True

        counts = [] if num_worst_tokens else [sum(local in chosen for chosen in ids) for local in range(len(own))]
        if not num_worst_tokens:
            self.timeline.append("host waited")  # for the counts
        event = self.event("dispatch", [*tensors(x), topk_idx, topk_weights], arrive)
        return received, recv_topk_idx, recv_topk_weights, counts, (route,), event

    def combine(self, x: Tensor, handle: tuple[Route], *, async_finish: bool) -> tuple[Tensor, None, EventOverlap]:
        assert async_finish
        (route,) = handle
        hidden = self.check_rows(x, len(route.rows_of_pairs))
        route.begin_combine()
        assert self.num_nvl_bytes >= 5 * hidden * 2 * self.num_ranks
        self.cleaned_for, self.is_fresh = None, False
        parts = self.returned("combine", (route.num_experts, hidden), zip(route.pairs, x, strict=False))
        combined = garbage(x, route.num_tokens)
        assert isinstance(combined, Tensor)

        def arrive() -> None:
            combined.copy_(total(route.num_tokens, hidden, ((token, row, 1.0) for token, _, row in parts)))

        return combined, None, self.event("combine", [x], arrive)

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
        return_recv_hook: bool,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], None, Callable[[], None]]:
        assert return_recv_hook
        self.check_topk(topk_idx, None, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        limit, top_k = num_max_dispatch_tokens_per_rank, topk_idx.shape[1]
        self.check_low_latency(limit, hidden, num_experts, top_k)
        assert len(x) <= limit
        values = self.launch("low_latency_dispatch", (limit, num_experts, top_k, hidden, use_fp8), (x, topk_idx))
        own = self.own_experts(num_experts)
        of_experts = [self.pairs_of(expert, [its_ids for _, its_ids in values]) for expert in own]
        pairs = [pair for pairs in of_experts for pair in pairs]
        places = [(local, slot) for local, pairs in enumerate(of_experts) for slot in range(len(pairs))]
        num_slots = limit * self.num_ranks
        route = Route(topk_idx, num_experts, pairs, [local * num_slots + slot for local, slot in places])
        slots = torch.full((len(own), num_slots, hidden), torch.nan, dtype=torch.bfloat16)
        received: Rows = slots
        if use_fp8:
            scales = torch.full((len(own), hidden // BLOCK, num_slots), torch.nan).transpose(1, 2)
            received = (slots.to(FLOAT8), scales)
        recv_count = torch.full((len(own),), -(10**6), dtype=torch.int32)

        def arrive() -> None:
            for place, (source, token, _) in zip(places, pairs, strict=True):
                row = values[source][0][token]
                for part, value in zip(tensors(received), quantised(row) if use_fp8 else (row,), strict=True):
                    part[place] = value
            recv_count.copy_(torch.tensor([len(pairs) for pairs in of_experts]))
            route.is_waited = True

        self.remember_result(tensors(received)[0])
        event = self.event("low_latency_dispatch", [x, topk_idx], arrive)
        return received, recv_count, (route, limit, num_experts), None, event.current_stream_wait

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...], *, return_recv_hook: bool
    ) -> tuple[Tensor, None, Callable[[], None]]:
        assert return_recv_hook
        route, limit, num_experts = handle
        hidden = x.shape[2]
        assert x.shape == (num_experts // self.num_ranks, limit * self.num_ranks, hidden)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        self.check_topk(topk_idx, topk_weights, num_experts)
        self.check_low_latency(limit, hidden, num_experts, topk_idx.shape[1])
        assert same(topk_idx, route.topk_idx), "these are not the experts that were dispatched to"
        route.begin_combine()
        sent = zip(route.pairs, x.flatten(0, 1)[route.rows_of_pairs], strict=True)
        parts = self.returned("low_latency_combine", (limit, num_experts, hidden), sent)
        combined = torch.full((route.num_tokens, hidden), torch.nan, dtype=torch.bfloat16)

        def arrive() -> None:
            ordered = sorted(parts, key=lambda part: part[:2])
            weighted = ((token, row, float(topk_weights[token, k])) for token, k, row in ordered)
            combined.copy_(total(route.num_tokens, hidden, weighted))

        self.remember_result(combined)
        event = self.event("low_latency_combine", [x, topk_idx, topk_weights], arrive)
        return combined, None, event.current_stream_wait

    def check_low_latency(self, limit: int, hidden: int, num_experts: int, top_k: int) -> None:
        assert self.low_latency_mode
        assert hidden in HIDDEN_SIZES
        assert top_k <= 11
        assert (limit + 1) * 2 <= QUEUE_DEPTH
        hint = self.get_low_latency_rdma_size_hint(limit, hidden, self.num_ranks, num_experts)
        assert hint <= self.num_rdma_bytes
        assert self.num_qps_per_rank >= num_experts // self.num_ranks, "fewer queue pairs than local experts"
        assert self.is_fresh or self.cleaned_for == (limit, hidden, num_experts), "the buffer is dirty"

    def remember_result(self, result: Tensor) -> None:
        self.alive = [known for known in self.alive if known() is not None]
        assert len(self.alive) < 2, "more than two results of low-latency kernels are held"
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
        super().__init__(group, explicitly_destroy)
        self.made_for = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = 2**21 * (1 + num_max_tokens_per_rank * hidden // 2**18)
        self.deterministic = deterministic
        if deterministic:
            self.chance = None

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
        assert async_with_compute_stream
        assert expert_alignment == 1
        limit, is_exact = num_max_tokens_per_rank, do_cpu_sync
        self.check_topk(topk_idx, topk_weights, num_experts)
        hidden = self.check_rows(x, len(topk_idx))
        top_k, is_float8 = topk_idx.shape[1], isinstance(x, tuple)
        assert hidden % (32 if is_float8 else 16) == 0
        assert 1 <= len(topk_idx) <= limit, "no tokens are not supported"
        assert all(a <= b for a, b in zip((limit, hidden, top_k), self.made_for, strict=False))
        assert self.made_for[3] or not is_float8
        sizes = (num_experts, top_k, hidden, limit, is_exact)
        values = self.launch("dispatch", sizes, (tensors(x), topk_idx, topk_weights))
        own = self.own_experts(num_experts)
        of_experts = [self.pairs_of(expert, [its_ids for _, its_ids, _ in values]) for expert in own]
        pairs = [pair for pairs in of_experts for pair in pairs]
        route = Route(topk_idx.clone(), num_experts, pairs, [*range(len(pairs))])
        if is_exact:
            self.timeline.append("host waited")  # for the counts
        num_rows = len(pairs) if is_exact else self.num_ranks * limit * min(top_k, len(own))
        received = garbage(x, num_rows)
        recv_topk_weights = torch.full((num_rows,), torch.nan)
        ends = torch.full((len(own),), -(10**6), dtype=torch.int32)

        def arrive() -> None:
            fill(received, [tuple(part[token] for part in values[source][0]) for source, token, _ in pairs])
            weights = [float(values[source][2][token, k]) for source, token, k in pairs]
            recv_topk_weights[: len(pairs)] = torch.tensor(weights)
            ends.copy_(torch.tensor([len(pairs) for pairs in of_experts]).cumsum(0))
            route.is_waited = True

        event = self.event("dispatch", [*tensors(x), topk_idx, topk_weights], arrive)
        return received, None, recv_topk_weights, EPHandle(ends, num_rows, route), event

    def combine(
        self, x: Tensor, handle: EPHandle, *, async_with_compute_stream: bool
    ) -> tuple[Tensor, None, EventOverlap]:
        """Add the rows of a token on this rank in the order of k, round, and let the token's rank add those sums."""
        assert async_with_compute_stream
        route = handle.route
        hidden = self.check_rows(x, handle.num_allocated_rows)
        route.begin_combine()
        of_token: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for (source, token, k), row in zip(route.pairs, x, strict=False):
            of_token.setdefault((source, token), []).append((k, row))
        sums = [
            ((*key, 0), total(1, hidden, ((0, row, 1.0) for _, row in sorted(rows, key=lambda pair: pair[0])))[0])
            for key, rows in of_token.items()
        ]
        parts = self.returned("combine", (route.num_experts, hidden), sums)
        combined = torch.full((route.num_tokens, hidden), torch.nan, dtype=torch.bfloat16)

        def arrive() -> None:
            combined.copy_(total(route.num_tokens, hidden, ((token, row, 1.0) for token, _, row in parts)))

        return combined, None, self.event("combine", [x], arrive)


def stand_in(*offers: type) -> ModuleType:
    """Return the package with these classes."""
    module = ModuleType("deep_ep")
    for offered in offers:
        setattr(module, offered.__name__, offered)
    return module


def total(num_tokens: int, hidden: int, parts: Iterable[tuple[int, Tensor, float]]) -> Tensor:
    """Add weighted rows to their tokens in float32, in this order, and round once."""
    sums = torch.zeros(num_tokens, hidden)
    for token, row, weight in parts:
        sums[token] += row.float() * weight
    return sums.to(torch.bfloat16)


def quantised(row: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row in float8 and the scales of its blocks."""
    blocks = row.float().view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1).clamp(1e-4) / 448
    return (blocks / scales[:, None]).to(FLOAT8).flatten(), scales


def tensors(x: Rows) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def garbage(like: Rows, num_rows: int) -> Rows:
    """Return unwritten rows."""
    parts = [torch.full((num_rows, part.shape[1]), torch.nan).to(part.dtype) for part in tensors(like)]
    return (parts[0], parts[1]) if isinstance(like, tuple) else parts[0]


def fill(x: Rows, rows: list[tuple[Tensor, ...]]) -> None:
    for place, row in enumerate(rows):
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
