"""The layout of experts within a replica: whole experts on different ranks (expert parallelism), or a slice of every
expert on each rank (tensor parallelism).

A formula estimates the time of one layer for steps of three sizes. It assumes that tokens choose experts at random,
with equal probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import DeviceName
from moeserve.config.settings import DtypeName, ParallelSettings, QuantizationName
from moeserve.errors import SettingsError, shown

MIN_GAIN = 1.05  # minimum average gain over the three sizes; smaller gains are within the error of the formula
MAX_LOSS = 0.98  # minimum gain at each of the sizes
MIN_GPU_SLICE = 256  # minimum inner values per slice; with fewer, the loops of products are too short to hide latency
GPU_SLICE_UNIT = 128  # slices are multiples of this, as blocks of 8-bit floats are; this also keeps rows aligned
BYTES_OF_DTYPE: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
BYTES_OF_QUANTIZATION: dict[QuantizationName, float] = {"int8": 1.0, "int4": 5 / 8, "fp8": 1.0, "mxfp4": 17 / 32}


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The number and sizes of a layer's experts."""

    num_experts: int
    top_k: int  # experts of each token
    hidden_size: int  # size of an expert's inputs and outputs
    width: int  # intermediate size of an expert
    num_matrices: int = 3  # 3: gate, up and down; 2: up and down
    slices_alike: tuple[int, ...] = (1,)  # numbers of slices that give the same bytes as whole experts on CPUs
    has_output_norm: bool = False  # each expert's output is normalised, which needs the whole output


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The number formats of a model, and the device that computes with them."""

    device: DeviceName
    dtype: DtypeName
    quantization: QuantizationName | None
    keeps_bytes: bool  # results must not depend on the layout: on request, and on CPUs with kernels for this dtype

    @property
    def value_bytes(self) -> int:
        return BYTES_OF_DTYPE[self.dtype]

    @property
    def weight_bytes(self) -> float:
        return self.value_bytes if self.quantization is None else BYTES_OF_QUANTIZATION[self.quantization]


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Estimated seconds for experts and the exchange of rows, in one layer of one step, with both layouts."""

    whole: float  # whole experts on different ranks
    sliced: float

    @property
    def gain(self) -> float:
        """Time with whole experts divided by time with slices."""
        return self.whole / self.sliced


def resolve_expert_parallel(
    parallel: ParallelSettings,
    shape: ExpertShape | None,
    numbers: Numbers,
    *,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
) -> bool:
    """Return True if ranks hold whole experts, False if they hold a slice of each expert.

    Args:
        shape: the experts; None: the model has no experts, or its experts are never sliced.

    Raises:
        SettingsError: slices are required but impossible.
    """
    if parallel.num_expert_ranks == 1 or parallel.expert_parallel is True or shape is None:
        return True
    refusal = _refusal_to_slice(parallel, shape, numbers)
    if refusal is not None and parallel.expert_parallel is False:
        raise SettingsError(
            "expert_parallel=False gives each rank of a single replica a slice of every expert, which is not possible "
            f"with {refusal}; use expert_parallel=True or 'auto'"
        )
    if refusal is not None or parallel.expert_parallel is False:
        return refusal is not None
    return not slicing_pays(
        shape, parallel.tensor_parallel_size, numbers, num_tokens_of_steps=(1, max_num_seqs, max_num_batched_tokens)
    )


def slicing_pays(
    shape: ExpertShape, num_ranks: int, numbers: Numbers, *, num_tokens_of_steps: tuple[int, int, int]
) -> bool:
    """Return True if slices are faster on average (`MIN_GAIN`) and not much slower in any step (`MAX_LOSS`).

    Args:
        num_tokens_of_steps: numbers of tokens in a decode step of one request, in a decode step of many requests, and
            in a step with prompts.
    """
    if numbers.device == "cuda" and shape.width // num_ranks < MIN_GPU_SLICE:
        return False
    gains = [layer_seconds(shape, num_ranks, num_tokens, numbers).gain for num_tokens in num_tokens_of_steps]
    return math.prod(gains) ** (1 / len(gains)) >= MIN_GAIN and min(gains) >= MAX_LOSS


