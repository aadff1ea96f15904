"""A reader of GGUF files: metadata, and tensors as views of the mapped file.

Every number that a file declares is compared with the size of the file before memory or time is spent on it. The
reader of the gguf package does not do this. The gguf package supplies the tensor types and their dequantisation.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from moeserve.errors import CheckpointError

if TYPE_CHECKING:
    import gguf

INSTALL_GGUF = "pip install 'moeserve[demo]'"

MAX_TENSORS = 2**16  # 256 experts in 64 layers, with three tensors each, are 49152
MAX_ENTRIES = 2**16  # maximum number of entries in the metadata of a file
MAX_ITEMS = 2**22  # maximum length of a list, such as the vocabulary
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20

_VERSIONS = (2, 3)
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_PLACES = [struct.Struct(f"<{num_dims}QIQ") for num_dims in range(MAX_DIMS + 1)]  # a tensor's sizes, type and offset
_STRING, _LIST = 8, 9  # type numbers of strings and lists in the metadata
_NUMBERS = {  # numpy's names of the other types, by type number
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_REMOVED = {
    **{4: "Q4_2", 5: "Q4_3"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
_OTHER_FORMATS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT"}  # leading bytes of older formats than GGUF
_LFS_POINTER = b"version https://git-lfs"
_SMALLEST_ENTRY = 8 + 4 + 1  # bytes: length of the key, type, value
_SMALLEST_TENSOR = 8 + 4 + 4 + 8  # bytes: length of the name, number of dimensions, type, offset
_ALL_ROWS = slice(None)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """A tensor of a GGUF file."""

    path: Path
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # outermost dimension first
    data: np.ndarray  # view of the mapped file: numbers of `shape`, or [*shape[:-1], bytes of a row] uint8
    start: int = 0  # offset of the data in the file, in bytes
    scale: np.ndarray | None = None  # factor of all values, or of each slice of the first dimension

    @property
    def block(self) -> tuple[int, int]:
        """The number of values and the number of bytes of a block."""
        return _block_of(self.kind)

    def check(self) -> None:
        """Raise CheckpointError if the gguf package cannot dequantise tensors of this type."""
        if not _is_readable(self.kind):
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} of type {self.kind.name} cannot be read: the installed gguf "
                "package does not dequantise this type"
            )

    def read(self, rows: slice | np.ndarray = _ALL_ROWS) -> np.ndarray:
        """Return rows (slices of the first dimension) as a new float32 array.

        Raises:
            CheckpointError: as in `check`.
        """
        from gguf import dequantize

        self.check()
        values = self.data[rows]
        with np.errstate(all="ignore"):  # damaged scales give infinities
            values = values if self.kind.name in _PLAIN else dequantize(values, self.kind)
            values = np.array(values, dtype=np.float32)
            if self.scale is not None:
                scales = self.scale if self.scale.size == 1 else self.scale[rows]
                values *= scales.reshape(-1, *[1] * (values.ndim - 1))
            return values


@dataclass(frozen=True)
class _Place:
    """The position of a value in the metadata of a file, in bytes."""

    kind: int  # type number of the value, or of the items of a list
    num_items: int | None  # None: the value is not a list
    start: int
    stop: int


class Metadata(Mapping[str, Any]):
    """The metadata of a GGUF file by key. Values are converted to Python's types at each look-up."""

    def __init__(self, path: Path, data: memoryview, places: Mapping[str, _Place]) -> None:
        self._path, self._data, self._places = path, data, places

    def __getitem__(self, key: str) -> Any:
        place = self._places[key]
        if place.num_items is not None and place.num_items > MAX_ITEMS:
            raise CheckpointError(f"{self._path}: {key} has {place.num_items} items, more than {MAX_ITEMS}")
        if place.kind != _STRING:
            values = np.frombuffer(self._data[place.start : place.stop], _NUMBERS[place.kind]).tolist()
            return values if place.num_items is not None else values[0]
        try:
            if place.num_items is None:
                return str(self._data[place.start : place.stop], "utf-8")
            return list(self._texts(place))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {key} is not UTF-8 ({error})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def under(self, prefix: str) -> Metadata:
        """Return the entries whose keys begin with `prefix`, keyed without this prefix."""
        chosen = {key[len(prefix) :]: place for key, place in self._places.items() if key.startswith(prefix)}
        return Metadata(self._path, self._data, chosen)

    def chosen(self, *prefixes: str) -> dict[str, Any]:
        """Return the entries whose keys begin with any of `prefixes`."""
        return {key: self[key] for key in self._places if key.startswith(prefixes)}

    def _texts(self, place: _Place) -> Iterator[str]:
        data, position, unpack = self._data, place.start, _U64.unpack_from
        while position < place.stop:
            start = position + 8
            position = start + unpack(data, position)[0]
            yield str(data[start:position], "utf-8")


