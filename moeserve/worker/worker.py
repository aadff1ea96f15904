"""One rank's life: load the model, size the KV cache, then run the steps it is given."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from moeserve.config.settings import EngineConfig
from moeserve.distributed.group import Groups
from moeserve.errors import DistributedError, EngineError
from moeserve.expert_placement.load import LoadMeter
from moeserve.expert_placement.rebalance import Rebalancer, spare_bytes
from moeserve.moe.dispatch.factory import DispatcherFactory
from moeserve.ops import backend
from moeserve.ops.dense_attention import MAX_MASK_SIZE
from moeserve.ops.native import native_kernels
from moeserve.ops.products import without_rows
from moeserve.ops.threads import set_num_threads
from moeserve.protocol import Chunk, SampleSpec, StepPlan, StepResult
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.lockstep import Agreement
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.cpu_graphs import MEMORY_BYTES, CpuGraphs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture, graph_sizes, memory_of_graphs
from moeserve.worker.kv_cache import count_blocks
from moeserve.worker.loading import load_model
from moeserve.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Worker:
    """The rank that holds a part of a model. `num_blocks` is how many blocks of KV cache every rank has."""

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, groups: Groups, *, show_progress: bool) -> None:
        self.groups = groups
        set_num_threads(config.num_threads)
        started = time.monotonic()
        loaded = load_model(config, groups, show_progress=show_progress)
        model = loaded.model
        self._dispatchers: DispatcherFactory | None = model.dispatchers
        logger.info("loaded %s in %.1f s", config.model_path, time.monotonic() - started)

        groups.world.barrier()  # collective: all ranks; all have loaded, so what is free now is left for caches

        tp_rank = groups.tp.rank_in_group
        # The profiling run needs one block, which all its positions share; it reads some before it writes them.
        shallow = model.with_one_layer_of_each_kind()
        probe_caches = shallow.make_caches(1, config.block_size)
        for cache in probe_caches:
            cache.clear()
        probe = ModelRunner(shallow, probe_caches, groups.mesh, config.block_size, config.device, tp_rank=tp_rank)
        layers = model.moe_layers
        may_move = config.rebalance == "auto"
        largest = largest_step(config)
        num_tokens = (largest.num_tokens,) * groups.mesh.dp
        has_cpu_graphs = config.device == "cpu" and not config.enforce_eager
        is_compiled = config.device == "cuda" and backend.of("cuda") == "triton"
        has_graphs = is_compiled and not config.enforce_eager and groups.supports_cuda_graphs
        max_blocks = -(-config.max_model_len // config.block_size)
        sizes = graph_sizes(config.max_num_seqs, groups.mesh, model.is_capturable)
        recording = torch.cuda.Stream() if has_graphs else None
        if is_compiled:
            run_all_sizes(probe, config)

        def record(caches: list[Any], sizes: Sequence[int]) -> CudaGraphs:
            assert recording is not None
            return CudaGraphs(model, caches, groups.mesh, tp_rank, max_blocks, sizes, TorchCapture(recording))

        reserved = loaded.mapped_bytes + (spare_bytes(layers) if may_move else 0)
        if has_cpu_graphs:
            reserved += MEMORY_BYTES
        elif has_graphs and config.kv_cache_memory is None:
            one_block = model.make_caches(1, config.block_size)
            reserved += memory_of_graphs(functools.partial(record, one_block), sizes)
        num_blocks = count_blocks(
            config,
            model.cache_bytes_per_token,
            reserved,
            functools.partial(_run_without_experts, probe, largest, num_tokens),
        )
        self.num_blocks = groups.world.all_reduce_minimum(num_blocks)  # collective: all ranks
        # Begins with zeros, whatever was counted until now.
        self.load_meter = LoadMeter({number: layer.load for number, layer in layers.items()}, groups)
        self.rebalancer = Rebalancer(layers, groups, config.rebalance_horizon) if may_move else None
        self._untold: LoadWindow | None = None
        caches = model.make_caches(self.num_blocks, config.block_size)
        if backend.of(config.device) == "triton":  # another library may multiply what is behind a context with zero
            for cache in caches:
                cache.clear()
        self.graphs: CudaGraphs | None = None
        forward: CpuGraphs | CudaGraphs | None = None
        if has_cpu_graphs:
            forward = CpuGraphs(model, caches, groups, max_blocks)
        elif has_graphs:
            forward = self.graphs = record(caches, sizes)
        self.runner = ModelRunner(
            model,
            caches,
            groups.mesh,
            config.block_size,
            config.device,
            samples=tp_rank == 0,
            tp_rank=tp_rank,
            forward=forward,
        )
        logger.info("KV cache: %d blocks, %d tokens", self.num_blocks, self.num_blocks * config.block_size)
        if groups.rank == 0 and (reason := why_bytes_may_move(config)):
            logger.info("the last bits of a request's results may depend on what runs beside it: %s", reason)

    @torch.inference_mode()
    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        """One forward pass, of no tokens where the replica has no plan. Every rank of every replica joins it.

        Before it slots get other experts, and the ranks tell what theirs were given, where that is agreed; without any
        token that is all.
        """
        self.groups.begin_step(agreement.step)
        started = time.perf_counter()
        self._prepare(agreement)
        plan = plan or StepPlan(step=agreement.step, chunks=[])
        result = StepResult(step=plan.step, chunks=[])
        if any(agreement.num_tokens):
            padded_to = self.graphs.size_for(agreement) if self.graphs else None
            piece = self.rebalancer.begin_step() if self.rebalancer else None
            failure: EngineError | None = None
            try:
                result = self.runner.execute(plan, agreement.num_tokens, padded_to)
            except DistributedError:
                raise
            except EngineError as error:  # this rank has done its part all the same, and does the rest
                failure = error
            if self.rebalancer:
                self.rebalancer.finish_step(piece)
            self.load_meter.add_step(agreement.num_tokens, time.perf_counter() - started, padded_to)
            if failure is not None:
                raise failure
        told, self._untold = self._untold, None
        epoch = self.rebalancer.held_epoch if self.rebalancer else 0
        return msgspec.structs.replace(result, load=told, placement_epoch=epoch)

    def close(self) -> None:
        """Gives back what all ranks hold together, at an orderly end. May be called twice. Collective: all ranks."""
        dispatchers, self._dispatchers = self._dispatchers, None
        if dispatchers is not None:
            dispatchers.close()

    def _prepare(self, agreement: Agreement) -> None:
        epoch = self.rebalancer.epoch if self.rebalancer else 0
        if self.rebalancer and self.rebalancer.may_switch(agreement.placement_epoch):
            self.load_meter.hold(self.rebalancer.next_layer)  # collective: all ranks
            self.rebalancer.switch()
            epoch = self.rebalancer.epoch
        if agreement.collects_load:
            figures = self.rebalancer.own_figures() if self.rebalancer else ()
            collected = self.load_meter.collect(epoch, figures)  # collective: all ranks
            self._untold = None if collected is None else collected.window
            if self.rebalancer and collected:
                self.rebalancer.consider(collected.window, collected.figures_of_rank)


def _run_without_experts(probe: ModelRunner, plan: StepPlan, num_tokens: tuple[int, ...]) -> None:
    """All that takes memory in a step. What experts compute would be most of an engine's start."""
    with without_rows():
        probe.execute(plan, num_tokens)


