"""Agents that join the first host: on this host, so that no namespaces are needed."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from free_ports import free_port
from rank_processes import living_ranks
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.addresses import AgentAddress
from moeserve.config.settings import ParallelSettings
from moeserve.engine.process_launcher import even_places
from moeserve.errors import SettingsError
from moeserve.executor.hosts.agent import Agent
from moeserve.executor.hosts.connection import (
    HostOptions,
    Join,
    Refused,
    ToAgent,
    WrongKeyError,
    connected,
    prove,
)
from moeserve.executor.hosts.facts import own_facts
from moeserve.executor.hosts.options import host_options
from moeserve.executor.hosts.pool import HostPool
from moeserve.processes.channel import frame, receive_frame

HOST, KEY = "127.0.0.1", b"0123456789abcdef"
SECONDS = 120


class Hosts:
    """The pool of a first host, and the options of all hosts."""

    def __init__(self) -> None:
        self.port = free_port()
        self._pools: list[HostPool] = []
        self._agents: list[threading.Thread] = []

    def options(self, number: int, *, num_hosts: int = 2, key: bytes = KEY) -> HostOptions:
        return HostOptions(num_hosts=num_hosts, number=number, host=HOST, port=self.port, key=key)

    def start_pool(self) -> HostPool:
        pool = HostPool(self.options(0))
        self._pools.append(pool)
        return pool

    def start_agent(self, number: int = 1) -> threading.Thread:
        thread = threading.Thread(target=Agent(self.options(number)).run)
        thread.start()
        self._agents.append(thread)
        return thread

    def end(self) -> None:
        for pool in self._pools:
            pool.close()
        for agent in self._agents:
            agent.join(SECONDS)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.end()


@pytest.mark.parametrize("is_agent_first", [False, True])
def test_hosts_start_in_any_order_and_end_together(hosts: Hosts, is_agent_first: bool) -> None:
    agent = hosts.start_agent() if is_agent_first else None
    pool = hosts.start_pool()
    agent = agent or hosts.start_agent()
    pool.wait_for_all()
    assert pool.agents().keys() == {1}
    assert len(set(pool.cores_of_nodes())) == 1
    pool.close()
    agent.join(SECONDS)
    assert not agent.is_alive()


def test_a_host_that_cannot_join_gets_the_reason(hosts: Hosts) -> None:
    pool = hosts.start_pool()
    hosts.start_agent()
    pool.wait_for_all()
    for options, part in [
        (hosts.options(1), "node_rank=1 runs already"),
        (hosts.options(2), "node_rank=2"),
        (hosts.options(1, num_hosts=3), "nnodes=3"),
        (hosts.options(1, key=b"another key for this host"), "cluster_key_file"),
    ]:
        with pytest.raises(SettingsError, match=part):
            Agent(options).run()
    assert pool.agents().keys() == {1}
    with pytest.raises(SettingsError, match="does node_rank=0 run already"):
        HostPool(hosts.options(0))


def test_a_host_with_other_versions_is_refused(hosts: Hosts) -> None:
    hosts.start_pool()
    facts = msgspec.structs.replace(own_facts(), hostname="elsewhere", versions={"Python": "2.7"})
    with connected(HOST, hosts.port, KEY) as connection:
        join = Join(number=1, num_hosts=2, identity="", host=HOST, port=1, facts=facts)
        connection.sendall(frame(join))
        answer = msgspec.msgpack.decode(receive_frame(connection), type=ToAgent)
    assert isinstance(answer, Refused)
    assert "elsewhere has Python 2.7" in answer.reason
    assert "torch (missing)" in answer.reason


def test_another_instruction_set_is_warned_of(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    pool = hosts.start_pool()
    facts = msgspec.structs.replace(own_facts(), kernels="sse9")
    with connected(HOST, hosts.port, KEY) as connection:
        connection.sendall(frame(Join(number=1, num_hosts=2, identity="", host=HOST, port=1, facts=facts)))
        pool.wait_for_all()
        receive_frame(connection)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # the pool has closed the connection, after the warning
    (message,) = caplog.messages
    name, own = own_facts().hostname, own_facts().kernels or "no C++ kernels"
    assert f"(host 0 ({name}): {own}, host 1 ({name}): sse9)" in message


def test_nobody_without_the_key_is_heard(hosts: Hosts) -> None:
    """Neither by the first host nor by an agent; nor does an agent prove that it knows the key to one without it."""
    pool = hosts.start_pool()
    hosts.start_agent()
    pool.wait_for_all()
    for port in (hosts.port, pool.agents()[1].port):
        with socket.create_connection((HOST, port), timeout=SECONDS) as junk:
            junk.sendall(bytes(4096))
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while more := junk.recv(4096):
                    received += more
            assert len(received) <= 32  # a random number
        with pytest.raises(WrongKeyError):
            connected(HOST, port, b"another key of these hosts")
    assert pool.agents().keys() == {1}


def test_an_impostor_of_the_first_host_learns_nothing() -> None:
    with socket.create_server((HOST, 0)) as listener:

        def listen() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(WrongKeyError):
                prove(connection, b"another key of these hosts", connects=False)

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(WrongKeyError):
            connected(HOST, listener.getsockname()[1], KEY)
        thread.join(SECONDS)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (dict(node_rank=1), "nnodes"),
        (dict(nnodes=2), "master_addr"),
        (dict(nnodes=2, master_addr="10.0.0.1"), "cluster_key_file"),
        (dict(nnodes=2, master_addr="10.0.0.1:x", cluster_key_file="key"), "HOST:PORT"),
        (dict(nnodes=2, master_addr="10.0.0.1", cluster_key_file="/missing"), "cannot be read"),
    ],
)
def test_settings_that_lack_something(settings: dict[str, object], part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        host_options(ParallelSettings(**settings))  # type: ignore[arg-type]


def test_ranks_are_divided_evenly_and_move_to_the_emptiest_hosts() -> None:
    agents = {number: AgentAddress(number=number, host=f"h{number}", port=1, key="") for number in (1, 2, 3)}
    first, second, third = agents.values()
    assert even_places(4, 2, agents) == (None, None, first, first)
    assert even_places(4, 4, agents) == (None, first, second, third)
    moved = even_places(8, 4, {1: first, 3: third})
    assert moved[:4] == (None, None, first, first)
    assert moved[6:] == (third, third)
    assert len(set(moved[4:6])) == 2
    assert even_places(4, 2, {}) == (None,) * 4


@pytest.mark.ranks
def test_a_rank_of_an_agent_is_replaced(
    reference_named: Callable[[str], Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, port = reference_named("mixtral"), free_port()
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(16))
    settings = dict(nnodes=2, master_addr=f"{HOST}:{port}", cluster_key_file=str(key))
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    agent = subprocess.Popen([sys.executable, "-m", "moeserve", "serve", "--node-rank", "1", *flags])
    try:
        prompts, params = reference.prompts(9, 20, 3), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        with LLM(
            reference.folder,
            data_parallel_size=2,
            dtype="float32",
            max_model_len=256,
            kv_cache_memory="8MiB",
            num_threads=1,
            **settings,  # type: ignore[arg-type]
        ) as llm:
            streams = [llm.stream(prompt, params) for prompt in prompts]
            for stream in streams:
                next(stream)
            (victim,) = living_ranks(agent.pid)
            victim.kill()
            found = [list(stream)[-1].outputs[0].token_ids for stream in streams]
        assert agent.wait(SECONDS) == 0
    finally:
        agent.kill()
    assert found == reference.continuations(prompts, 60)
    (message,) = caplog.messages
    assert message.startswith("failed ranks are replaced")
    assert "rank 1 (replica 1, tp 0) on host 127.0.0.1: killed by SIGKILL" in message
