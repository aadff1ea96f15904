"""The host's time for a decode step on a GPU, measured without a GPU.

The device is torch's "meta" device: its tensors have no values, so an operation costs the host about as much as a
launch, and reading a value fails. A CUDA graph is replaced with a call that does nothing. The time includes the copies
into the graph's inputs, and the agreement with other replicas except for its collective. It excludes copies from the
device.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.bench.harness import make_parser
from moeserve.bench.report import show_and_save
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.ops import sampling
from moeserve.ops.backend import REFERENCE, Implementation
from moeserve.ops.reading import HostReading, Reading
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.ops.sampling.reference import row_maximum
from moeserve.protocol import CacheChanges, CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, agree, make_row
from moeserve.step_inputs import StepInputs
from moeserve.worker.cuda_graphs import CudaGraphs
from moeserve.worker.device_copies import GpuCopies
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.pending_step import PendingStep
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable
from moeserve.worker.step_runner import do_nothing

META = torch.device("meta")
BLOCK_SIZE = 16
VOCABULARY = 128_000
Result = TypeVar("Result")


def choose_nothing(scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the highest scores and the tokens."""
    return torch.empty(len(scores_RV), device=META), torch.empty(len(scores_RV), dtype=torch.int64, device=META)


NOTHING = dataclasses.replace(REFERENCE, names=("nothing", *REFERENCE.names))
sampling.TABLE["nothing"] = Implementation(lambda backend, _: SamplingOperations(row_maximum, choose_nothing))


class NullModel:
    """A stand-in for the model that computes nothing."""

    head = object()

    def __init__(self) -> None:
        self.groups = groups_of_one_rank()
        self.dispatchers = TorchDispatchers("local", self.groups.ep, cast(Any, None))
        self.context = type("Context", (), {"backend": NOTHING, "block_size": BLOCK_SIZE})

    def __call__(self, step: StepInputs, caches: Any) -> Tensor:
        return torch.empty(len(step.token_ids), 64, device=META)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.empty(len(hidden_TD), VOCABULARY, device=META)


def capture(run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """Return a stand-in for a CUDA graph that computes nothing."""
    return do_nothing, run()


class NullCopies(GpuCopies):
    """Copies of a device without values: every token that is read back is token 1."""

    def __init__(self, table: RequestTable) -> None:
        super().__init__(table, META)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return HostReading([torch.ones(each.shape, dtype=each.dtype) for each in tensors])


class Operations(TorchDispatchMode):
    """Counts operations on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += not func.is_view and getattr(result, "device", None) == META
        return result


class DecodeSteps:
    """Decode steps of requests with long contexts."""

    def __init__(self, num_requests: int, context_len: int, params: RequestParams) -> None:
        max_blocks = context_len // BLOCK_SIZE + 64
        self.table = RequestTable(num_requests, max_blocks)
        context = RankContext(mesh=Mesh(tp=1, dp=1), tp_rank=0, max_blocks=max_blocks, device=META)
        model = cast(Any, NullModel())
        self.runner = ModelRunner(model, context, CudaGraphs(model, [], context, (num_requests,), capture), self.table)
        self.runner.copies = NullCopies(self.table)
        self.slots = list(range(num_requests))
        self.position = context_len
        self.num_blocks = 0
        prompts = [
            Registration(
                slot=slot,
                token_ids=[1] * (context_len + 1),
                num_prompt_tokens=context_len + 1,
                cache=CacheStart([self._new_blocks(context_len // BLOCK_SIZE + 1)]),
                params=params,
                seed=slot,
                end_token_ids=[2],
            )
            for slot in self.slots
        ]
        self.num_rounds = 0
        self._started: PendingStep | None = None
        self._started = self._start(registrations=prompts)

    def step(self) -> None:
        """Start a step while the previous one runs, and read the results of the previous one."""
        needs_block = self.position % BLOCK_SIZE == 0
        new_blocks = [(slot, [self._new_blocks(1)]) for slot in self.slots] if needs_block else []
        earlier, self._started = self._started, self._start(cache=CacheChanges(new_blocks=new_blocks))
        assert earlier is not None
        earlier.finish()

    def _start(self, **changes: Any) -> PendingStep:
        size = len(self.slots)
        plan = StepPlan(step=0, slots=self.slots, starts=[self.position] * size, lengths=[1] * size, **changes)
        self.position += 1
        row = make_row(Intent(num_tokens=size, is_decode_only=True), number=self.num_rounds, replica=0)
        agreement = agree([row], number=self.num_rounds, num_replicas=1)
        self.num_rounds += 1
        padded_to = self.runner.step_runner.padded_size(agreement)
        return self.runner.start(self.table.apply(plan), agreement.num_tokens, padded_to, self._started)

    def _new_blocks(self, number: int) -> list[int]:
        self.num_blocks += number
        return list(range(self.num_blocks - number, self.num_blocks))


def measure(num_requests: int, context_len: int, params: RequestParams, num_steps: int = 64) -> tuple[float, int]:
    """Return the median processor seconds of a step, and its number of operations on the device."""
    steps = DecodeSteps(num_requests, context_len, params)
    steps.step()
    with Operations() as operations:
        steps.step()
    seconds = []
    for _ in range(num_steps):
        started = time.thread_time()
        steps.step()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds), operations.num_operations


KINDS = {
    "greedy": RequestParams(temperature=0),
    "random": RequestParams(temperature=1.0, top_p=0.9),
    "min_tokens": RequestParams(temperature=1.0, min_tokens=2**20, max_tokens=None),
    "logit_bias": RequestParams(temperature=1.0, logit_bias=dict.fromkeys(range(10), 1.0)),
    "logprobs": RequestParams(temperature=1.0, logprobs=5),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("host_step", __doc__, rounds=None, threads=False)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = {"benchmark": "host_step", "requests": options.requests, "context": options.context}
    rows = []
    for name in options.kinds:
        seconds, operations = measure(options.requests, options.context, KINDS[name])
        rows.append(facts | {"kind": name, "ms": 1e3 * seconds, "operations": operations})
    show_and_save(options.json, rows)
