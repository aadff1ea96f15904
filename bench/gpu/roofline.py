"""The roofline of a step on an H100: the attainable time of its launches, and the bound from its bytes and operations.

    python -m moeserve.bench.gpu.roofline [--only TEXT] [--launches]

Nothing is measured. Each launch takes `LAUNCH_SECONDS`, plus the time for its bytes or for its operations, whichever is
longer, at the rates of the data sheet times the fraction of multiprocessors that have a program. Launches of torch
are assumed to fill the GPU. Losses inside a kernel are not included, so the figures are upper bounds of performance.
The *bound* counts only products and attention: the weights that have rows, keys and values of contexts, each read once,
recurrent states, read and written, and the operations. Programs that read the same keys at the same time are assumed to
share them in the L2 cache.

With expert parallelism, each rank has the same numbers of tokens and pairs. A token is sent in 16 bits to at most as
many other ranks as it has groups or experts, and back, at `EXCHANGE_RATE`. Nothing overlaps with this exchange.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.costs import GpuLimits, attended_positions
from moeserve.bench.gpu.launches import decode, prefill, record_step
from moeserve.bench.gpu.recording import H100_MULTIPROCESSORS, Launch, TensorFacts
from moeserve.bench.harness import make_parser, show
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.moe.layer import MoEConfig
from moeserve.step_inputs import ChunkSpan
from moeserve.triton_kernels.linear_attention_tiles import LEAST_ROWS

H100 = GpuLimits(copy_bandwidth=3.35e12, bf16_rate=989e12, fp8_rate=1979e12)  # SXM, data sheet
EXCHANGE_RATE = 450e9  # bytes/s of one direction of NVLink
LAUNCH_SECONDS = 2e-6  # from the end of a kernel to the start of the next one in a CUDA graph
RESULT_SIZE = 2  # bytes

PUBLISHED = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Case:
    """A step of one rank."""

    model: str
    title: str
    spans: list[ChunkSpan]
    quantization: QuantizationName | None = None
    num_ranks: int = 1  # number of ranks that the experts are divided over

    @property
    def name(self) -> str:
        ranks = f", EP {self.num_ranks}" if self.num_ranks > 1 else ""
        return f"{self.model} {self.quantization or 'bf16'}{ranks}, {self.title}"


def cases() -> Iterator[Case]:
    one_rank = "Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "gpt-oss-20b"
    for model, num_ranks in (*((name, 1) for name in one_rank), ("DeepSeek-V3", 8)):
        steps = {f"decode {batch} x 8192": decode(batch, 8192) for batch in (1, 64, 128)}
        steps["4096 tokens, context 32768"] = prefill(4096, 32768)
        formats: tuple[QuantizationName | None, ...] = ("mxfp4",) if model == "gpt-oss-20b" else (None, "fp8")
        for quantization in formats:
            for title, spans in steps.items():
                yield Case(model, title, spans, quantization, num_ranks)


@dataclass(frozen=True)
class Cost:
    """The bytes that one launch moves, and its operations."""

    num_bytes: float
    operations: float = 0.0
    dtype: torch.dtype = torch.bfloat16  # dtype of the operations
    needed_bytes: float | None = None  # bytes in the step's bound; None: the launch is not part of it
    num_programs: int | None = None
    needed_operations: float | None = None  # None: all operations

    @property
    def fill(self) -> float:
        """Fraction of the multiprocessors that have a program."""
        return min(1.0, (self.num_programs or H100_MULTIPROCESSORS) / H100_MULTIPROCESSORS)

    def seconds(self, limits: GpuLimits) -> float:
        return LAUNCH_SECONDS + self._seconds(self.num_bytes, self.operations, limits) / self.fill

    def bound(self, limits: GpuLimits) -> float:
        operations = self.operations if self.needed_operations is None else self.needed_operations
        return 0.0 if self.needed_bytes is None else self._seconds(self.needed_bytes, operations, limits)

    def _seconds(self, num_bytes: float, operations: float, limits: GpuLimits) -> float:
        rates = {torch.float32: limits.float32_rate, torch.float8_e4m3fn: limits.fp8_rate}
        return max(num_bytes / limits.copy_bandwidth, operations / rates.get(self.dtype, limits.bf16_rate))


@dataclass(frozen=True)
class Step:
    """The properties of a case that its launches do not contain."""

    spans: Sequence[ChunkSpan]
    num_tokens: int
    top_k: int
    num_experts: int
    num_ranks: int

    def share_with_rows(self) -> float:
        """Return the fraction of a rank's experts that have rows from any rank, with random routing."""
        return 1 - (1 - self.top_k / self.num_experts) ** (self.num_tokens * self.num_ranks)


