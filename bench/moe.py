"""The experts of one layer, at the shapes of published models, compared with the machine's limit.

- *rate*: rows per second of sorting by expert, both products and the weighted sum, with random routing. Rows and
  routing are new for each call. moeserve runs the code of its MoE layer, vLLM its fused operation, kt-kernel its BF16
  experts. A rate is the median of several calls, after one that is not counted. Before an engine is timed, its results
  are checked against float32 (`peers/adapters/experts.py`).
- *limit*: as in `throughput.py`: the bytes of the experts that the rows use on average, or the multiply-adds.

All engines of a shape are loaded at once; a layer of Mixtral-8x7B takes 2.8 GB in each.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import torch
from torch import Tensor

from moeserve.bench.costs import FORMATS, WeightFormat
from moeserve.bench.engines import QUANTIZATIONS, WEIGHT_FORMATS, Engine, own_engine, start_all
from moeserve.bench.harness import (
    Row,
    add_choices,
    at_least,
    interleave_with_limits,
    make_parser,
    ratios,
)
from moeserve.bench.limits import LimitProbe, MachineLimits, Work
from moeserve.bench.peers.adapters.experts import Shape, experts_method
from moeserve.bench.peers.environments import PeerError
from moeserve.bench.peers.peers import EXPERTS_PEERS, start_experts_peer
from moeserve.bench.report import show_and_save
from moeserve.config.settings import QuantizationName
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import share_experts
from moeserve.layers.moe.dispatch.base import PackedTokens
from moeserve.layers.moe.experts import Experts
from moeserve.layers.weights import allocate_weights
from moeserve.ops import pairs as pairs_ops
from moeserve.ops.native import set_num_threads
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.products.interface import MXFP4_GROUP, OpenWeights, RowGroups
from moeserve.ops.rows.activations import SwiGLU
from moeserve.ops.select import select_backend

# E experts, D model width, F expert width, T rows, K experts of a row

OWN = {**QUANTIZATIONS, "moeserve-mxfp4": "mxfp4"}  # whole models would need an MXFP4 checkpoint
NAMES = (*OWN, *EXPERTS_PEERS)
SHAPES = {
    "Mixtral-8x7B": Shape(num_experts=8, hidden=4096, width=14336, top_k=2),
    "DeepSeek-V2-Lite": Shape(num_experts=64, hidden=2048, width=1408, top_k=6),
    "Qwen3-30B-A3B": Shape(num_experts=128, hidden=2048, width=768, top_k=8),
}
NUM_ROWS = (1, 16, 64, 256, 1024)
SAMPLE_SECONDS = 0.3  # duration of a sample at a third of the limit; at least 2 calls
MAX_CALLS = 50
MAX_ERRORS = {None: 0.02, "int8": 0.04, "int4": 0.3, "mxfp4": 0.3}  # relative errors with random weights

E2M1_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # borders between rounded magnitudes

Seconds = Callable[[int, int], list[float]]  # (rows, calls) -> seconds of each call


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moe", __doc__, rounds=5)
    add_choices(parser, "--shape", SHAPES, "all")
    parser.add_argument("--rows", type=at_least(1), action="append", help=f"repeatable (default: {NUM_ROWS})")
    add_choices(parser, "--engine", NAMES, "all that are installed")
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    probe = LimitProbe()
    for shape_name in options.shape or SHAPES:
        shape = SHAPES[shape_name]
        with ExitStack() as stack:
            start = functools.partial(start_experts, shape=shape, stack=stack)
            engines, left_out = start_all(options.engine, NAMES, start)
            for num_rows in options.rows or NUM_ROWS:
                row = measure(shape, num_rows, engines, options.rounds, probe)
                row |= {"shape_name": shape_name, "left_out": left_out}
                show_and_save(options.json, [row])


def measure(
    shape: Shape, num_rows: int, engines: Mapping[str, Engine[Seconds]], num_rounds: int, probe: LimitProbe
) -> Row:
    """Return the row of one shape and one number of rows."""
    expected = experts_work(shape, num_rows).seconds(probe.measure())
    num_calls = min(MAX_CALLS, max(2, round(SAMPLE_SECONDS / 3 / expected)))

    def rate(engine: Engine[Seconds]) -> float:
        return num_rows / statistics.median(engine.run(num_rows, num_calls))

    def limit_rate(name: str, limits: MachineLimits) -> float:
        weights = FORMATS[WEIGHT_FORMATS.get(name, "bfloat16")]
        return num_rows / experts_work(shape, num_rows, weights).seconds(limits)

    measures = {name: functools.partial(rate, engine) for name, engine in engines.items()}
    rounds = interleave_with_limits(measures, num_rounds, probe)
    results = {name: engines[name].row(each, functools.partial(limit_rate, name)) for name, each in rounds.items()}
    return {
        "benchmark": "moe",
        "shape": asdict(shape),
        "num_rows": num_rows,
        "num_calls": num_calls,
        "engines": results,
        "ratios": ratios(results),
    }


def experts_work(shape: Shape, num_rows: int, weights: WeightFormat = FORMATS["bfloat16"]) -> Work:
    """Return the work of one call. Experts without rows are not read."""
    weights_per_expert = 3 * shape.hidden * shape.width
    num_read = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** num_rows)
    return Work(
        num_bytes=num_read * weights_per_expert * weights.bits / 8,
        operations=2 * num_rows * shape.top_k * weights_per_expert,
        multiplies_bytes=weights.multiplies_bytes,
    )


def start_experts(name: str, *, shape: Shape, stack: ExitStack) -> Engine[Seconds]:
    """Load a layer of random weights, with torch's current number of threads. Closing the stack closes it.

    Raises:
        PeerError: a peer is not installed, or cannot run these experts.
    """
    if name in OWN:
        return own_engine(own_experts(shape, OWN[name]))
    peer = stack.enter_context(start_experts_peer(name, asdict(shape), torch.get_num_threads()))
    return Engine(peer.version, peer.settings, peer.experts_seconds)


def fill_mxfp4(weights: OpenWeights, source_eOI: Tensor) -> None:
    """Round weights to MXFP4. The scale is the least power of two for which the largest of 32 values is below 6.5."""
    assert weights.scales_eGB is not None
    for codes_OI, exponents_OG, source_OI in zip(weights.weight_eOI, weights.scales_eGB, source_eOI, strict=True):
        groups_OG32 = source_OI.float().unflatten(1, (-1, MXFP4_GROUP))
        powers_OG1 = (groups_OG32.abs().amax(-1, keepdim=True) / 6.5).log2().ceil()
        scaled_OI = (groups_OG32 / powers_OG1.exp2()).flatten(1)
        code_OI = torch.bucketize(scaled_OI.abs(), E2M1_BORDERS).byte() | scaled_OI.signbit().byte() << 3
        codes_OI.copy_(code_OI[:, 0::2] | code_OI[:, 1::2] << 4)
        exponents_OG.copy_(powers_OG1[..., 0] + 127)


@torch.inference_mode()
def own_experts(shape: Shape, quantization: QuantizationName | None) -> Seconds:
    """Return moeserve's experts, with the same rows and routing as the adapters of other engines."""
    device = torch.device("cpu")
    context = BuildContext(select_backend(device), groups_of_one_rank(), torch.bfloat16, device, quantization)
    pairs = pairs_ops.make(context.backend)

    def make(gate_up_EFD: Tensor, down_EDF: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        share = share_experts(shape.width, 1, context)
        experts = Experts(shape.num_experts, shape.hidden, share, SwiGLU(), context, has_bias=False)
        allocate_weights(experts)
        for weights, source in ((experts.gate_up, gate_up_EFD), (experts.down, down_EDF)):
            if weights.is_mxfp4:
                fill_mxfp4(weights.open, source)
            else:
                weights.open.weight_eOI.copy_(source)
            weights.pack()

        @torch.inference_mode()
        def run(rows_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
            """Run the same code as `moe/dispatch/local.py` before and after the experts."""
            pair_of_row_R, counts_E = pairs.sort(ids_TK.long().flatten(), Keys(shape.num_experts))
            rows_RD = pairs.gather(rows_TD, pair_of_row_R, shape.top_k)
            output_RD = experts(PackedTokens(rows_RD, RowGroups(counts_E)))
            return pairs.weighted_sum(output_RD, pair_of_row_R, weights_TK, rows_TD.dtype)

        return run

    method = experts_method(shape, make)

    def seconds(num_rows: int, num_calls: int) -> list[float]:
        answer = method(num_rows=num_rows, num_runs=num_calls)
        if not answer["relative_error"] < MAX_ERRORS[quantization]:
            raise PeerError(f"moeserve's results differ from float32 by {answer['relative_error']:.1%}")
        return [float(each) for each in answer["seconds"]]

    return seconds
