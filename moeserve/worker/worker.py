"""The worker of one rank, which loads its part of the model, allocates the KV cache, and executes steps."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from moeserve.cache_kind import CacheKind
from moeserve.config.engine_config import EngineConfig
from moeserve.controls import EndRequests, EndSleep, Outcome, Pause, Resume, Sleep, StartUpdate
from moeserve.distributed.groups import Groups
from moeserve.errors import EngineError
from moeserve.kv.layer_cache import Places
from moeserve.kv.rank.cache import most_blocks
from moeserve.kv.rank.folder import FolderStore
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rank.nixl import NixlMemory
from moeserve.kv.rank.receiver import BlockReceiver
from moeserve.kv.rank.sender import BlockSender
from moeserve.kv.rank.store import HostStore, KVStore
from moeserve.kv.rank.transfers import Transfers
from moeserve.kv.rank.wire import listening_address, read_key
from moeserve.kv.rules import CacheGroup
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.placement.load import LoadMeter
from moeserve.layers.moe.placement.rebalance import Rebalancer, spare_bytes
from moeserve.models.decoder import Decoder
from moeserve.models.rank_model import RankModel
from moeserve.ops.side_stream import CudaSideStream
from moeserve.processes.progress_records import Phase, in_phase
from moeserve.protocol import RankReport, StepPlan, StepResult, TransferResult
from moeserve.scheduling.lockstep import Agreement, Round, RoundResult, agree
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.chunk_size import choose_chunk_size
from moeserve.worker.cpu_graphs import MEMORY_BYTES, CpuGraphs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture, graph_sizes, memory_of_graphs
from moeserve.worker.drafting import drafter_of
from moeserve.worker.grammars import grammars_of
from moeserve.worker.loading import cache_share, load_model, store_key
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.notes import note_on_bytes
from moeserve.worker.overlap import OverlapLimits
from moeserve.worker.pending_step import PendingStep
from moeserve.worker.profiling import make_probe, profile_blocks, run_all_sizes
from moeserve.worker.protocol import GroupFacts, Loaded, StoreFacts
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable
from moeserve.worker.room import num_states_of
from moeserve.worker.route_buffer import route_buffer_of, routes_of_copies
from moeserve.worker.sleeping import free_caches
from moeserve.worker.step_runner import EagerSteps, StepRunnerFactory
from moeserve.worker.thread_count import ThreadCount
from moeserve.worker.weight_sources.source import LoadedModel

logger = logging.getLogger(__name__)


class PendingRound:
    """A round whose step the device may still be computing."""

    def __init__(self, agreement: Agreement, step: PendingStep | None, finish: Callable[[], RoundResult]) -> None:
        self.agreement = agreement
        self.step = step
        self._finish: Callable[[], RoundResult] | None = finish
        self._result: RoundResult

    @property
    def is_done(self) -> bool:
        """True if `finish` would return at once."""
        return self._finish is None or self.step is None or self.step.is_done

    def finish(self) -> RoundResult:
        """Wait for the step, and return the result. May be called more than once."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # drop the function, because it refers to the worker and its model
        return self._result


