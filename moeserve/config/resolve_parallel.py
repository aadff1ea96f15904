"""Resolution of the layout of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from moeserve.config.engine_config import ParallelConfig
from moeserve.config.environment import is_inside_ray
from moeserve.config.facts import WITHOUT_NCCL, Facts, from_settings
from moeserve.config.settings import ParallelSettings
from moeserve.errors import SettingsError, shown

# Upper bounds of the number of ranks on a host. A few more ranks than cores are useful to try a layout; many are a
# mistake.
MAX_RANKS_PER_CORE = 4
LEAST_MOST_RANKS = 8


def resolve_parallel(parallel: ParallelSettings, facts: Facts) -> ParallelConfig:
    """Return the layout of ranks.

    Raises:
        SettingsError: the checkpoint or the machine does not support the layout.
    """
    checkpoint = facts.checkpoint
    _check_layout(parallel, facts)
    layers = layers_of_stages(
        checkpoint.num_layers, parallel.pipeline_parallel_size, parallel.pipeline_layers, checkpoint.first_layers
    )
    executor = _choose_executor(parallel, facts.machine.cores_of_nodes)
    return from_settings(ParallelConfig, parallel, pipeline_layers=layers, executor=executor, num_ranks_on_host=None)


def wants_ray(parallel: ParallelSettings, num_cores: int) -> bool:
    """Return True if Ray should run the ranks. `MachineFacts.cores_of_nodes` must then be set."""
    if parallel.executor == "auto" and parallel.num_ranks > 1 and parallel.nnodes == 1:
        return is_inside_ray() or parallel.num_ranks > _most_ranks(num_cores)
    return parallel.executor == "ray"


def layers_of_stages(
    num_layers: int,
    num_stages: int,
    given: Sequence[int] | None = None,
    first_layers: frozenset[int] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage: the given numbers, or an even division.

    If the layers do not divide evenly, the first stages have one layer more.

    Args:
        first_layers: layers that may start a stage; None: all.

    Raises:
        SettingsError: there are more stages than layers, `given` has a wrong number of stages or layers, or a stage
            would start with a layer that is not in `first_layers`.
    """
    sizes = _sizes_of_stages(num_layers, num_stages, given)
    starts = set(itertools.accumulate(sizes[:-1]))
    if first_layers is not None and (wrong := sorted(starts - first_layers)):
        raise SettingsError(
            f"pipeline_layers={shown(list(sizes))}: a stage would start with layer {wrong[0]}, which reads what "
            "an indexer or a router of the previous layer has computed; stages may start with the layers "
            f"{', '.join(map(str, sorted(first_layers)))}, counted from 0"
        )
    return sizes


def _sizes_of_stages(num_layers: int, num_stages: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if num_stages > num_layers:
        raise SettingsError(
            f"pipeline_parallel_size={num_stages}: the checkpoint has {num_layers} layers, and each stage needs one; "
            f"use at most {num_layers} stages"
        )
    if given is None:
        return tuple(num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages))
    if len(given) != num_stages:
        raise SettingsError(
            f"pipeline_layers={shown(list(given))} has {len(given)} stages, but pipeline_parallel_size={num_stages}; "
            "give one number of layers for each stage"
        )
    if sum(given) != num_layers:
        raise SettingsError(
            f"pipeline_layers={shown(list(given))} has {sum(given)} layers in all, but the checkpoint has {num_layers}"
        )
    return tuple(given)


