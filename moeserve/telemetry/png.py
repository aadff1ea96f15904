"""Pictures as PNG files: coloured boxes, and small capitals to name them. Knows nothing of what they show.

A picture is an array of indices into a palette. The format is that of the PNG specification (ISO/IEC 15948), in its
kind with a palette and without filters.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeserve.telemetry.heat import Colour

Pixels = npt.NDArray[np.uint8]  # [height, width]: places in the palette

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GLYPH_WIDTH, GLYPH_HEIGHT = 5, 7
_BITS_PER_PIXEL, _WITH_PALETTE = 8, 3

# By row from the top, a hexadecimal number whose five bits are the pixels, the left one highest.
_GLYPHS = {
    " ": "00 00 00 00 00 00 00",
    "0": "0E 11 13 15 19 11 0E",
    "1": "04 0C 04 04 04 04 0E",
    "2": "0E 11 01 06 08 10 1F",
    "3": "1E 01 01 0E 01 01 1E",
    "4": "02 06 0A 12 1F 02 02",
    "5": "1F 10 1E 01 01 11 0E",
    "6": "06 08 10 1E 11 11 0E",
    "7": "1F 01 02 04 08 08 08",
    "8": "0E 11 11 0E 11 11 0E",
    "9": "0E 11 11 0F 01 02 0C",
    "A": "0E 11 11 1F 11 11 11",
    "B": "1E 11 11 1E 11 11 1E",
    "C": "0E 11 10 10 10 11 0E",
    "D": "1E 11 11 11 11 11 1E",
    "E": "1F 10 10 1E 10 10 1F",
    "F": "1F 10 10 1E 10 10 10",
    "G": "0E 11 10 17 11 11 0F",
    "H": "11 11 11 1F 11 11 11",
    "I": "0E 04 04 04 04 04 0E",
    "J": "07 02 02 02 02 12 0C",
    "K": "11 12 14 18 14 12 11",
    "L": "10 10 10 10 10 10 1F",
    "M": "11 1B 15 15 11 11 11",
    "N": "11 19 19 15 13 13 11",
    "O": "0E 11 11 11 11 11 0E",
    "P": "1E 11 11 1E 10 10 10",
    "Q": "0E 11 11 11 15 12 0D",
    "R": "1E 11 11 1E 14 12 11",
    "S": "0F 10 10 0E 01 01 1E",
    "T": "1F 04 04 04 04 04 04",
    "U": "11 11 11 11 11 11 0E",
    "V": "11 11 11 11 11 0A 04",
    "W": "11 11 11 15 15 1B 11",
    "X": "11 11 0A 04 0A 11 11",
    "Y": "11 11 0A 04 04 04 04",
    "Z": "1F 01 02 04 08 10 1F",
    ".": "00 00 00 00 00 0C 0C",
    ",": "00 00 00 00 0C 04 08",
    ":": "00 0C 0C 00 0C 0C 00",
    "/": "01 01 02 04 08 10 10",
    "-": "00 00 00 1F 00 00 00",
    "<": "02 04 08 10 08 04 02",
    ">": "08 04 02 01 02 04 08",
}


def encode(pixels: Pixels, palette: Sequence[Colour]) -> bytes:
    """A PNG file."""
    height, width = pixels.shape
    assert 0 < len(palette) <= 256
    assert int(pixels.max()) < len(palette)
    header = struct.pack(">IIBBBBB", width, height, _BITS_PER_PIXEL, _WITH_PALETTE, 0, 0, 0)
    no_filter = np.zeros((height, 1), dtype=np.uint8)
    rows = np.hstack([no_filter, pixels]).tobytes()
    chunks = [
        _chunk(b"IHDR", header),
        _chunk(b"PLTE", bytes(channel for colour in palette for channel in colour)),
        _chunk(b"IDAT", zlib.compress(rows, 9)),
        _chunk(b"IEND", b""),
    ]
    return SIGNATURE + b"".join(chunks)


def write(pixels: Pixels, left: int, top: int, text: str, ink: int, size: int) -> None:
    """Puts a line of text into a picture, in capitals, as far as it has room.

    Args:
        pixels: [height, width], written to.
        left: pixels to the left of the text.
        top: pixels above it.
        text: of the letters and signs that there are.
        ink: place in the palette.
        size: pixels of the picture for one of a letter.
    """
    for number, letter in enumerate(text.upper()):
        rows = [int(row, 16) for row in _GLYPHS[letter].split()]
        bits = [[row >> (GLYPH_WIDTH - 1 - column) & 1 for column in range(GLYPH_WIDTH)] for row in rows]
        is_inked = np.kron(np.array(bits, dtype=bool), np.ones((size, size), dtype=bool))
        start = left + number * (GLYPH_WIDTH + 1) * size
        room = pixels[top : top + GLYPH_HEIGHT * size, start : start + GLYPH_WIDTH * size]
        room[is_inked[: room.shape[0], : room.shape[1]]] = ink


def text_width(text: str, size: int) -> int:
    """In pixels."""
    return (len(text) * (GLYPH_WIDTH + 1) - 1) * size


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
