"""Starts Ray on this node, waits for the other nodes, and runs the command on the head.

Each node checks itself before it starts anything, so an error appears on the node concerned. Ray's processes are
children of this process and exit with it. No other Ray processes on the machine are affected.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence

from moeserve.config.environment import environment_of_cluster, is_token_refused, ray_token
from moeserve.errors import EngineError, MoeserveError
from moeserve.launch.checks import POLL_INTERVAL_S, Launch, check_node, find_addresses, why_unreachable
from moeserve.launch.commands import Command, ending_on_signals, raise_ended, running, running_in_background
from moeserve.machine import usable_cores

logger = logging.getLogger(__name__)

DEFAULT_PORT = 6379
SECONDS_WITHOUT_HEAD = 5.0  # time without the head after which a joined node stops its Ray
SECONDS_OF_A_START = 20.0  # a Ray that exits sooner counts as one that never started
TOKEN_BYTES = 32


def launch(options: Launch) -> int:
    """Run this node's part of the cluster. Return the command's exit status on the head, and 0 on other nodes.

    Raises:
        SettingsError: this node cannot be part of the cluster.
        EngineError: a node does not join, or fails.
    """
    try:
        with ending_on_signals():
            head, own = find_addresses(options)
            check_node(options, head, own)
            token = sys.stdin.readline().strip() if options.reads_token else ray_token()
            return _run_head(options, head, token) if head == own else _join(options, head, own, token)
    except MoeserveError as error:
        raise type(error)(f"on {socket.gethostname()}: {error}") from error


def _run_head(options: Launch, head: str, token: str) -> int:
    if not token and (options.hosts or options.num_nodes == 1) and not is_token_refused():
        token = secrets.token_hex(TOKEN_BYTES)
    if not token:
        logger.warning(
            "the nodes share no token, so anyone who can reach %s can run programs there: set RAY_AUTH_TOKEN on all "
            "nodes, or put one into ~/.ray/auth_token with `ray get-auth-token --generate`",
            head,
        )
    address = f"{head}:{options.port}"
    environment = environment_of_cluster(address, token)
    with contextlib.ExitStack() as commands:
        ray = commands.enter_context(
            _ray_node(["--head", f"--port={options.port}", "--include-dashboard=false"], head, options, environment)
        )
        remotes = [commands.enter_context(_remote_node(options, host, head, token)) for host in options.hosts]
        deadline = time.monotonic() + options.timeout_s
        while ray.is_running and (why := why_unreachable(head, options.port, head)):
            if time.monotonic() > deadline:
                raise EngineError(f"Ray did not start at {address} within {options.timeout_s:g} s: {why}")
            time.sleep(POLL_INTERVAL_S)
        _wait_for_nodes(options, address, environment, [ray, *remotes])
        if not options.command:
            print(f"moeserve: the cluster is up; Ctrl-C ends it. For programs on this host:\n{_exports(environment)}")
            sys.stdout.flush()
            while all(each.is_running for each in [ray, *remotes]):
                time.sleep(POLL_INTERVAL_S)
            raise_ended([ray, *remotes])
        command = commands.enter_context(running("the command", options.command, environment))
        while command.is_running:
            if not ray.is_running:
                raise_ended([ray])
            time.sleep(POLL_INTERVAL_S)
        return command.status


def _exports(environment: dict[str, str]) -> str:
    """Return shell commands that let programs use the cluster. They contain the token, which is secret."""
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    return "\n".join(f"export {name}={shlex.quote(environment[name])}" for name in names if name in environment)


def _wait_for_nodes(options: Launch, address: str, environment: dict[str, str], started: Sequence[Command]) -> None:
    """Wait until all nodes have joined and been checked. A separate process waits, because Ray may terminate it."""
    arguments = ["--nodes", str(options.num_nodes), "--timeout", str(options.timeout_s)]
    arguments += ["--model", options.model] if options.model else []
    command = [sys.executable, "-m", "moeserve.executor.ray", *arguments]
    with running("the check of the nodes", command, environment) as check:
        while check.is_running:
            if any(not each.is_running for each in started):
                raise_ended(started)
            time.sleep(POLL_INTERVAL_S)
        if check.status != 0:
            raise EngineError(f"the {options.num_nodes} nodes of the cluster at {address} cannot be used; see above")


def _join(options: Launch, head: str, own: str, token: str) -> int:
    """Serve as a node until the head has stopped. Join again after a failure of this node's Ray or of the network."""
    address = f"{head}:{options.port}"
    environment = environment_of_cluster(address, token)
    while True:
        _wait_for_head(options, head, own)
        with _ray_node([f"--address={address}"], own, options, environment) as ray:
            started = last_reached = time.monotonic()
            why = ""
            while ray.is_running and time.monotonic() - last_reached < SECONDS_WITHOUT_HEAD:
                why = why_unreachable(head, options.port, own)
                if not why:
                    last_reached = time.monotonic()
                time.sleep(POLL_INTERVAL_S)
            if why == os.strerror(errno.ECONNREFUSED):  # the host is up, but its Ray has stopped
                return 0
            if not ray.is_running and time.monotonic() - started < SECONDS_OF_A_START:
                raise_ended([ray])
        reason = f"the head at {address} cannot be reached ({why})" if why else "this node's Ray has ended"
        logger.warning("%s; joining again", reason)


def _wait_for_head(options: Launch, head: str, own: str) -> None:
    deadline = time.monotonic() + options.timeout_s
    while why := why_unreachable(head, options.port, own):
        if time.monotonic() > deadline:
            raise EngineError(
                f"the head at {head}:{options.port} cannot be reached from {own} within {options.timeout_s:g} s: {why}"
            )
        time.sleep(POLL_INTERVAL_S)


def _ray_node(
    role: list[str], own: str, options: Launch, environment: dict[str, str]
) -> contextlib.AbstractContextManager[Command]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={own}"]
    command += [f"--num-cpus={options.num_cpus or usable_cores()}", "--disable-usage-stats", "--block"]
    return running_in_background(f"Ray on node {own}", command, environment)


def _remote_node(options: Launch, host: str, head: str, token: str) -> contextlib.AbstractContextManager[Command]:
    """Run this command on another host. The token is sent on standard input, where other users cannot see it."""
    command = [sys.executable, "-m", "moeserve", "launch", "--head", head, "--port", str(options.port)]
    command += ["--token-from-stdin", "--nodes", str(options.num_nodes), "--timeout", str(options.timeout_s)]
    for flag, value in [
        ("--interface", options.interface),
        ("--num-cpus", options.num_cpus),
        ("--model", options.model),
    ]:
        command += [flag, str(value)] if value is not None else []
    shell = [*shlex.split(options.remote_shell), host]
    return running_in_background(f"host {host}", [*shell, shlex.join(command)], None, f"{token}\n")
