"""Decompression of request bodies in pieces, because a small body can inflate to gigabytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import zstandard

from moeserve.server.errors import ApiError

PIECE_BYTES = 2**18
MAX_WINDOW_BYTES = 2**23  # maximum zstd window, as RFC 8878 recommends for decoders
ACCEPTED = "gzip, deflate, zstd"


def inflated(body: bytes | bytearray, encoding: str) -> Iterator[bytes]:
    """Yield the pieces of a decompressed body, each of at most `PIECE_BYTES` bytes.

    Args:
        encoding: value of the header Content-Encoding.

    Raises:
        ApiError: the encoding is not supported, or the body is not in this encoding.
    """
    name = encoding.strip().lower()
    if name in ("gzip", "x-gzip", "deflate"):
        pieces = _zlib_pieces(body)
    elif name == "zstd":
        pieces = _zstd_pieces(body)
    else:
        message = f"Content-Encoding {encoding[:100]!r} is not supported; send {ACCEPTED}, or the body as it is"
        raise ApiError(415, message, headers={"Accept-Encoding": ACCEPTED})
    try:
        yield from pieces
    except (zlib.error, zstandard.ZstdError, EOFError):
        raise ApiError(400, f"the request's body is not valid {name}, as its Content-Encoding promises") from None


def _zlib_pieces(body: bytes | bytearray) -> Iterator[bytes]:
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detect gzip or zlib from the header
    rest: bytes | bytearray = body
    while not inflater.eof:
        piece = inflater.decompress(rest, PIECE_BYTES)
        rest = inflater.unconsumed_tail
        if not piece and not rest and not inflater.eof:
            raise EOFError
        yield piece


def _zstd_pieces(body: bytes | bytearray) -> Iterator[bytes]:
    inflater = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with inflater.stream_reader(bytes(body)) as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece
