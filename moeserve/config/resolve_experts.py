"""Resolution of the placement of experts and of the exchange of tokens."""

from __future__ import annotations

from moeserve.config.engine_config import ExpertsConfig, ScheduleConfig, WeightsConfig
from moeserve.config.expert_layout import Numbers, resolve_expert_parallel
from moeserve.config.facts import CheckpointFacts, Facts, from_settings
from moeserve.config.routes import RouteShape
from moeserve.config.settings import DispatcherName, ParallelSettings, Settings
from moeserve.errors import SettingsError, shown


def resolve_experts(
    settings: Settings,
    facts: Facts,
    weights: WeightsConfig,
    schedule: ScheduleConfig,
    expert_loads: tuple[tuple[float, ...], ...],
    placements: tuple[str, ...],
) -> ExpertsConfig:
    """Return the placement of experts, and the exchange of their tokens. `resolve` describes the arguments.

    Raises:
        SettingsError: the layout, the model or the device does not support the settings.
    """
    parallel, is_invariant = settings.parallel, settings.model.batch_invariant
    _check_placement(parallel, facts.checkpoint)
    _check_overlap(settings, facts)
    keeps_bytes = is_invariant or (not facts.on_gpu and weights.dtype != "float16" and facts.machine.has_kernels)
    expert_parallel = resolve_expert_parallel(
        parallel,
        facts.checkpoint.expert_shape,
        Numbers(
            device=facts.device.name,
            dtype=weights.dtype,
            quantization=weights.quantization,
            keeps_bytes=keeps_bytes,
        ),
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
    )
    dispatcher: DispatcherName = "allgather"
    if expert_parallel:
        dispatcher = _choose_dispatcher(parallel, facts, is_invariant=is_invariant)
    changed = parallel.changed_deepep_setting
    if changed is not None and dispatcher != "deepep":
        raise SettingsError(f"{changed} is for dispatcher='deepep', and the dispatcher is {dispatcher!r}; leave it out")
    return from_settings(
        ExpertsConfig,
        parallel,
        expert_parallel=expert_parallel,
        dispatcher=dispatcher,
        dispatcher_may_change=parallel.dispatcher == "auto",
        deepep_api=None if parallel.deepep_api == "auto" else parallel.deepep_api,
        expert_loads=expert_loads,
        placements=placements,
        rebalance="auto" if parallel.rebalance == "auto" else "off",
        routes=_route_shape(settings, facts) if settings.model.enable_return_routed_experts else None,
    )


def _route_shape(settings: Settings, facts: Facts) -> RouteShape:
    """Return the shape of the routed experts that outputs will return.

    Raises:
        SettingsError: the model has no experts, or another setting excludes routes.
    """
    name, shape = "enable_return_routed_experts=True", facts.checkpoint.route_shape
    if shape is None:
        raise SettingsError(f"{name} needs a model with experts that runs with moeserve's own code; leave it out")
    refusal = None
    if facts.on_gpu:
        refusal = "device='cuda'; use the CPU"
    elif settings.parallel.has_overlap:
        refusal = "overlap_decode_tokens and overlap_prefill_tokens; leave them out"
    if refusal is not None:
        raise SettingsError(f"{name} does not allow {refusal}")
    return shape


def _choose_dispatcher(parallel: ParallelSettings, facts: Facts, *, is_invariant: bool) -> DispatcherName:
    """Return the dispatcher by which the ranks that share the experts of a layer exchange tokens."""
    wanted, num_ranks, device = parallel.dispatcher, parallel.num_expert_ranks, facts.device
    if wanted == "auto":
        if num_ranks == 1:
            return "local"
        return device.invariant_dispatcher if is_invariant else device.dispatcher
    if wanted in ("deepep", "shared_memory") and num_ranks == 1:
        raise SettingsError(f"dispatcher={wanted!r} needs several ranks in a stage, and there is 1 rank; use 'auto'")
    if wanted == "shared_memory" and facts.on_gpu:
        raise SettingsError("dispatcher='shared_memory' is for CPUs, and device='cuda'; use 'all_to_all' or 'auto'")
    if wanted == "deepep" and not facts.on_gpu:
        raise SettingsError("dispatcher='deepep' needs GPUs, and device='cpu'; use 'all_to_all' or 'auto'")
    if wanted == "local" and num_ranks > 1:
        raise SettingsError(
            f"dispatcher='local' is for one rank, and there are {num_ranks}; use 'allgather', 'all_to_all' or 'auto'"
        )
    return wanted


def _check_placement(parallel: ParallelSettings, checkpoint: CheckpointFacts) -> None:
    """Raise SettingsError if this layout does not support the redundant experts or the rebalancing."""
    num_ranks = parallel.num_expert_ranks
    num_redundant = parallel.num_redundant_experts
    most = checkpoint.num_experts * (num_ranks - 1)  # one copy of each expert per rank
    if num_redundant > most:
        raise SettingsError(
            f"num_redundant_experts={num_redundant}: {num_ranks} ranks have room for {most} redundant copies of "
            f"{checkpoint.num_experts} experts, one of each expert per rank; use at most {most}"
        )
    if parallel.rebalance == "auto" and num_ranks == 1:
        raise SettingsError(
            "rebalance='auto' moves experts between the ranks of a stage, and there is one; use rebalance='off'"
        )
    if parallel.rebalance not in ("off", "auto") and parallel.expert_loads is not None:
        raise SettingsError(
            f"rebalance={shown(parallel.rebalance)} and expert_loads={shown(parallel.expert_loads)} both place the "
            "experts; leave one of them out"
        )


def _check_overlap(settings: Settings, facts: Facts) -> None:
    """Raise SettingsError if this device, model or layout does not support overlapped steps."""
    parallel = settings.parallel
    if not parallel.has_overlap:
        return
    refusal = None
    if parallel.num_expert_ranks == 1:
        refusal = "a single rank in a stage, which exchanges nothing; leave them out"
    elif facts.checkpoint.needs.keeps_state:  # the second half of a prompt needs the state after the first half
        refusal = "models with recurrent states; leave them out"
    elif not facts.on_gpu:
        return
    elif parallel.tensor_parallel_size > 1:  # collectives of both groups would be in flight at the same time
        refusal = f"tensor_parallel_size={parallel.tensor_parallel_size}; use 1, and more replicas"
    elif settings.model.attention_backend == "flashinfer":  # its wrappers suffice for two steps, not for four halves
        refusal = "attention_backend='flashinfer'; use 'auto'"
    if refusal is not None:
        raise SettingsError(f"overlap_decode_tokens and overlap_prefill_tokens do not allow {refusal}")
