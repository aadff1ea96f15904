"""`moeserve simulate`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re

from moeserve.cli.parser import GPUS_PER_NODE, Parser, add_cluster, add_flags, cluster_of, files_of, given, reader
from moeserve.config.settings import PositiveInt
from moeserve.errors import SettingsError, shown
from moeserve.planner.hardware import TABLE
from moeserve.planner.settings import Assumptions, ClusterSize, ExpertSettings, Resize, SimulationSettings


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve simulate [MODEL] --hardware NAME [flags]"
    add_cluster(command)
    command.add_argument("--tp", type=reader(int), default=1, help="ranks of each replica (default: 1)")
    command.add_argument(
        "--hardware", required=True, metavar="NAME", help=f"{', '.join(TABLE)}, or a .json file that describes it"
    )
    command.add_argument(
        "--traffic",
        metavar="FILE",
        help="requests: a .jsonl file in Mooncake's format, a .csv file in Azure's, or PROMPT:OUTPUT for a single one "
        "(default: 200 requests of Mooncake's conversations)",
    )
    pools = command.add_argument_group("Pools and sizes")
    for name, does in (("prefill", "computes prompts for the decode pools"), ("decode", "decodes")):
        pools.add_argument(
            f"--{name}-nodes",
            type=reader(list[PositiveInt]),
            metavar="N[,N...]",
            help=f"nodes of each pool that {does}, instead of --nodes; pools run independently",
        )
    pools.add_argument(
        "--resize",
        action="append",
        default=[],
        metavar="SECONDS:NODES",
        help="change the number of nodes at a virtual time; may be given several times",
    )
    for settings in (SimulationSettings, ExpertSettings, Assumptions):
        add_flags(command.add_argument_group(settings.__doc__), settings)


def run(options: argparse.Namespace) -> None:
    from moeserve.planner import hardware, layout, simulate, simulation_report, traffic

    experts = ExpertSettings(**given(options, ExpertSettings))
    find = functools.partial(
        layout.find_layouts,
        files_of(options).describe(),
        dtype=None if options.dtype == "auto" else options.dtype,
        tp=options.tp,
        kv_cache_dtype=options.kv_cache_dtype,
        pp=options.pipeline_parallel_size,
        pipeline_layers=options.pipeline_layers,
        num_redundant=experts.num_redundant_experts,
        hf_overrides=options.hf_overrides,
    )
    found = simulate.simulate(
        find,
        hardware.read_hardware(options.hardware),
        traffic.choose_traffic(options.traffic),
        size_of(options),
        loads=options.loads,
        assumptions=Assumptions(**given(options, Assumptions)),
        settings=SimulationSettings(**given(options, SimulationSettings)),
        experts=experts,
    )
    print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else simulation_report.as_text(found))


def size_of(options: argparse.Namespace) -> ClusterSize:
    """Return the pools of the cluster and their resizes.

    Raises:
        SettingsError: the flags contradict each other.
    """
    prefill, decode = options.prefill_nodes, options.decode_nodes
    resizes = tuple(map(_resize_of, options.resize))
    if prefill is None and decode is None:
        num_ranks, ranks_per_node = cluster_of(options)
        if list(resizes) != sorted(resizes, key=lambda resize: resize[0]):
            raise SettingsError(f"--resize {' --resize '.join(options.resize)}: give them in the order of their times")
        return ClusterSize(
            ranks_per_node=ranks_per_node,
            serving=(num_ranks,),
            resizes=tuple(Resize(at_s, num_nodes * ranks_per_node) for at_s, num_nodes in resizes),
        )
    if prefill is None or decode is None:
        given_flag, missing = (
            ("--decode-nodes", "--prefill-nodes")
            if prefill is None
            else (
                "--prefill-nodes",
                "--decode-nodes",
            )
        )
        raise SettingsError(f"{given_flag} needs {missing}: one pool computes prompts, and the other decodes")
    for flag, value in (("--ranks", options.ranks), ("--nodes", options.nodes), ("--resize", options.resize)):
        if value:
            raise SettingsError(f"{flag} cannot be combined with --prefill-nodes and --decode-nodes; leave one out")
    ranks_per_node = options.gpus_per_node or GPUS_PER_NODE
    return ClusterSize(
        ranks_per_node=ranks_per_node,
        serving=tuple(nodes * ranks_per_node for nodes in decode),
        prefill=tuple(nodes * ranks_per_node for nodes in prefill),
    )


def _resize_of(text: str) -> tuple[float, int]:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?):(\d{1,4})", text, re.ASCII)
    if match is None or int(match[2]) == 0:
        raise SettingsError(f"--resize {shown(text)} must be SECONDS:NODES, such as 600:20")
    return float(match[1]), int(match[2])
