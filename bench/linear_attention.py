"""Linear attention of one layer by the C++ kernel of the CPU: delta rules and state space models.

    python -m moeserve.bench.linear_attention [--threads 1] [--rounds 7] [--json PATH]

With the shapes of Qwen3-Next-80B (gated delta rule), Kimi-Linear-48B (Kimi delta attention) and granite-4.0-h-small
(Mamba-2), in bf16 with float32 states. Steps decode one token for each of some requests, or compute 512 tokens of a
prompt. Calls cycle through 128 MB of states, so that these are not still in the processor's caches.

The limit is the bytes that a call must read and write at the measured read bandwidth, or the multiply-adds with
states at the measured rate of float32 products, whichever takes longer. With one thread, times are processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.harness import Row, call_timer, interleave_beside_limits, make_parser
from moeserve.bench.limits import LimitProbe, Work
from moeserve.bench.report import show_and_save
from moeserve.ops import linear_attention as linear_attention_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend
from moeserve.step_inputs import StateRows

NATIVE = select_backend(torch.device("cpu"))
DELTA = LinearAttentionShape(
    num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, is_delta=True, norm_epsilon=1e-6
)
SHAPES = {
    "gated delta rule, 32 heads of 128 x 128": DELTA,
    "Kimi delta attention, 32 heads of 128 x 128": replace(
        DELTA, num_key_heads=32, has_channel_decays=True, gate="sigmoid"
    ),
    "Mamba-2, 128 heads of 128 x 64": LinearAttentionShape(
        num_heads=128, num_key_heads=1, key_dim=128, value_dim=64, is_delta=False, norm_epsilon=1e-5
    ),
}
PROMPT_TOKENS = 512
STATE_BYTES = 128 << 20
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Case:
    """Requests with equally many tokens each."""

    batch: int
    num_rows: int

    @property
    def title(self) -> str:
        return f"{self.num_rows} tokens of a prompt" if self.num_rows > 1 else f"decode, batch {self.batch}"

    def work(self, shape: LinearAttentionShape) -> Work:
        """Return the state's products (two in a state space model, three with the delta rule) and the memory."""
        num_values = shape.num_heads * shape.key_dim * shape.value_dim
        num_tokens = self.batch * self.num_rows
        bytes_of_token = 4 * shape.num_channels + 2 * (2 * shape.num_heads * shape.value_dim + shape.num_decays)
        operations = 2 * (3 if shape.is_delta else 2) * num_values * num_tokens
        return Work(2 * 4 * num_values * self.batch + bytes_of_token * num_tokens, operations)


CASES = (Case(1, 1), Case(8, 1), Case(32, 1), Case(1, PROMPT_TOKENS))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("linear_attention", "Linear attention by the C++ kernel of the CPU.", rounds=7)
    options = parser.parse_args(arguments)
    if NATIVE is REFERENCE:
        raise SystemExit("the C++ kernels are not built")
    set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    probe = LimitProbe(buffer_bytes=1 << 28, matmul_size=1024, dtype=torch.float32, clock=clock)
    show_and_save(options.json, measure(options.rounds, probe, clock))


@torch.inference_mode()
def measure(num_rounds: int, probe: LimitProbe, clock: Callable[[], float]) -> list[Row]:
    """Return a row for each shape and case, all measured in alternation with the machine's limits."""
    measures = {
        f"{name}, {case.title}": call_timer(make_call(shape, case), SAMPLE_SECONDS, clock)
        for name, shape in SHAPES.items()
        for case in CASES
    }
    samples, limits = interleave_beside_limits(measures, num_rounds, probe)
    rows: list[Row] = []
    for name, shape in SHAPES.items():
        for case in CASES:
            seconds = samples[f"{name}, {case.title}"]
            least = [case.work(shape).seconds(limit) for limit in limits]
            fractions = [bound / own for bound, own in zip(least, seconds, strict=True)]
            rows.append(
                {
                    "benchmark": "linear_attention",
                    "operation": name,
                    "case": case.title,
                    "microseconds": statistics.median(seconds) / (case.batch * case.num_rows) * 1e6,
                    "fraction_of_limit": statistics.median(fractions),
                    "samples": seconds,
                }
            )
    return rows


def make_call(shape: LinearAttentionShape, case: Case) -> Callable[[int], object]:
    """Return the operation of a step. Each call has the states of other requests than the one before."""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    num_tokens, value_size = case.batch * case.num_rows, shape.num_heads * shape.value_dim
    bytes_of_state = 4 * shape.num_heads * shape.key_dim * shape.value_dim
    num_states = max(2, STATE_BYTES // (bytes_of_state * case.batch)) * case.batch
    states = torch.zeros(num_states, shape.num_heads, shape.key_dim, shape.value_dim)
    weights = LinearAttentionWeights(
        source.normal(shape.num_heads).float(),
        source.normal(shape.num_decays).float(),
        source.normal(shape.value_dim if shape.is_delta else value_size).float(),
        None if shape.is_delta else source.normal(shape.num_heads).float(),
    )
    step = source.step([(case.num_rows, case.num_rows)] * case.batch, 16)
    steps = []
    for first in range(0, num_states, case.batch):
        rows = torch.arange(first, first + case.batch)
        unused = StateRows.none(case.batch)
        steps.append(replace(step, states=unused._replace(load_S=rows, store_S=rows)))
    inputs = (
        source.normal(num_tokens, shape.num_channels).float(),
        source.normal(num_tokens, value_size),
        source.normal(num_tokens, shape.num_decays),
        source.normal(num_tokens, shape.num_heads) if shape.is_delta else None,
    )
    operation = linear_attention_ops.make(NATIVE, shape)
    return lambda index: operation(*inputs, weights, states, steps[index % len(steps)])


if __name__ == "__main__":
    main()
