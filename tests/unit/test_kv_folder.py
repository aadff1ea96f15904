"""Files of KV cache blocks: what was changed is not loaded."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import torch

from moeserve.cache_kind import CacheKind
from moeserve.kv.layer_cache import CacheItems
from moeserve.kv.rank.folder import FolderStore
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rules import KeepAll
from moeserve.protocol import CachePlace, StoreTransfer


def transfer(*names: str, is_load: bool) -> StoreTransfer:
    places = [CachePlace(CacheKind.BLOCK, index) for index in range(len(names))]
    return StoreTransfer(number=0, is_load=is_load, places=places, store_keys=list(names))


def test_a_changed_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    cache = torch.randn(3, 2, 4, 8)
    tensors = cache, cache[..., 0].contiguous()
    items = CachedItems([(CacheItems(KeepAll(), 1),)], [SimpleNamespace(tensors_of_items=[tensors])], range(0))
    store = FolderStore(items, tmp_path / "rank", 2**20)
    saved, chance = cache.clone(), random.Random(0)
    for _ in range(100):
        cache.copy_(saved)
        assert store.run(transfer("a", "b", is_load=False)).num_copied == 2
        path = tmp_path / "rank" / "b.safetensors"
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data) - cache[0].nbytes, len(data))  # in the tensors
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        cache.zero_()
        assert store.run(transfer("a", "b", is_load=True)).num_copied == 1
        assert torch.equal(cache[0], saved[0])
        assert not cache[1].any()
        assert not path.exists()  # and will be saved again