def open_gguf(path: Path) -> tuple[Metadata, dict[str, StoredArray]]:
    """Map a GGUF file. Return its metadata, and its tensors by name.

    Raises:
        CheckpointError: the file is damaged or is not a GGUF file, or the gguf package is missing.
    """
    try:
        import gguf  # noqa: F401, needed for the types of tensors
    except ImportError:
        raise CheckpointError(f"reading {path} needs the gguf package; install it with: {INSTALL_GGUF}") from None
    try:
        data = np.memmap(path, mode="r").view(np.ndarray)  # slices of a memmap take ten times as long
    except ValueError:
        raise CheckpointError(f"{path} is empty; fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    header = _Header(path, data)
    num_tensors, num_entries = header.read_start()
    places: dict[str, _Place] = {}
    for _ in range(num_entries):
        key = header.text("a key of the metadata")
        if key in places:
            header.damaged(f"the metadata have {key!r} twice")
        places[key] = header.place(key)
    metadata = Metadata(path, data.data, places)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment={alignment!r} must be a power of two up to {MAX_ALIGNMENT}")
    return metadata, header.tensors(num_tensors, alignment)


@functools.cache
def _is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Return True if tensors of a type can be dequantised."""
    from gguf import dequantize

    try:
        return kind.name in _PLAIN or dequantize(np.zeros((1, _block_of(kind)[1]), np.uint8), kind) is not None
    except NotImplementedError:
        return False


class _Header:
    """The part of a GGUF file before the values of tensors, read from front to back."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self._path, self._values, self._data = path, data, data.data
        self._position = 0

    def damaged(self, why: str) -> NoReturn:
        size = len(self._data)
        raise CheckpointError(f"{self._path} is damaged or incomplete ({size} bytes): {why}; fetch it again")

    def read_start(self) -> tuple[int, int]:
        """Read the start of the file. Return the number of tensors, and the number of metadata entries."""
        magic = bytes(self._data[:4])
        if magic != b"GGUF":
            if bytes(self._data[: len(_LFS_POINTER)]) == _LFS_POINTER:
                raise CheckpointError(f"{self._path} is a Git LFS pointer; fetch the file with `git lfs pull`")
            older = f", but {_OTHER_FORMATS[magic]}, a format from before GGUF" if magic in _OTHER_FORMATS else ""
            self.damaged(f"it is not a GGUF file{older}")
        self._position = 4
        version = self._number(_U32, "the version")
        if version not in _VERSIONS:
            if version >> 16 and version & 0xFFFF == 0:
                raise CheckpointError(f"{self._path} is big-endian; gguf-py's gguf_convert_endian.py converts it")
            self.damaged(f"it has version {version} of GGUF, not 2 or 3")
        num_tensors = self._number(_U64, "the number of tensors")
        num_entries = self._number(_U64, "the number of entries of the metadata")
        for what, number, smallest, most in (
            ("tensors", num_tensors, _SMALLEST_TENSOR, MAX_TENSORS),
            ("entries of the metadata", num_entries, _SMALLEST_ENTRY, MAX_ENTRIES),
        ):
            if number > most or number * smallest > len(self._data) - self._position:
                self.damaged(f"it declares {number} {what}")
        return num_tensors, num_entries

    def text(self, what: str) -> str:
        start = self._skip_text(what)
        try:
            return str(self._data[start : self._position], "utf-8")
        except UnicodeDecodeError as error:
            self.damaged(f"{what} is not UTF-8 ({error})")

    def place(self, key: str) -> _Place:
        """Skip the value of a key, and return its position."""
        kind, num_items = self._number(_U32, key), None
        if kind == _LIST:
            kind = self._number(_U32, key)
            num_items = self._number(_U64, key)
        start = self._position
        if kind == _STRING:
            if num_items is None:
                start = self._skip_text(key)
            else:
                self._skip_texts(num_items, key)
        elif kind in _NUMBERS:
            self._skip((1 if num_items is None else num_items) * np.dtype(_NUMBERS[kind]).itemsize, key)
        elif kind == _LIST:
            raise CheckpointError(f"{self._path}: {key} is a list of lists, which models do not have")
        else:
            self.damaged(f"{key} has the type {kind}")
        return _Place(kind, num_items, start, self._position)

    def tensors(self, number: int, alignment: int) -> dict[str, StoredArray]:
        """Return the next `number` tensors by name."""
        described = [self._describe_tensor() for _ in range(number)]
        first = -(-self._position // alignment) * alignment
        found: dict[str, StoredArray] = {}
        ends = [(0, 0, "")]
        for name, kind, shape, offset in described:
            *outer, width = shape
            block, num_bytes = _block_of(kind)
            if name in found:
                self.damaged(f"tensor {name!r} is there twice")
            if width % block or offset % alignment:
                self.damaged(f"tensor {name!r} of shape {list(shape)} in {kind.name} has a wrong width or offset")
            of_row = width // block * num_bytes
            start, stop = first + offset, first + offset + math.prod(outer) * of_row
            if stop > len(self._data):
                self.damaged(f"tensor {name!r} of shape {list(shape)} in {kind.name} ends at byte {stop}")
            data = self._values[start:stop]
            if (dtype := _PLAIN.get(kind.name)) is not None:
                data, of_row = data.view(dtype), width
            found[name] = StoredArray(self._path, name, kind, shape, data.reshape(*outer, of_row), start)
            ends.append((start, stop, name))
        for (_, stop, name), (start, _, other) in pairwise(sorted(ends)):
            if start < stop:
                self.damaged(f"tensors {name!r} and {other!r} overlap")
        return found

    def _describe_tensor(self) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
        """Return name, type, shape (outermost dimension first) and offset of the next tensor."""
        name = self.text("a tensor's name")
        num_dims = self._number(_U32, name)
        if num_dims > MAX_DIMS:
            self.damaged(f"tensor {name!r} has {num_dims} dimensions")
        form = _PLACES[num_dims]
        *sizes, kind, offset = form.unpack_from(self._data, self._skip(form.size, name))
        shape = tuple(reversed(sizes)) or (1,)
        if 0 in shape:
            self.damaged(f"tensor {name!r} has shape {list(shape)}")
        if kind in _REMOVED:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has type {_REMOVED[kind]}, which GGUF no longer has; take a file in "
                "another type, such as Q4_0"
            )
        try:
            return name, _kind_of(kind), shape, offset
        except ValueError:
            self.damaged(f"tensor {name!r} has type {kind}, which the installed gguf package does not know")

    def _number(self, form: struct.Struct, what: str) -> int:
        start = self._skip(form.size, what)
        (number,) = form.unpack_from(self._data, start)
        return int(number)

    def _skip(self, num_bytes: int, what: str) -> int:
        """Skip bytes, and return the position of the first skipped byte."""
        start, left = self._position, len(self._data) - self._position
        if num_bytes > left:
            self.damaged(f"{what} takes {num_bytes} bytes where {left} are left")
        self._position = start + num_bytes
        return start

    def _skip_text(self, what: str) -> int:
        return self._skip(self._number(_U64, what), what)

    def _skip_texts(self, number: int, key: str) -> None:
        if 8 * number > len(self._data) - self._position:
            self.damaged(f"{key} has {number} texts")
        if number > MAX_ITEMS:
            raise CheckpointError(f"{self._path}: {key} has {number} texts, more than {MAX_ITEMS}")
        data, position, unpack = self._data, self._position, _U64.unpack_from
        last = len(data) - 8
        for item in range(number):
            if position > last:
                self.damaged(f"{key} ends after {item} of {number} texts")
            position += 8 + unpack(data, position)[0]
        self._skip(position - self._position, key)


@functools.cache
def _kind_of(number: int) -> gguf.GGMLQuantizationType:
    """Return the tensor type with a number. Raises ValueError if there is no such type."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number)


@functools.cache
def _block_of(kind: gguf.GGMLQuantizationType) -> tuple[int, int]:
    """Return the number of values and the number of bytes of a block of this type."""
    from gguf import GGML_QUANT_SIZES

    values, num_bytes = GGML_QUANT_SIZES[kind]
    return values, num_bytes
