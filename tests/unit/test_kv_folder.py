"""Files of KV cache blocks: what was changed is not loaded, and neither other engines nor disks stop an engine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moeserve.cache_kind import CacheKind
from moeserve.kv.layer_cache import CacheItems
from moeserve.kv.rank.folder import FolderStore
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rules import KeepAll
from moeserve.protocol import CachePlace, StoreTransfer

NUM_ITEMS = 3


def new_cache() -> Tensor:
    return torch.randn(NUM_ITEMS, 2, 4, 8)


def store_of(cache: Tensor, folder: Path, max_bytes: int = 2**20) -> FolderStore:
    tensors = cache, cache[..., 0].contiguous()
    items = CachedItems([(CacheItems(KeepAll(), 1),)], [SimpleNamespace(tensors_of_items=[tensors])], range(0))
    return FolderStore(items, folder, max_bytes)


def copied(store: FolderStore, *names: str, is_load: bool) -> int:
    """Copy the first items of the cache to or from files with these names, and return how many were copied."""
    places = [CachePlace(CacheKind.BLOCK, index) for index in range(len(names))]
    return store.run(StoreTransfer(number=0, is_load=is_load, places=places, store_keys=list(names))).num_copied


def test_a_changed_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    """Every bit of the header, and some of the tensors."""
    cache, chance = new_cache(), random.Random(0)
    store, path, saved = store_of(cache, tmp_path / "rank"), tmp_path / "rank" / "b.safetensors", cache.clone()
    assert copied(store, "a", "b", is_load=False) == 2
    whole = path.read_bytes()
    num_header_bits = 8 * (8 + int.from_bytes(whole[:8], "little"))
    for bit in [*range(num_header_bits), *chance.sample(range(num_header_bits, 8 * len(whole)), 200)]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        cache.zero_()
        assert copied(store, "a", "b", is_load=True) == 1, bit
        assert torch.equal(cache[0], saved[0])
        assert not cache[1].any()
        assert not path.exists(), bit  # and will be saved again
    cache.copy_(saved)
    assert copied(store, "a", "b", is_load=False) == 2
    assert path.read_bytes() == whole


def test_what_follows_a_damaged_item_is_saved_again_with_it(tmp_path: Path) -> None:
    store, folder = store_of(new_cache(), tmp_path / "rank"), tmp_path / "rank"
    assert copied(store, "a", "b", "c", is_load=False) == 3
    for name in ("b", "c"):
        (folder / f"{name}.safetensors").write_bytes(b"damaged")
    assert copied(store, "a", "b", "c", is_load=True) == 1
    assert copied(store, "a", "b", "c", is_load=False) == 3
    assert copied(store, "a", "b", "c", is_load=True) == 3


@pytest.mark.parametrize("size", ["empty", "cut", "longer"])
def test_a_file_of_another_size_is_deleted(tmp_path: Path, size: str) -> None:
    store, path = store_of(new_cache(), tmp_path / "rank"), tmp_path / "rank" / "a.safetensors"
    assert copied(store, "a", is_load=False) == 1
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-1], "longer": whole + bytes(2**20)}[size])
    assert copied(store, "a", is_load=True) == 0
    assert not path.exists()


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["items", "folder of the rank", "kv_folder"])
def test_an_emptied_folder_is_used_again(tmp_path: Path, depth: int) -> None:
    cache, folder = new_cache(), tmp_path / "kv" / "rank"
    store = store_of(cache, folder)
    assert copied(store, "a", is_load=False) == 1
    if depth == 0:
        for path in folder.iterdir():
            path.unlink()
    else:
        shutil.rmtree([folder, folder.parent][depth - 1])
    assert copied(store, "a", is_load=True) == 0
    assert copied(store, "a", is_load=False) == 1
    saved = cache.clone()
    cache.zero_()
    assert copied(store, "a", is_load=True) == 1
    assert torch.equal(cache[0], saved[0])


def in_child(work: Callable[[], None]) -> int:
    """Call a function for ever in a fork of this process, and return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # a fork has none of this process's threads
            while True:
                work()
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_an_engine_that_is_stopped_or_killed_while_it_saves_delays_no_other(tmp_path: Path, end: int) -> None:
    """The folder has room for a few items only, and keeps its limit."""
    folder, cache, max_bytes, chance = tmp_path / "rank", torch.randn(NUM_ITEMS, 2**12, 8), 2**20, random.Random(1)
    store, numbers = store_of(cache, folder, max_bytes), iter(range(10**9))

    def save() -> None:
        names = [f"{os.getpid()}-{next(numbers)}" for _ in range(NUM_ITEMS)]
        assert copied(store, *names, is_load=False) == NUM_ITEMS

    for _ in range(20):
        child = in_child(save)
        while not any(name.startswith(f"{child}-") for name in os.listdir(folder)):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        for _ in range(chance.randrange(4)):
            save()
        os.kill(child, end)
        os.waitpid(child, os.WUNTRACED)
        for _ in range(3):
            save()
            assert sum(path.stat().st_size for path in folder.iterdir()) <= max_bytes
        if end == signal.SIGSTOP:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    save()
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
