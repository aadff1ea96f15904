"""Random weights in the types of GGUF that stay as they are stored, and their integers, by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np

# Of each type: the inputs of a block, and where the float16 factors of its scales and of its minima are
KINDS: dict[str, tuple[int, int, int | None]] = {
    "Q8_0": (32, 0, None),
    "Q4_K": (256, 0, 2),
    "Q5_K": (256, 0, 2),
    "Q6_K": (256, 208, None),
    "IQ4_XS": (256, 0, None),
    "Q5_0": (32, 0, None),
    "Q4_0": (32, 0, None),
    "IQ4_NL": (32, 0, None),
    "Q5_1": (32, 0, 2),
    "Q4_1": (32, 0, 2),
}
MEAN_CODES = {"Q4_K": 7.5, "Q5_K": 15.5, "Q5_1": -15.5, "Q4_1": -7.5}  # negative: minima are stored to be added


def random_blocks(kind: str, shape: tuple[int, ...], std: float = 1.0, seed: int = 0) -> np.ndarray:
    """Return blocks [*shape[:-1], bytes] of random codes and scales, whose values have about this deviation."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    num_blocks = shape[-1] // KINDS[kind][0]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape[:-1], num_blocks * num_bytes), dtype=np.uint8)
    ratios = generator.choice(np.float32([-2, -1, 1, 2]) if kind not in MEAN_CODES else np.float32([1, 2]), (2**10,))
    with_factors(kind, blocks, ratios, MEAN_CODES.get(kind, 0) * ratios)
    size = float(values_of(kind, blocks.reshape(-1, blocks.shape[-1])[:64]).std())
    with_factors(kind, blocks, ratios * std / size, MEAN_CODES.get(kind, 0) * ratios * std / size)
    return blocks


def with_factors(kind: str, blocks: np.ndarray, factors: np.ndarray, of_minima: np.ndarray) -> np.ndarray:
    """Set the factors of all blocks in place, repeating those given, and return the blocks."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    single = blocks.reshape(-1, num_bytes)
    for place, chosen in ((KINDS[kind][1], factors), (KINDS[kind][2], of_minima)):
        if place is not None:
            halves = np.resize(chosen, len(single)).astype(np.float16)
            single[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


def factors_of(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of scales and of minima of each block [..., blocks] as float32; zeros if there are none."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    single = blocks.reshape(*blocks.shape[:-1], -1, num_bytes)
    halves = [
        np.zeros(single.shape[:-1], np.float32)
        if place is None
        else single[..., place : place + 2].copy().view(np.float16)[..., 0].astype(np.float32)
        for place in KINDS[kind][1:]
    ]
    return halves[0], halves[1]


def values_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the dequantised values."""
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def integers_of(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scale times code, and the minimum, of each input, both as int64."""
    one, zero = np.float32([1]), np.float32([0])
    codes = values_of(kind, with_factors(kind, blocks.copy(), one, zero))
    minima = -values_of(kind, with_factors(kind, blocks.copy(), zero, one)) if kind in MEAN_CODES else 0 * codes
    for integers in (codes, minima):
        assert np.array_equal(integers, integers.round())
    return codes.astype(np.int64), minima.astype(np.int64)
