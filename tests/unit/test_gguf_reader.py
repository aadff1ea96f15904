"""Headers of GGUF files that declare more than the file holds are refused before memory is taken for it."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeserve import CheckpointError
from moeserve.models.gguf.reader import open_gguf

U8, F32, TEXT, LIST = 0, 6, 8, 9  # types of metadata
MUCH = 2**40
REST = bytes(1000)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def file_of(body: bytes, *, tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def entry(kind: int, value: bytes, key: bytes = b"a") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def list_of(kind: int, number: int, items: bytes = b"") -> bytes:
    return entry(LIST, struct.pack("<IQ", kind, number) + items)


def tensor(*dims: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"tjgg" + REST, "GGJT"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"GGUF\3\0", "the version"),
        (file_of(REST, version=1), "version 1 "),
        (file_of(REST, version=4), "version 4 "),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (file_of(REST, tensors=MUCH), f"{MUCH} tensors"),
        (file_of(REST, tensors=len(REST) // 24 + 1), "42 tensors"),
        (file_of(REST, entries=MUCH), f"{MUCH} entries"),
        (file_of(struct.pack("<Q", MUCH) + REST, entries=1), f"{MUCH} bytes"),
        (file_of(text(b"\xff") + REST, entries=1), "UTF-8"),
        (file_of(entry(TEXT, struct.pack("<Q", MUCH)) + REST, entries=1), f"a takes {MUCH} bytes"),
        (file_of(list_of(U8, MUCH) + REST, entries=1), f"a takes {MUCH} bytes"),
        (file_of(list_of(F32, 2**62) + REST, entries=1), f"a takes {2**64} bytes"),
        (file_of(list_of(TEXT, MUCH) + REST, entries=1), f"a has {MUCH} texts"),
        (file_of(list_of(TEXT, 100, text(b"x" * 900) + bytes(300)), entries=1), "after 38 of 100 texts"),
        (file_of(list_of(TEXT, 2, text(b"x") + struct.pack("<Q", MUCH)) + REST, entries=1), "a takes"),
        (file_of(list_of(LIST, 3, struct.pack("<IQ", LIST, 1) * 3000), entries=1), "a is a list of lists"),
        (file_of(entry(77, REST), entries=1), "type 77"),
        (file_of(2 * entry(U8, b"\1") + REST, entries=2), "'a' twice"),
        (file_of(entry(4, struct.pack("<I", 33), b"general.alignment") + REST, entries=1), r"alignment=33"),
        (file_of(entry(TEXT, text(b"8"), b"general.alignment") + REST, entries=1), r"alignment='8'"),
        (file_of(tensor(MUCH, MUCH) + REST, tensors=1), "ends at byte"),
        (file_of(tensor(2**63, 2) + REST, tensors=1), "ends at byte"),
        (file_of(tensor(0, 8) + REST, tensors=1), r"shape \[8, 0\]"),
        (file_of(tensor(*[2] * 5) + REST, tensors=1), "5 dimensions"),
        (file_of(text(b"t") + struct.pack("<I", 2**31) + REST, tensors=1), f"{2**31} dimensions"),
        (file_of(tensor(8, offset=MUCH) + REST, tensors=1), "ends at byte"),
        (file_of(tensor(8, offset=5) + REST, tensors=1), "offset"),
        (file_of(tensor(8, kind=99) + REST, tensors=1), "type 99"),
        (file_of(tensor(32, kind=31) + REST, tensors=1), "Q4_0_4_4"),
        (file_of(tensor(33, kind=2) + REST, tensors=1), "width"),
        (file_of(2 * tensor(8) + REST, tensors=2), "'t' is there twice"),
        (file_of(tensor(9) + tensor(8, name=b"u", offset=32) + REST, tensors=2), "'t' and 'u' overlap"),
    ],
)
def test_a_damaged_header_is_named_without_memory_for_what_it_declares(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=says) as error:
            open_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "damaged.gguf" in str(error.value)
    assert peak < 2**20


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "yes": True,
        "text": "Grüße",
    }
    for (key, value), kind in zip(values.items(), (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 7, 8), strict=True):
        writer.add_key_value(key, value, gguf.GGUFValueType(kind))
    lists = {
        "ids": [1, -2, 3],
        "floats": [0.5, 1.5],
        "texts": ["a", "", "日本"],
        "flags": [True, False],
        "long": [7] * 10**5,
    }
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.add_custom_alignment(256)
    arrays = {"one": np.arange(3, dtype=np.float32), "two": np.arange(24, dtype=np.float16).reshape(2, 3, 4)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)

    metadata, tensors = open_gguf(path)
    assert dict(metadata) == {"general.architecture": "llama", "general.alignment": 256} | values | lists
    assert {name: stored.shape for name, stored in tensors.items()} == {"one": (3,), "two": (2, 3, 4)}
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].read(), array)


def test_a_long_list_that_the_model_does_not_use_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(file_of(list_of(U8, 2**24, bytes(2**24)), entries=1))
    tracemalloc.start()
    metadata, _ = open_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(metadata) == ["a"]
    assert peak < 2**20
    with pytest.raises(CheckpointError, match=f"a has {2**24} items"):
        metadata["a"]