def cost_of(launch: Launch, step: Step) -> Cost:
    rule = RULES.get(launch.name)
    if rule is not None:
        return rule(launch, step)
    return Cost(sum(each.nbytes for each in tensors_of(launch.arguments)), num_programs=launch.num_programs)


def tensors_of(value: Any) -> Iterator[TensorFacts]:
    """Yield all tensors except caches, of which a launch touches only a small part."""
    if isinstance(value, TensorFacts):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if "cache" not in name:
                yield from tensors_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from tensors_of(each)


def dense_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of a torch product, which reads rows and weights once."""
    results, (rows, weights, *_) = launch.arguments["results"], launch.arguments["arguments"]
    operations = 2.0 * math.prod(results.shape) * rows.shape[-1]
    num_bytes = sum(each.nbytes for each in tensors_of(launch.arguments))
    return Cost(num_bytes, operations, rows.dtype, weights.nbytes)


def lookup_cost(launch: Launch, step: Step) -> Cost:
    return Cost(2 * launch.arguments["results"].nbytes)


def grouped_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of a grouped product, which reads the experts with rows."""
    arguments = launch.arguments
    weight, output = arguments["weight_ptr"], arguments["output_ptr"]
    num_weights, num_outputs, _ = weight.shape
    weight_bytes = sum(arguments[name].nbytes for name in ("weight_ptr", "weight_scale_ptr") if arguments[name])
    if num_weights > 1:
        weight_bytes *= step.share_with_rows() / step.num_ranks
    num_rows, num_inputs = math.prod(output.shape[:-1]), arguments["num_inputs"]
    others = [arguments[name] for name in ("source_ptr", "source_scale_ptr", "output_ptr", "indices_ptr")]
    num_bytes = weight_bytes + sum(each.nbytes for each in others if each)
    operations = 2.0 * num_rows * num_outputs * num_inputs
    return Cost(num_bytes, operations, arguments["source_ptr"].dtype, weight_bytes, launch.num_programs)


