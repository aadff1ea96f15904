"""`moeserve launch`."""

from __future__ import annotations

import argparse

from moeserve.cli.parser import Parser
from moeserve.errors import SettingsError
from moeserve.launch import cluster
from moeserve.launch.checks import Launch
from moeserve.launch.cluster import DEFAULT_PORT


def add_arguments(command: Parser) -> None:
    command.description = (
        "Start a Ray cluster on several hosts and run a command on it. Run the same command line on every host, or run "
        "it once with --hosts."
    )
    command.add_argument("--head", metavar="ADDRESS", help="address of the first host, as the others reach it")
    command.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of Ray on the first host (default: {DEFAULT_PORT})"
    )
    command.add_argument("--nodes", type=int, help="number of hosts (default: this one and those of --hosts)")
    command.add_argument(
        "--hosts", nargs="+", default=[], metavar="HOST", help="the other hosts, started from here by --remote-shell"
    )
    command.add_argument(
        "--remote-shell",
        default="ssh -o BatchMode=yes",
        metavar="COMMAND",
        help="with --hosts: command that runs a command line on a host (default: ssh -o BatchMode=yes)",
    )
    command.add_argument("--interface", help="network interface by name (eth1) or subnet (10.1.0.0/16)")
    command.add_argument("--num-cpus", type=int, metavar="CPUS", help="cores for ranks on this host (default: all)")
    command.add_argument(
        "--model", help="checkpoint folder that every host must be able to read; models in a hub are not checked"
    )
    command.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="time to wait for hosts (default: 60)"
    )
    command.add_argument("--token-from-stdin", action="store_true", help=argparse.SUPPRESS)
    command.add_argument(
        "command", nargs="*", metavar="-- COMMAND", help="command to run on the first host; none: keep the cluster up"
    )


def run(options: argparse.Namespace) -> int:
    num_nodes = 1 + len(options.hosts) if options.nodes is None else options.nodes
    if num_nodes < 1 or (options.num_cpus is not None and options.num_cpus < 1):
        raise SettingsError(f"--nodes {num_nodes} and --num-cpus {options.num_cpus}: both must be at least 1")
    if options.hosts and num_nodes != 1 + len(options.hosts):
        raise SettingsError(f"--nodes {num_nodes} contradicts {len(options.hosts)} other hosts; leave it out")
    return cluster.launch(
        Launch(
            head=options.head,
            port=options.port,
            num_nodes=num_nodes,
            hosts=options.hosts,
            remote_shell=options.remote_shell,
            interface=options.interface,
            num_cpus=options.num_cpus,
            model=options.model,
            timeout_s=options.timeout,
            command=options.command,
            reads_token=options.token_from_stdin,
        )
    )