def _refusal_to_slice(parallel: ParallelSettings, shape: ExpertShape, numbers: Numbers) -> str | None:
    """Return the setting that prevents slicing experts, for an error message; None if they can be sliced."""
    num_slices = parallel.tensor_parallel_size
    if parallel.data_parallel_size > 1:
        return f"data_parallel_size={parallel.data_parallel_size}"
    if parallel.num_redundant_experts:
        return f"num_redundant_experts={parallel.num_redundant_experts}"
    if parallel.expert_loads is not None:
        return f"expert_loads={shown(parallel.expert_loads)}"
    if parallel.rebalance != "off":
        return f"rebalance={shown(parallel.rebalance)}"
    if parallel.dispatcher not in ("auto", "allgather"):
        return f"dispatcher={parallel.dispatcher!r}"
    if parallel.changed_deepep_setting is not None:
        return parallel.changed_deepep_setting
    if shape.has_output_norm:
        return "norms of the outputs of experts"
    if numbers.quantization == "mxfp4":
        return "quantization='mxfp4', whose experts stay as they are stored"
    if numbers.device == "cuda":
        if numbers.keeps_bytes:
            return "batch_invariant=True on a GPU"
        if shape.width % (num_slices * GPU_SLICE_UNIT):
            return f"tensor_parallel_size={num_slices}: slices of {shape.width} are no multiples of {GPU_SLICE_UNIT}"
    elif numbers.keeps_bytes and num_slices not in shape.slices_alike:
        alike = ", ".join(map(str, shape.slices_alike))
        return (
            f"tensor_parallel_size={num_slices}: experts of width {shape.width} have the same bytes with {alike} slices"
        )
    return None


def layer_seconds(shape: ExpertShape, num_ranks: int, num_tokens: int, numbers: Numbers) -> LayerSeconds:
    """Return the time of a layer on the slowest rank, in a step in which the replica has `num_tokens` tokens."""
    speed, value_bytes = DEVICES[numbers.device].speed, numbers.value_bytes
    touched = expected_touched(shape.num_experts, shape.top_k, num_tokens)
    fullest = expected_fullest(shape.num_experts, num_ranks, touched)
    num_pairs, size, elsewhere = num_tokens * shape.top_k, shape.hidden_size, 1 - 1 / num_ranks
    parameters = shape.num_matrices * size * shape.width

    def compute(num_experts: float, num_rows: float, num_slices: int) -> float:
        weights = num_experts * parameters / num_slices * numbers.weight_bytes / speed.memory
        products = 2 * num_rows * parameters / num_slices / speed.products
        values = num_rows * 2 * (size + shape.width / num_slices) * value_bytes / speed.memory
        return max(weights, products) + values

    gathered = num_tokens * elsewhere * size * value_bytes  # the rows of other ranks' tokens
    returned = num_pairs / num_ranks * elsewhere * size * value_bytes
    whole = compute(fullest, num_pairs * fullest / touched, 1) + (gathered + returned) / speed.links
    # A rank adds the outputs of its share of the tokens from all ranks. To keep the bytes, it receives the outputs of
    # each pair separately, in float32.
    added = (num_pairs * 4 if numbers.keeps_bytes else num_tokens * value_bytes) * elsewhere * size
    ordered = num_pairs * size * 4 * 2 / speed.memory if numbers.keeps_bytes else 0.0  # each pair is copied once
    sliced = compute(touched, num_pairs, num_ranks) + ordered + (gathered + added) / speed.links
    return LayerSeconds(whole=whole, sliced=sliced)


def expected_touched(num_experts: int, top_k: int, num_tokens: int) -> int:
    """Return the expected number of distinct experts that the tokens of a step choose, rounded."""
    return round(num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))


def expected_fullest(num_experts: int, num_ranks: int, num_touched: int) -> float:
    """Return the expected maximum, over the ranks, of the number of touched experts on a rank.

    The touched experts are a random set. The number of sets with at most m experts on each rank is the coefficient of
    x ** num_touched in a product over the ranks. The factor of a rank is (1 + x) ** (experts of the rank), without the
    powers above x ** m.
    """
    held = [num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks)]
    least, num_sets = -(-num_touched // num_ranks), math.comb(num_experts, num_touched)
    expected = float(least)
    for most in range(least, min(held[0], num_touched)):  # the fullest rank has more than `most` with some chance
        series = [1] + [0] * num_touched
        for count in held:
            terms = [math.comb(count, chosen) for chosen in range(min(count, most) + 1)]
            series = [
                sum(term * series[total - chosen] for chosen, term in enumerate(terms[: total + 1]))
                for total in range(num_touched + 1)
            ]
        expected += 1 - series[num_touched] / num_sets
    return expected