def paged_cost(launch: Launch, step: Step, chunks: Sequence[ChunkSpan], other_bytes: float, num_parts: int = 1) -> Cost:
    """Return the cost of paged attention: keys and values read once, queries, and the sums that are written."""
    arguments = launch.arguments
    parts = [arguments[name] for name in ("key_cache_ptr", "value_cache_ptr", "key_scales_ptr", "value_scales_ptr")]
    num_blocks, _, block_size, key_size = parts[0].shape
    position_bytes = sum(each.nbytes // (num_blocks * block_size) for each in parts if each)
    value_size = arguments["VALUE_SIZE"]
    num_heads, window = arguments["num_heads"], arguments["WINDOW"]
    cache_bytes = num_products = 0.0  # of a query and a key
    for span in chunks:
        first = 0 if window is None else max(0, span.context_len - span.num_rows + 1 - window)
        cache_bytes += (span.context_len - first) * position_bytes
        num_products += num_heads * attended_positions(span.num_rows, span.context_len, window)
    query_bytes = arguments["query_ptr"].nbytes * sum(span.num_rows for span in chunks) / step.num_tokens
    num_bytes = cache_bytes + query_bytes + other_bytes
    operations, needed = (2 * num_products * (number * key_size + value_size) for number in (num_parts, 1))
    return Cost(
        num_bytes,
        operations,
        needed_bytes=cache_bytes,
        num_programs=launch.num_programs,
        needed_operations=needed,
    )


def num_splits(launch: Launch, step: Step) -> int:
    """Return the number of splits that have positions, over all chunks of one row."""
    arguments = launch.arguments
    window, piece_size, most = (arguments[name] for name in ("WINDOW", "PIECE_SIZE", "num_splits"))
    lens = [span.context_len for span in step.spans if span.num_rows == 1]
    pieces = [-(-(each if window is None else min(each, window + piece_size - 1)) // piece_size) for each in lens]
    num_slots = arguments["partial_ptr"].shape[0]
    pieces_each = 1
    if arguments["balanced_ptr"] is not None and num_slots < len(pieces) * most:
        pieces_each = -(-sum(pieces) // (num_slots - len(pieces)))
    return sum(min(-(-each // pieces_each), most) for each in pieces)


def partial_bytes(launch: Launch, step: Step) -> float:
    """Return the bytes of the partial sums of all splits, and of the merged results."""
    partial = launch.arguments["partial_ptr"]
    return partial.shape[1] * (partial.shape[2] + 2) * partial.dtype.itemsize * num_splits(launch, step)


def split_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of chunks of one row. Each part of the values computes the scores again."""
    chunks = [span for span in step.spans if span.num_rows == 1]
    return paged_cost(launch, step, chunks, partial_bytes(launch, step), launch.arguments["NUM_PARTS"])


def merge_cost(launch: Launch, step: Step) -> Cost:
    num_merged = sum(span.num_rows == 1 for span in step.spans)
    num_bytes = partial_bytes(launch, step) + launch.arguments["output_ptr"].nbytes * num_merged / step.num_tokens
    return Cost(num_bytes, num_programs=launch.num_programs)


def tile_cost(launch: Launch, step: Step) -> Cost:
    chunks = [span for span in step.spans if span.num_rows >= launch.arguments["LEAST_ROWS"]]
    return paged_cost(launch, step, chunks, launch.arguments["output_ptr"].nbytes)


def expanded_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of attention to one piece of the contexts, in proportion to its positions."""
    arguments = launch.arguments
    keys, values, vectors = (arguments[name] for name in ("key_ptr", "value_ptr", "vectors_ptr"))
    num_heads, num_positions, key_size = keys.shape
    elements = key_size + arguments["query_extra_ptr"].shape[-1] + values.shape[-1]
    share = num_positions / sum(span.context_len for span in step.spans)
    attended = sum(attended_positions(span.num_rows, span.context_len, None) for span in step.spans)
    num_bytes = sum(each.nbytes for each in tensors_of(arguments))
    operations = 2.0 * num_heads * elements * attended * share
    return Cost(num_bytes, operations, needed_bytes=vectors.nbytes, num_programs=launch.num_programs)


def gather_cost(launch: Launch, step: Step) -> Cost:
    return Cost(2 * launch.arguments["output_ptr"].nbytes, num_programs=launch.num_programs)


def route_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of a router, which reads its weights once if it computes the logits. Further tokens find them in
    the L2 cache.
    """
    num_bytes, weight = sum(each.nbytes for each in tensors_of(launch.arguments)), launch.arguments["weight_ptr"]
    if weight is None:
        return Cost(num_bytes, num_programs=launch.num_programs)
    operations = 2.0 * step.num_tokens * math.prod(weight.shape)
    return Cost(num_bytes, operations, torch.float32, weight.nbytes, launch.num_programs)


def state_cost(launch: Launch, step: Step) -> Cost:
    """Return the cost of linear attention with states, which are read and written once.

    An operation in TF32 counts twice. The bound has three products with the state for each token.
    """
    states = launch.arguments["states_ptr"]
    chunks = [span for span in step.spans if (span.num_rows >= LEAST_ROWS) == (launch.name == "attend_tiles_kernel")]
    num_tokens = sum(span.num_rows for span in chunks)
    state_bytes = 2.0 * states.nbytes * len(chunks) / len(step.spans)
    other_bytes = sum(each.nbytes for each in tensors_of(launch.arguments)) - states.nbytes
    operations = 6.0 * num_tokens * math.prod(states.shape[1:])
    return Cost(
        state_bytes + other_bytes * num_tokens / step.num_tokens,
        operations * 2,
        needed_bytes=state_bytes,
        num_programs=launch.num_programs,
        needed_operations=operations,
    )


# All other launches move each of their tensors once.
RULES: dict[str, Callable[[Launch, Step], Cost]] = {
    **{f"torch {name}": dense_cost for name in ("linear", "mm", "bmm", "matmul")},
    **{f"torch {name}": lookup_cost for name in ("embedding", "index", "new_full", "full", "new_zeros", "zeros")},
    "grouped_matmul_kernel": grouped_cost,
    "attend_split_kernel": split_cost,
    "merge_splits_kernel": merge_cost,
    "attend_tile_kernel": tile_cost,
    "attend_expanded_kernel": expanded_cost,
    "gather_vectors_kernel": gather_cost,
    "route_kernel": route_cost,
    "recurrence_kernel": state_cost,
    "attend_tiles_kernel": state_cost,
}


@dataclass(frozen=True)
class Roofline:
    """The launches of a step by name, with their costs."""

    costs: dict[str, list[Cost]]
    limits: GpuLimits

    def seconds(self) -> float:
        return sum(cost.seconds(self.limits) for costs in self.costs.values() for cost in costs)

    def bounds(self) -> dict[str, float]:
        return {name: sum(cost.bound(self.limits) for cost in costs) for name, costs in self.costs.items()}

    def num_launches(self) -> int:
        return sum(map(len, self.costs.values()))

    def losses(self) -> dict[str, float]:
        """Return the seconds above the bound by term, the largest first. The overheads of all launches are one term."""
        found = {"launches": LAUNCH_SECONDS * self.num_launches()}
        for name, bound in self.bounds().items():
            found[name] = sum(cost.seconds(self.limits) - LAUNCH_SECONDS for cost in self.costs[name]) - bound
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def roofline(case: Case, config: dict[str, Any], limits: GpuLimits = H100) -> Roofline:
    """Record the launches of a case, and estimate their costs. `config` is the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        parts = record_step(Path(folder), case.spans, case.quantization)
        model = describe(folder).model
    routers = [each.feed_forward.router for each in model.layers if isinstance(each.feed_forward, MoEConfig)]
    num_tokens = sum(span.num_rows for span in case.spans)
    step = Step(case.spans, num_tokens, routers[0].top_k, routers[0].num_experts, case.num_ranks)
    costs: dict[str, list[Cost]] = collections.defaultdict(list)
    for launch in itertools.chain.from_iterable(parts):
        costs[launch.name].append(cost_of(launch, step))
    if case.num_ranks > 1:
        chosen = routers[0].num_chosen_groups if routers[0].num_groups == case.num_ranks else routers[0].top_k
        num_others = min(chosen, case.num_ranks) * (case.num_ranks - 1) / case.num_ranks
        seconds = num_tokens * num_others * model.hidden_size * RESULT_SIZE / EXCHANGE_RATE
        costs["exchange"] = 2 * len(routers) * [Cost(seconds * limits.copy_bandwidth)]
    return Roofline(dict(costs), limits)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu.roofline", __doc__.splitlines()[0], rounds=None, threads=False)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it (default: all)")
    parser.add_argument("--launches", action="store_true", help="a line for each kind of launch")
    options = parser.parse_args(arguments)
    published = json.loads(PUBLISHED.read_text())
    show("| step | launches | bound, ms | expected, ms | share | largest losses, ms |")
    show("| :-- | --: | --: | --: | --: | :-- |")
    for case in cases():
        if options.only in case.name:
            found = roofline(case, published[case.model])
            show(line_of(case.name, found))
            if options.launches:
                show_launches(found)
    return 0


def line_of(name: str, found: Roofline) -> str:
    losses = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in list(found.losses().items())[:3])
    bound, seconds = sum(found.bounds().values()), found.seconds()
    times = f"{1e3 * bound:.2f} | {1e3 * seconds:.2f} | {bound / seconds:.0%}"
    return f"| {name} | {found.num_launches()} | {times} | {losses} |"


def show_launches(found: Roofline) -> None:
    """Print the sums over the launches of each name, and the minimum number of multiprocessors that they use."""
    show("\n| launch | number | MB | GFLOP | bound, us | expected, us | SMs in use |")
    show("| :-- | --: | --: | --: | --: | --: | --: |")
    seconds = {name: sum(cost.seconds(found.limits) for cost in costs) for name, costs in found.costs.items()}
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        costs = found.costs[name]
        totals = sum(cost.num_bytes for cost in costs) / 1e6, sum(cost.operations for cost in costs) / 1e9
        figures = (*totals, 1e6 * found.bounds()[name], 1e6 * seconds[name])
        num_used = min(cost.fill for cost in costs) * H100_MULTIPROCESSORS
        show(f"| {name} | {len(costs)} | {' | '.join(f'{each:,.1f}' for each in figures)} | {num_used:.0f} |")
    show("")


if __name__ == "__main__":
    sys.exit(main())
