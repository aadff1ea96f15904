"""`moeserve simulate`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from moeserve.cli.parser import Parser, add_cluster, add_flags, cluster_of, given, reader
from moeserve.planner.hardware import TABLE
from moeserve.planner.settings import Assumptions, ExpertSettings, SimulationSettings


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve simulate MODEL --hardware NAME [flags]"
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
    for settings in (SimulationSettings, ExpertSettings, Assumptions):
        add_flags(command.add_argument_group(settings.__doc__), settings)


def run(options: argparse.Namespace) -> None:
    from moeserve.planner import hardware, simulate, simulation_report, traffic

    num_ranks, ranks_per_node = cluster_of(options)
    found = simulate.simulate(
        options.model,
        hardware.read_hardware(options.hardware),
        traffic.choose_traffic(options.traffic),
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tp=options.tp,
        pp=options.pipeline_parallel_size,
        pipeline_layers=options.pipeline_layers,
        dtype=None if options.dtype == "auto" else options.dtype,
        loads=options.loads,
        assumptions=Assumptions(**given(options, Assumptions)),
        settings=SimulationSettings(**given(options, SimulationSettings)),
        experts=ExpertSettings(**given(options, ExpertSettings)),
    )
    print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else simulation_report.as_text(found))
