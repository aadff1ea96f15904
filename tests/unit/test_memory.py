"""Reused memory: never while a tensor on it is alive, and no more of it than was in use at once."""

from __future__ import annotations

import random

import torch

from moeserve.memory import ALIGNMENT, MIN_REUSED_BYTES, PAGE_BYTES, Arena, BufferPool, new_empty, without_pool

SIZE = 3 * 2**18  # float32 elements: 3 MiB


def test_memory_is_reused_when_the_tensor_and_its_views_are_gone() -> None:
    pool = BufferPool()
    tensor = pool.empty(3, 2**18, dtype=torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 2**18), torch.float32, True)
    address = tensor.data_ptr()
    view = tensor[1:, 5:]
    del tensor
    other = pool.empty(SIZE, dtype=torch.float32)
    assert other.data_ptr() != address
    view.fill_(1)
    del view
    assert pool.empty(2 * SIZE, dtype=torch.bfloat16).data_ptr() == address


def test_tensors_in_use_never_share_memory() -> None:
    pool, draw = BufferPool(), random.Random(3)
    alive: list[tuple[int, torch.Tensor]] = []
    for number in range(200):
        if alive and draw.random() < 0.5:
            alive.pop(draw.randrange(len(alive)))
        tensor = pool.empty(draw.randrange(1, 2**19), dtype=torch.float32)
        alive.append((number, tensor.fill_(number)))
        alive = alive[-6:]
        assert all(each.eq(written).all() for written, each in alive)
    assert pool.num_bytes <= 8 * (2**21 + PAGE_BYTES)


def test_buffers_that_are_too_small_are_dropped() -> None:
    pool = BufferPool()
    for size in range(SIZE, 5 * SIZE, SIZE // 2):
        pool.empty(size, dtype=torch.float32)
    assert pool.num_bytes <= 5 * SIZE * 4 + PAGE_BYTES


def test_only_large_results_on_the_cpu_are_pooled() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    large = (MIN_REUSED_BYTES // 4, 2)
    for shape in (large, (3, 5), (0, 7)):
        tensor = new_empty(like, *shape)
        assert (tensor.shape, tensor.dtype, tensor.device) == (shape, torch.bfloat16, like.device)
    assert new_empty(like.to("meta"), *large).device.type == "meta"

    def is_pooled(*shape: int) -> bool:
        """True if the memory is reused at once: torch would not give the same large block while another is alive."""
        tensor = new_empty(like, *shape)
        address = tensor.untyped_storage().data_ptr()
        del tensor
        other = torch.empty(shape, dtype=like.dtype)
        return new_empty(like, *shape).untyped_storage().data_ptr() == address != other.data_ptr()

    assert is_pooled(*large)
    with without_pool():
        assert not is_pooled(*large)


def test_tensors_of_an_arena_never_share_memory_and_use_all_of_it() -> None:
    arena, draw = Arena(2**16), random.Random(4)
    alive: list[tuple[int, torch.Tensor]] = []
    num_refused = 0
    for number in range(2000):
        shape = torch.Size((draw.randrange(0, 40), draw.randrange(0, 90)))
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64])
        tensor = arena.empty(shape, dtype)
        if tensor is None:
            num_refused += 1
            alive.pop(draw.randrange(len(alive)))
            continue
        assert (tensor.shape, tensor.dtype, tensor.data_ptr() % ALIGNMENT) == (shape, dtype, 0)
        assert (
            tensor.numel() == 0 or arena.address <= tensor.data_ptr() <= arena.address + arena.num_bytes - tensor.nbytes
        )
        tensor.fill_(number % 256)
        alive.append((number, tensor[draw.randrange(2) :]))  # a view keeps the whole tensor in use
        assert all(each.eq(written % 256).all() for written, each in alive)
    assert num_refused > 10
    alive.clear()
    del tensor
    whole = arena.empty(torch.Size((2**13,)), torch.int64)
    assert whole is not None
    assert whole.data_ptr() == arena.address


def test_an_alias_shares_the_values_without_keeping_the_memory_in_use() -> None:
    arena = Arena(1000)
    first, second = (arena.empty(torch.Size((2, 5)), torch.float32) for _ in range(2))
    assert first is not None
    assert second is not None
    alias = arena.alias(second)
    assert alias is not None
    second.copy_(torch.arange(10.0).view(2, 5))
    assert alias.tolist() == second.tolist()
    address = second.data_ptr()
    del second
    again = arena.empty(torch.Size((10,)), torch.float32)
    assert again is not None
    assert again.data_ptr() == address == alias.data_ptr()
    assert arena.alias(first.t()) is None
    assert arena.alias(torch.zeros(3)) is None