class Worker:
    """The worker of a rank, which holds a part of a model. All ranks have the same number of KV cache blocks."""

    _loaded: LoadedModel
    _caches: list[Any]  # the cache of each block of the model
    _transfers: Transfers | None = None  # set by `start_transfers`
    runner: ModelRunner

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        groups: Groups,
        *,
        show_progress: bool,
        num_blocks: int | None = None,
        chunk_size: int | None = None,
        before: Worker | None = None,
    ) -> None:
        """Load the model and prepare everything. Collective: all ranks, of which some may call `rejoin` instead.

        Args:
            num_blocks, chunk_size: KV cache blocks of each rank, and most tokens of a step; None: see `_choose_sizes`.
            before: the worker of this rank in a layout with more replicas, whose weights and caches this worker takes.
        """
        self.config, self.groups = config, groups
        self._threads = ThreadCount(config.compute.num_threads)
        started = time.monotonic()
        target = None if before is None else before._loaded.target
        loaded = self._loaded = load_model(
            config, groups, show_progress=show_progress, replaces_another=num_blocks is not None, before=target
        )
        model, layers = loaded.model, loaded.model.moe_layers
        self._dispatchers: DispatcherFactory | None = model.dispatchers
        logger.info("loaded %s in %.1f s", config.weights.model_path, time.monotonic() - started)
        # collective: all ranks; all have loaded, so what is free now is left for caches
        groups.wait_until_loaded(config.failure.load_timeout, started)
        context = self._context = RankContext(
            mesh=groups.mesh,
            tp_rank=groups.tp.rank_in_group,
            max_blocks=-(-config.schedule.max_model_len // config.cache.block_size),
            device=torch.device(config.compute.device),
            overlap=OverlapLimits(
                decode=config.experts.overlap_decode_tokens, prefill=config.experts.overlap_prefill_tokens
            ),
            rules=model.cache_needs.rules,
            logprobs_mode=config.texts.logprobs_mode,
        )
        self._step_runners = select_step_runner(config, model, groups, context)
        rebalances = config.experts.rebalance == "auto" and bool(layers)
        reserved_bytes = self._step_runners.reserved_bytes() + (spare_bytes(layers) if rebalances else 0)
        config = self._choose_sizes(loaded, reserved_bytes, num_blocks, chunk_size)
        side_stream = CudaSideStream() if config.compute.device == "cuda" else None
        self.rebalancer = (
            Rebalancer(layers, groups, config.experts.rebalance_horizon, side_stream) if rebalances else None
        )
        self._caches = self._make_caches(config, model) if before is None else before._caches
        self._routes = routes_of_copies(config, self.num_blocks)
        items = CachedItems(model.cache_items, self._caches, saved_rows_of(config), self._routes)
        self._store, store_facts = self._open_store(config, model, items)
        self._sender, self._receiver = self._open_to_peers(config, model, items)
        address, other_groups = self._sender.address if self._sender else "", self._other_groups(config, model)
        chunk_size = config.schedule.max_num_batched_tokens
        self.facts = Loaded(self.num_blocks, store_facts, address, other_groups, loaded.file_hashes, chunk_size)
        self._begin()
        if groups.rank == 0 and (note := note_on_bytes(config, model.config, model.context.backend)):
            (logger.warning if config.compute.device == "cpu" else logger.info)(note)

    @torch.inference_mode()
    def rejoin(self, connected: Groups) -> None:
        """Continue in new groups, without requests. New ranks call the constructor. Collective: all ranks.

        Args:
            connected: groups of the same ranks. The worker has left its own groups.
        """
        started = time.monotonic()
        self.groups = self.groups.reconnected(connected)
        if self._dispatchers is not None:
            self._dispatchers.reopen()  # collective: all ep ranks
        self.groups.world.barrier()  # collective: all ranks; see `load_model`
        self.groups.wait_until_loaded(self.config.failure.load_timeout, started)  # collective: all ranks
        self._begin()

    def _begin(self) -> None:
        """Make the objects that depend on requests and rounds, of which there are none yet."""
        config, model, context = self.config, self._loaded.model, self._context
        loads = {index: layer.load for index, layer in model.moe_layers.items()}
        self.load_meter = LoadMeter(loads, self.groups, store.store if (store := self._loaded.expert_store) else None)
        self._load: LoadWindow | None = None  # collected, not yet returned
        self.runner = ModelRunner(
            model,
            context,
            self._step_runners.make(self._caches),
            RequestTable(config.schedule.max_num_seqs, context.max_blocks, len(context.rules.tables)),
            appends_samples=config.schedule.async_scheduling,
            grammars=grammars_of(config.texts.tokenizer_path, config.texts.vocab_size),
            drafter=drafter_of(config, model, self._caches),
            routes=route_buffer_of(config, model),
        )
        self.prepare_thread()
        self.capture_ahead()  # the smallest step, which comes first
        self._num_rounds = 0
        self._previous: PendingRound | None = None
        self._finished_s = 0.0  # when the last step was finished

    def drop_steps(self) -> None:
        """Release what runs steps: another worker takes the weights and caches, and this worker runs no more."""
        self.__dict__.pop("runner", None)  # there is none if another worker has failed to take over
        self._previous = None

    def _choose_sizes(
        self, loaded: LoadedModel, reserved_bytes: int, num_blocks: int | None, chunk_size: int | None
    ) -> EngineConfig:
        """Choose the sizes that are None. Return the config with the chosen chunk size. Collective: all ranks."""
        model, needs = loaded.model, loaded.model.cache_needs
        reserved_bytes += loaded.reserved_bytes + num_states_of(self.config) * needs.row_bytes
        chunk_size = chunk_size or choose_chunk_size(self.config, loaded, self._context, reserved_bytes)
        config = self.config = self.config.changed(schedule={"max_num_batched_tokens": chunk_size})
        if num_blocks is None:
            probe = make_probe(model, self._context, config)
            if model.context.backend.compiles_on_first_use:
                run_all_sizes(probe, config)
            num_blocks = profile_blocks(config, probe, needs, reserved_bytes)
            num_blocks = self.groups.world.all_reduce_minimum(num_blocks)  # collective: all ranks
        self.num_blocks = num_blocks
        return config

    def _groups_of_tables(self, config: EngineConfig, model: RankModel) -> tuple[CacheGroup, ...]:
        """Return the cache groups of layers that keep blocks."""
        rules = model.cache_needs.rules.tables
        return tuple(CacheGroup(rule, min(self.num_blocks, most_blocks(config, rule))) for rule in rules)

    def _make_caches(self, config: EngineConfig, model: RankModel) -> list[Any]:
        """Return the cache of each block of the model."""
        places = Places(self._groups_of_tables(config, model), num_states_of(config))
        caches = model.make_caches(places)
        if model.context.backend.needs_finite_caches:  # a library's kernel may multiply values after a context by zero
            for cache in caches:
                cache.clear()
        return caches

    def _other_groups(self, config: EngineConfig, model: RankModel) -> list[GroupFacts]:
        """Log the sizes of all cache groups, and return all groups except the first."""
        logger.info("KV cache: %d blocks, %d tokens", self.num_blocks, self.num_blocks * config.cache.block_size)
        groups = [*self._groups_of_tables(config, model)[1:]]
        if (states := model.cache_needs.rules.rows) is not None:
            groups.append(CacheGroup(states, len(saved_rows_of(config))))
        for group in groups:
            logger.info("layers with %r have %d places", group.rule, group.num_places)
        return list(map(GroupFacts.of, groups))

    def _open_store(
        self, config: EngineConfig, model: RankModel, items: CachedItems
    ) -> tuple[KVStore | None, StoreFacts]:
        """Open the store behind the KV cache that the config specifies, if any. Collective: all ranks."""
        store = config.store
        if store.kv_folder is not None:
            folder = Path(store.kv_folder) / store_key(config, model)
            return FolderStore(items, folder, store.kv_folder_size), StoreFacts(folder=str(folder))
        if not store.kv_host_memory:
            return None, StoreFacts()
        # The store has the cache's number of places of each kind, times the same factor, as large as memory allows.
        num_places = {kind: items.num_places(kind) for kind in CacheKind}
        cache_bytes = sum(number * items.bytes_of(kind) for kind, number in num_places.items())
        for kind, number in num_places.items():
            # A stage without layers of this kind limits no other. collective: all ranks
            own = store.kv_host_memory * number // cache_bytes if number else sys.maxsize
            shared = self.groups.world.all_reduce_minimum(own)
            num_places[kind] = 0 if shared == sys.maxsize else shared
        return HostStore(items, num_places, store.kv_file), StoreFacts(num_host_places=num_places)

    def _open_to_peers(
        self, config: EngineConfig, model: RankModel, items: CachedItems
    ) -> tuple[BlockSender | None, BlockReceiver | None]:
        """Return the sender and the receiver of items of other engines, or None if the config does not enable them."""
        store = config.store
        if store.kv_transfer_address is None:
            return None, None
        key, timeout_s = read_key(store.kv_transfer_key_file), store.kv_transfer_timeout
        rank, num_ranks = self.groups.rank, config.parallel.ranks_per_replica
        host, port = listening_address(config, rank)
        share = cache_share(config, model, items)
        nixl: NixlMemory | None = None
        if store.kv_transfer_backend == "nixl":
            nixl = NixlMemory(items, [tensor.axis for tensor in share.tensors], host)
            share = msgspec.structs.replace(share, has_nixl=True)
        sender = BlockSender(items, share, (host, port), key, timeout_s, nixl.share if nixl else None)
        receiver = BlockReceiver(items, share, key, timeout_s, rank=rank % num_ranks, num_ranks=num_ranks, nixl=nixl)
        return sender, receiver

    def prepare_thread(self) -> None:
        """Prepare the calling thread for steps: torch's number of threads is set for each calling thread."""
        # Torch does little beside the C++ kernels, and its threads would take cores from the kernels' threads while
        # they spin.
        has_kernels = self.runner.model.context.backend.native is not None
        torch.set_num_threads(1 if has_kernels else self._threads.number)

    def start_transfers(self, send: Callable[[TransferResult], None]) -> Transfers:
        """Start the threads that run transfers of KV cache items.

        Args:
            send: called with the result of each transfer, in any thread.
        """
        self._transfers = Transfers(self._store, self._sender, self._receiver, self._routes, send)
        return self._transfers

    @torch.inference_mode()
    def capture_ahead(self) -> bool:
        """Capture a likely step before it occurs. Return False if there is no such step left."""
        return self.runner.step_runner.capture_ahead()

    def execute(self, work: Round) -> RoundResult:
        """Run a round to its end, and return its result. Collective: all ranks. See `start`."""
        return self.start(work).finish()

    @torch.inference_mode()
    def start(self, work: Round) -> PendingRound:
        """Start a round: agree with the other replicas on its step, and start the step. Collective: all ranks.

        The round has no step if no replica has tokens or requests expert loads. No round follows an agreement that
        stops the engine. A GPU may still be computing the step when this method returns. At most two rounds are in
        flight: start a third round only after the first has finished.

        Raises:
            EngineError: the packed weights that were mapped from the cache turned out to be damaged.
            LockstepError: the ranks are not in the same round.
            DistributedError: a collective failed.
            Exception: the step failed while other ranks wait for this one in a collective.
        """
        self._prepare_step()
        self.groups.begin_step(self._num_rounds)
        arrived = time.perf_counter()
        agreement = self._agree(work)
        started = time.perf_counter()
        if agreement.is_idle or agreement.ends_all:
            return PendingRound(agreement, None, lambda: RoundResult(agreement=agreement))
        self._switch_placement()
        self._collect_load(agreement)
        outcome = self._run_control(work) if agreement.control else None
        step: PendingStep | None = None
        error, padded_to = "", None
        if any(agreement.num_tokens):
            padded_to = self.runner.step_runner.padded_size(agreement)
            moved_piece = self.rebalancer.begin_step() if self.rebalancer else None
            step, error = self._start_step(work.plan, agreement, padded_to)
            if self.rebalancer:
                self.rebalancer.finish_step(moved_piece)
        load, self._load = self._load, None

        def finish() -> RoundResult:
            chunks = step.finish() if step is not None else []
            if (store := self._loaded.expert_store) is not None:
                chunks = store.with_errors(chunks)
            # Exclude the time until `_finished_s`, in which a GPU may still have computed the previous step.
            seconds = time.perf_counter() - max(started, self._finished_s)
            self._finished_s = time.perf_counter()
            if any(agreement.num_tokens):
                self.load_meter.add_step(agreement.num_tokens, seconds, padded_to)
            own_tokens = agreement.num_tokens[self.groups.dp.rank_in_group]
            return RoundResult(
                agreement=agreement,
                result=StepResult(step=work.plan.step if work.plan else 0, chunks=chunks, load=load),
                error=error,
                outcome=outcome,
                num_padding_tokens=0 if padded_to is None else padded_to - own_tokens,
                agreement_seconds=started - arrived,
                step_seconds=seconds,
                reports=self._reports(work.plan, step),
            )

        self._previous = PendingRound(agreement, step, finish)
        # A report is of the table before the next plan changes it.
        if self.config.failure.debug_rank_state or self._previous.is_done:
            self._previous.finish()
        return self._previous

    def _prepare_step(self) -> None:
        """Notice damaged weights, and adapt to the cores and the memory that there are now.

        Raises:
            EngineError: the weights are damaged.
        """
        if self._loaded.checker is not None and self._loaded.checker.damage:
            raise EngineError(f"{self._loaded.checker.damage}; a new start packs the weights again")
        self._threads.update(self.prepare_thread)
        if self._loaded.expert_store is not None:
            self._loaded.expert_store.begin_step()

    def _run_control(self, work: Round) -> Outcome | None:
        """Run the command that all replicas have announced. Collective: all ranks."""
        command = work.command
        assert command is not None
        if isinstance(command, Pause | Resume | EndRequests | EndSleep):
            return None
        if self._previous is not None:
            self._previous.finish()  # a step may not read weights while they are written
        assert self._loaded.updates is not None, "the engine refuses updates without `rl`"
        if isinstance(command, Sleep):
            free_caches(self._caches, self.runner.step_runner)
            return self._loaded.updates.discard() if command.level == 2 else None
        if isinstance(command, StartUpdate) and self.rebalancer is not None:
            self.rebalancer.drop_changes()  # experts that are moved would keep old weights
        with in_phase(Phase.UPDATING):
            return self._loaded.updates.run(command)

    def _reports(self, plan: StepPlan | None, step: PendingStep | None) -> list[RankReport]:
        if plan is None or not (self.config.failure.debug_rank_state or self.runner.routes):
            return []
        digests = self.runner.table.digests(plan.slots) if self.config.failure.debug_rank_state else []
        return [RankReport(self.groups.rank, digests, None if step is None else step.routes)]

    def _start_step(
        self, plan: StepPlan | None, agreement: Agreement, padded_to: int | None
    ) -> tuple[PendingStep | None, str]:
        """Start a step with tokens. Return the step, or an error if it failed on the only rank."""
        chunks = [] if plan is None else self.runner.table.apply(plan)
        overlaps = padded_to is None and self.runner.context.overlap.applies(
            max(agreement.num_tokens), is_decode_only=agreement.is_decode_only
        )
        previous = self._previous.step if self._previous else None
        num_tokens, num_sampling = agreement.num_tokens, agreement.num_sampling
        try:
            return self.runner.start(
                chunks, num_tokens, padded_to, previous, overlaps=overlaps, num_sampling=num_sampling
            ), ""
        except Exception as error:
            if self.groups.world.world_size > 1:  # the other ranks wait in a collective, so all must be terminated
                raise
            logger.exception("a step failed")
            self.runner.skip(chunks)
            return None, f"a step failed: {type(error).__name__}: {error}"

    def _agree(self, work: Round) -> Agreement:
        # collective: this rank and those of the same tp rank in all other replicas
        rows = [work.row] if self.groups.dp.world_size == 1 else self._gathered(work.row)
        agreement = agree(rows, number=self._num_rounds, num_replicas=self.groups.dp.world_size)
        self._num_rounds += 1
        return agreement

    def _gathered(self, row: list[int]) -> list[list[int]]:
        num_replicas = self.groups.dp.world_size
        rows: list[list[int]] = self.groups.dp.all_gather(torch.tensor([row]), [1] * num_replicas).tolist()
        return rows

    def close(self) -> None:
        """Release sockets and resources shared by all ranks, at an orderly shutdown. May be called twice.

        Collective: all ranks.
        """
        if self._transfers is not None:
            self._transfers.close()
        dispatchers, self._dispatchers = self._dispatchers, None
        if dispatchers is not None:
            dispatchers.close()
        if self.runner.context.device.type == "cuda":
            gc.unfreeze()  # `CudaGraphs` froze what existed

    def _switch_placement(self) -> None:
        if self.rebalancer and self.rebalancer.must_switch:
            self.load_meter.keep_counts(self.rebalancer.next_layer)
            self.rebalancer.switch()

    def _collect_load(self, agreement: Agreement) -> None:
        if not agreement.collects_load:
            return
        if self._previous is not None:
            self._previous.finish()  # so that its step is counted
        epoch = self.rebalancer.epoch if self.rebalancer else 0
        figures = self.rebalancer.own_figures() if self.rebalancer else ()
        collected = self.load_meter.collect(epoch, figures)  # collective: all ranks
        self._load = None if collected is None else collected.window
        if self.rebalancer and collected and collected.of_stage:
            self.rebalancer.consider(collected.of_stage, collected.figures_of_rank)


def select_step_runner(
    config: EngineConfig, model: RankModel, groups: Groups, context: RankContext
) -> StepRunnerFactory:
    """Return the factory of this rank's `StepRunner`. All ranks make the same choice."""
    backend = model.context.backend
    if backend.make_step_graph is not None and not config.compute.enforce_eager and groups.supports_cpu_graphs:
        assert isinstance(model, Decoder), "other models run eagerly"
        make = functools.partial(
            CpuGraphs, model, groups=groups, context=context, max_num_seqs=config.schedule.max_num_seqs
        )
        return StepRunnerFactory(reserved_bytes=lambda: MEMORY_BYTES, make=make)
    if backend.supports_cuda_graphs and not config.compute.enforce_eager and groups.supports_cuda_graphs:

        def is_capturable(tokens_per_rank: Sequence[int]) -> bool:  # collective: all ranks, over stages
            return bool(groups.pp.all_reduce_minimum(int(model.is_capturable(tokens_per_rank))))

        sizes = graph_sizes(config.schedule.max_num_seqs, groups.mesh, is_capturable)
        stream = torch.cuda.Stream()

        def capture(caches: list[Any], sizes: Sequence[int]) -> CudaGraphs:
            return CudaGraphs(model, caches, context, sizes, TorchCapture(stream))

        def reserved_bytes() -> int:
            if config.cache.kv_cache_memory is not None:
                return 0
            one_block = model.make_caches(Places.equal(context.rules, 1))
            return memory_of_graphs(functools.partial(capture, one_block), sizes)

        return StepRunnerFactory(reserved_bytes=reserved_bytes, make=lambda caches: capture(caches, sizes))
    return StepRunnerFactory(reserved_bytes=lambda: 0, make=lambda caches: EagerSteps(model, caches))


def saved_rows_of(config: EngineConfig) -> range:
    """Return the rows of saved states, which come after the rows of running requests."""
    return range(config.schedule.max_num_seqs, config.schedule.max_num_seqs + (config.cache.num_saved_states or 0))
