"""`moeserve plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Literal

from moeserve.cli.parser import Parser, add_cluster, add_flags, cluster_of, files_of, given, reader
from moeserve.config.settings import PositiveInt
from moeserve.errors import SettingsError
from moeserve.planner.hardware import TABLE
from moeserve.planner.settings import Assumptions


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve plan [MODEL] [flags]"
    add_cluster(command)
    command.add_argument("--tp", type=reader(int), help="show only the layout with this tp, ranks and formulas")
    group = command.add_argument_group("Placement of experts")
    group.add_argument(
        "--num-redundant-experts",
        type=reader(int),
        default=0,
        metavar="SLOTS",
        help="slots beyond one per expert, over all ranks together (default: 0)",
    )
    group.add_argument(
        "--expert-parallel",
        type=reader(Literal["auto"] | bool),
        metavar="PARALLEL",
        help="the engine's setting, for a CPU (default: auto; always true with --hardware)",
    )
    group = command.add_argument_group("Estimates", "Printed when --hardware is given.")
    group.add_argument("--hardware", metavar="NAME", help=f"{', '.join(TABLE)}, or a .json file that describes it")
    group.add_argument(
        "--traffic",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="lengths of requests: a .jsonl file in Mooncake's format, a .csv file in Azure's, or PROMPT:OUTPUT in "
        "tokens (default: 200 requests of Mooncake's conversations)",
    )
    group.add_argument(
        "--decode-requests",
        type=reader(PositiveInt),
        default=argparse.SUPPRESS,
        metavar="REQUESTS",
        help="concurrent requests that each replica decodes, if its cache holds them (default: 128)",
    )
    group.add_argument(
        "--prefill-tokens",
        type=reader(PositiveInt),
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="prompt tokens that each replica computes in a step (default: 4096)",
    )
    add_flags(command.add_argument_group(Assumptions.__doc__), Assumptions)


def run(options: argparse.Namespace) -> None:
    from moeserve.planner import estimate, hardware, layout, traffic

    num_ranks, ranks_per_node = cluster_of(options)
    for_estimates = {"traffic", "decode_requests", "prefill_tokens", *given(options, Assumptions)} & {*vars(options)}
    if options.hardware is None and for_estimates:
        flag = min(for_estimates).replace("_", "-")
        raise SettingsError(f"--{flag} is for estimates; give --hardware too")
    assumptions = Assumptions(**given(options, Assumptions))
    expert_parallel = options.expert_parallel
    if expert_parallel is None:
        expert_parallel = "auto" if options.hardware is None else True
    if options.hardware is not None and expert_parallel is not True:
        raise SettingsError("--hardware estimates layouts of whole experts; leave --expert-parallel out")
    found = layout.find_layouts(
        files_of(options).describe(),
        num_ranks,
        None if options.dtype == "auto" else options.dtype,
        options.tp,
        kv_cache_dtype=options.kv_cache_dtype,
        pp=options.pipeline_parallel_size,
        pipeline_layers=options.pipeline_layers,
        loads=options.loads,
        num_redundant=options.num_redundant_experts,
        expert_parallel=expert_parallel,
        keeps_stored=options.hardware is None,
        hf_overrides=options.hf_overrides,
    )
    estimates = None
    if options.hardware is not None:
        sizes = {name: getattr(options, name) for name in ("decode_requests", "prefill_tokens") if name in options}
        estimates = estimate.estimate_layouts(
            found,
            hardware.read_hardware(options.hardware),
            traffic.choose_traffic(getattr(options, "traffic", None)),
            assumptions,
            ranks_per_node=ranks_per_node,
            **sizes,
        )
    found = dataclasses.replace(found, model=options.model)
    if options.json:
        estimated = {} if estimates is None else {"estimates": dataclasses.asdict(estimates)}
        print(json.dumps(dataclasses.asdict(found) | estimated, indent=2))
    else:
        print(layout.as_text(found))
        if estimates is not None:
            print("\n" + estimate.as_text(estimates))
