"""Memory that is used again: never while anybody can see it, and no more of it than was needed at once."""

from __future__ import annotations

import random

import pytest
import torch

from moeserve.ops.memory import MIN_REUSED_BYTES, PAGE_BYTES, BufferPool, new_empty

SIZE = 3 * 2**18  # float32 elements: 3 MiB


def test_memory_is_used_again_when_the_tensor_and_its_views_are_gone() -> None:
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


def test_buffers_that_are_too_small_make_room() -> None:
    pool = BufferPool()
    for size in range(SIZE, 5 * SIZE, SIZE // 2):
        pool.empty(size, dtype=torch.float32)
    assert pool.num_bytes <= 5 * SIZE * 4 + PAGE_BYTES


def test_large_results_on_the_cpu_lie_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    pool = BufferPool()
    real = pool.empty
    monkeypatch.setattr("moeserve.ops.memory._pool", pool)
    monkeypatch.setattr(pool, "empty", lambda *shape, dtype: asked.append(shape) or real(*shape, dtype=dtype))
    like = torch.zeros(1, dtype=torch.bfloat16)
    large = (MIN_REUSED_BYTES // 4, 2)
    for shape in (large, (3, 5), (0, 7)):
        tensor = new_empty(like, *shape)
        assert (tensor.shape, tensor.dtype, tensor.device) == (shape, torch.bfloat16, like.device)
    assert new_empty(like.to("meta"), *large).device.type == "meta"
    assert asked == [large]