def fit_whole(cores_of_nodes: Sequence[int], num_threads: int, size: int, count: int) -> bool:
    """Return True if `count` groups of `size` ranks fit on the nodes without dividing a group over several nodes."""
    return sum(cores // (num_threads * size) for cores in cores_of_nodes) >= count


def shown_layout(layout: ParallelSettings | ParallelConfig) -> str:
    """Return the description of a layout of ranks for error messages."""
    tp, dp, pp = layout.tensor_parallel_size, layout.data_parallel_size, layout.pipeline_parallel_size
    stages = f", pipeline_parallel_size={pp}" if pp > 1 else ""
    return f"tensor_parallel_size={tp}, data_parallel_size={dp}{stages}"


def too_few_gpus(layout: ParallelSettings | ParallelConfig, num_gpus: int) -> str:
    """Return the error message for a layout that needs more GPUs than this host has."""
    return (
        f"{shown_layout(layout)} needs {layout.num_ranks} ranks, each with its own GPU, but torch sees {num_gpus} on "
        f"this host; use at most {num_gpus} rank{'s' * (num_gpus != 1)}, make more visible (CUDA_VISIBLE_DEVICES), or "
        "use executor='ray' and more hosts"
    )


def _most_ranks(num_cores: int) -> int:
    return max(LEAST_MOST_RANKS, MAX_RANKS_PER_CORE * num_cores)


def threads_per_rank(cores_of_nodes: Sequence[int], parallel: ParallelSettings) -> int:
    """Return the maximum number of threads per rank, at least 1.

    If possible, each replica stays on one host, or else each stage.
    """
    tp, pp, dp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    if parallel.nnodes > 1:
        return max(1, min(cores_of_nodes) * parallel.nnodes // parallel.num_ranks)
    for size, count in ((tp * pp, dp), (tp, pp * dp), (1, parallel.num_ranks)):
        for num_threads in range(max(cores_of_nodes), 0, -1):
            if fit_whole(cores_of_nodes, num_threads, size, count):
                return num_threads
    return 1


def _choose_executor(
    parallel: ParallelSettings, cores_of_nodes: Sequence[int] | None
) -> Literal["uniproc", "mp", "ray"]:
    if parallel.executor != "auto":
        return parallel.executor
    if parallel.nnodes > 1:
        return "mp"
    if cores_of_nodes is not None:
        return "ray"
    if parallel.num_ranks == 1 and parallel.on_failure in ("auto", "end"):
        return "uniproc"
    return "mp"


def _check_hosts(parallel: ParallelSettings, facts: Facts) -> None:
    """Raise SettingsError for a layout that cannot run on several hosts without Ray."""
    num_ranks, num_hosts = parallel.num_ranks, parallel.nnodes
    if facts.on_gpu or parallel.executor not in ("auto", "mp"):
        raise SettingsError(
            f"nnodes={num_hosts} runs ranks on CPUs, in processes: use device='cpu' and leave out executor, or use "
            "`moeserve launch`, which has Ray"
        )
    if num_ranks % num_hosts:
        raise SettingsError(
            f"{shown_layout(parallel)} has {num_ranks} rank{'s' * (num_ranks > 1)}, which nnodes={num_hosts} hosts "
            f"cannot share evenly; use a multiple of {num_hosts}"
        )
    cores = min(facts.machine.cores_of_nodes or [facts.machine.num_cores])
    if num_ranks // num_hosts > (most := _most_ranks(cores)):
        raise SettingsError(
            f"{shown_layout(parallel)} has {num_ranks // num_hosts} ranks on each host, but the smallest one has "
            f"{cores} CPU cores; use at most {most} ranks on each (one per core for speed)"
        )


def _check_layout(parallel: ParallelSettings, facts: Facts) -> None:
    """Raise SettingsError for a layout that this checkpoint, this machine or this version cannot run."""
    tp, num_ranks = parallel.tensor_parallel_size, parallel.num_ranks
    machine, sizes = facts.machine, facts.checkpoint.tensor_parallel_sizes
    layout, nodes, num_gpus = shown_layout(parallel), machine.cores_of_nodes, machine.num_gpus
    if tp not in sizes:
        raise SettingsError(
            f"tensor_parallel_size={tp} does not divide the checkpoint's attention heads; "
            f"use one of {', '.join(map(str, sizes))}"
        )
    if num_ranks > 1 and parallel.step_timeout <= parallel.collective_timeout:
        raise SettingsError(
            f"step_timeout={parallel.step_timeout} is not more than collective_timeout={parallel.collective_timeout}, "
            "whose error names the rank that is late; raise step_timeout, or lower collective_timeout"
        )
    if num_ranks > 1 and parallel.executor == "uniproc":
        raise SettingsError(f"executor='uniproc' runs one rank, but {layout} needs {num_ranks}; use executor='mp'")
    if parallel.on_failure in ("restart", "recover", "shrink") and parallel.executor == "uniproc":
        raise SettingsError(
            f"on_failure={parallel.on_failure!r} starts processes of ranks again, but with executor='uniproc' the rank "
            "runs in this one; use executor='mp'"
        )
    if parallel.nnodes > 1:
        _check_hosts(parallel, facts)
        return
    num_threads = parallel.num_threads or 1
    if nodes is None and num_ranks > (most := _most_ranks(machine.num_cores)):
        raise SettingsError(
            f"{layout} needs {num_ranks} ranks, but this process may use {machine.num_cores} CPU cores; use at most "
            f"{most} ranks (one per core for speed), or executor='ray' and more hosts"
        )
    if nodes is not None and num_ranks > (room := sum(cores // num_threads for cores in nodes)):
        raise SettingsError(
            f"{layout} needs {num_ranks} ranks with num_threads={num_threads}, but the nodes of the Ray cluster have "
            f"{', '.join(map(str, nodes))} CPUs, room for {room}; use fewer ranks or threads, or more nodes"
        )
    if facts.on_gpu and num_ranks > 1 and not machine.has_nccl:
        raise SettingsError(f"{layout}: torch {WITHOUT_NCCL}")
    if facts.on_gpu and nodes is None and num_gpus is not None and num_ranks > num_gpus:
        raise SettingsError(too_few_gpus(parallel, num_gpus))