def run_all_sizes(probe: ModelRunner, config: EngineConfig) -> None:
    """Steps of 1, 2, 4 ... tokens, up to the most: kernels are compiled for a few ranges of numbers of rows each, and
    serving should not wait for a compiler. Collective: all ranks.
    """
    for doublings in range((config.max_num_batched_tokens - 1).bit_length() + 1):
        plan = largest_step(config, 2**doublings)
        probe.execute(plan, (plan.num_tokens,) * probe.mesh.dp)


def why_bytes_may_move(config: EngineConfig) -> str | None:
    """Why a request's results may depend on the batch and the layout. None where they do not, to the last bit."""
    if config.device != "cpu":
        return f"device={config.device!r}"
    if native_kernels() is None:
        return "the C++ kernels are missing"
    if config.dtype == "float16":
        return "dtype='float16', in which the C++ kernels do not compute"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size={config.tensor_parallel_size}"
    return None


def largest_step(config: EngineConfig, most_tokens: int | None = None) -> StepPlan:
    """A step that takes as much memory as any that the scheduler may plan. All of its blocks are block 0.

    It has as many tokens and as many sampled rows as there may be, and its first chunk, of the fewest rows that fill
    what attention works on at a time, comes at the end of the longest context. On a GPU log-probabilities are told:
    so many rows are looked at together there that copies of their scores count.

    Args:
        most_tokens: in it; None: as many as the scheduler may plan.
    """
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1 if config.device == "cuda" else None)
    chunks: list[Chunk] = []
    num_left = min(most_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens)
    num_chunks = min(config.max_num_seqs, num_left)
    for index in range(num_chunks):
        length = min(config.max_model_len, num_left - (num_chunks - index - 1))
        if index == 0:
            length = min(length, max(1, MAX_MASK_SIZE // config.max_model_len))
        num_left -= length
        context_len = config.max_model_len if index == 0 else length
        chunks.append(
            Chunk(
                token_ids=[0] * length,
                start=context_len - length,
                block_ids=[0] * -(-context_len // config.block_size),
                sample=SampleSpec(params=params, seed=0, position=0),
            )
        )
    return StepPlan(step=0, chunks=chunks)
