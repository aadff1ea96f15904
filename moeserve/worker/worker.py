"""One rank: loads its part of the model, sizes the KV cache, then executes steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from moeserve.config.settings import EngineConfig
from moeserve.distributed.groups import Groups
from moeserve.errors import DistributedError, EngineError
from moeserve.expert_placement.load import LoadMeter
from moeserve.expert_placement.rebalance import Rebalancer, spare_bytes
from moeserve.models.decoder import Decoder
from moeserve.moe.dispatch.factory import DispatcherFactory
from moeserve.ops.interfaces import Kernels
from moeserve.ops.threads import set_num_threads
from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.cpu_graphs import MEMORY_BYTES, CpuGraphs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture, graph_sizes, memory_of_graphs
from moeserve.worker.loading import load_model
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.profiling import make_probe, profile_blocks, run_all_sizes
from moeserve.worker.step_replay import EagerSteps, ReplayFactory, StepContext

logger = logging.getLogger(__name__)


class Worker:
    """The rank that holds a part of a model. Every rank has the same `num_blocks` of KV cache."""

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, groups: Groups, *, show_progress: bool) -> None:
        """Load and prepare everything. Collective: all ranks."""
        self.groups = groups
        set_num_threads(config.num_threads)
        started = time.monotonic()
        loaded = load_model(config, groups, show_progress=show_progress)
        model, layers = loaded.model, loaded.model.moe_layers
        kernels = model.context.kernels
        self._dispatchers: DispatcherFactory | None = model.dispatchers
        logger.info("loaded %s in %.1f s", config.model_path, time.monotonic() - started)
        groups.world.barrier()  # collective: all ranks; all have loaded, so what is free now is left for caches

        context = StepContext(
            mesh=groups.mesh,
            tp_rank=groups.tp.rank_in_group,
            block_size=config.block_size,
            max_blocks=-(-config.max_model_len // config.block_size),
            device=torch.device(config.device),
        )
        replay = select_replay(config, model, groups, context)
        probe = make_probe(model, context)
        if kernels.compiles_on_first_use:
            run_all_sizes(probe, config)
        rebalances = config.rebalance == "auto"
        reserved_bytes = loaded.mapped_bytes + replay.reserved_bytes() + (spare_bytes(layers) if rebalances else 0)
        num_blocks = profile_blocks(config, probe, model.cache_bytes_per_token, reserved_bytes)
        self.num_blocks = groups.world.all_reduce_minimum(num_blocks)  # collective: all ranks

        self.load_meter = LoadMeter({number: layer.load for number, layer in layers.items()}, groups)  # starts at zero
        self.rebalancer = Rebalancer(layers, groups, config.rebalance_horizon) if rebalances else None
        self._load: LoadWindow | None = None  # collected, not yet returned
        caches = model.make_caches(self.num_blocks, config.block_size)
        if kernels.needs_finite_caches:  # an external kernel may multiply what lies behind a context by zero
            for cache in caches:
                cache.clear()
        self.runner = ModelRunner(model, context, replay.make(caches))
        logger.info("KV cache: %d blocks, %d tokens", self.num_blocks, self.num_blocks * config.block_size)
        if groups.rank == 0 and (reason := why_not_batch_invariant(config, kernels)):
            logger.info("the last bits of a request's results may depend on what runs beside it: %s", reason)

    @torch.inference_mode()
    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        """Run one step, without tokens if the replica has no plan. Collective: all ranks.

        An agreed placement switch and an agreed collection of expert loads come first. The step ends there if no
        replica has tokens.

        Raises:
            EngineError: the results of this replica are unusable. This rank has entered all collectives of the step.
            DistributedError: a collective failed.
        """
        self.groups.begin_step(agreement.step)
        started = time.perf_counter()
        self._switch_placement(agreement)
        self._collect_load(agreement)
        plan = plan or StepPlan(step=agreement.step, chunks=[])
        result = StepResult(step=plan.step, chunks=[])
        if any(agreement.num_tokens):
            padded_to = self.runner.replay.padded_size(agreement)
            moved_piece = self.rebalancer.begin_step() if self.rebalancer else None
            failure: EngineError | None = None
            try:
                result = self.runner.execute(plan, agreement.num_tokens, padded_to)
            except DistributedError:
                raise
            except EngineError as error:  # the rest of the step is collective
                failure = error
            if self.rebalancer:
                self.rebalancer.finish_step(moved_piece)
            self.load_meter.add_step(agreement.num_tokens, time.perf_counter() - started, padded_to)
            if failure is not None:
                raise failure
        load, self._load = self._load, None
        epoch = self.rebalancer.held_epoch if self.rebalancer else 0
        return msgspec.structs.replace(result, load=load, placement_epoch=epoch)

    def close(self) -> None:
        """Release what all ranks hold together, at an orderly end. May be called twice. Collective: all ranks."""
        dispatchers, self._dispatchers = self._dispatchers, None
        if dispatchers is not None:
            dispatchers.close()

    def _switch_placement(self, agreement: Agreement) -> None:
        if self.rebalancer and self.rebalancer.may_switch(agreement.placement_epoch):
            self.load_meter.keep_counts(self.rebalancer.next_layer)
            self.rebalancer.switch()

    def _collect_load(self, agreement: Agreement) -> None:
        if not agreement.collects_load:
            return
        epoch = self.rebalancer.epoch if self.rebalancer else 0
        figures = self.rebalancer.own_figures() if self.rebalancer else ()
        collected = self.load_meter.collect(epoch, figures)  # collective: all ranks
        self._load = None if collected is None else collected.window
        if self.rebalancer and collected:
            self.rebalancer.consider(collected.window, collected.figures_of_rank)


def select_replay(config: EngineConfig, model: Decoder, groups: Groups, context: StepContext) -> ReplayFactory:
    """Choose how this rank runs its steps, once for its lifetime. All ranks choose alike."""
    kernels = model.context.kernels
    if kernels.make_step_graph is not None and not config.enforce_eager and groups.supports_cpu_graphs:
        return ReplayFactory(
            reserved_bytes=lambda: MEMORY_BYTES,
            make=lambda caches: CpuGraphs(model, caches, groups, context.max_blocks),
        )
    if kernels.supports_cuda_graphs and not config.enforce_eager and groups.supports_cuda_graphs:
        sizes = graph_sizes(config.max_num_seqs, groups.mesh, model.is_capturable)
        stream = torch.cuda.Stream()

        def capture(caches: list[Any], sizes: Sequence[int]) -> CudaGraphs:
            return CudaGraphs(model, caches, context, sizes, TorchCapture(stream))

        def reserved_bytes() -> int:
            if config.kv_cache_memory is not None:
                return 0
            one_block = model.make_caches(1, context.block_size)
            return memory_of_graphs(functools.partial(capture, one_block), sizes)

        return ReplayFactory(reserved_bytes=reserved_bytes, make=lambda caches: capture(caches, sizes))
    return ReplayFactory(reserved_bytes=lambda: 0, make=lambda caches: EagerSteps(model, caches))


def why_not_batch_invariant(config: EngineConfig, kernels: Kernels) -> str | None:
    """Return why a request's results may depend on the batch and the layout, or None if they are equal to the bit."""
    if config.device != "cpu":
        return f"device={config.device!r}"
    if not kernels.batch_invariant_dtypes:
        return "the C++ kernels are missing"
    if config.dtype == "float16":
        return "dtype='float16', in which the C++ kernels do not compute"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size={config.tensor_parallel_size}"
    return None
