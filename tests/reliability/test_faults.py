"""Faults of real processes: which error names them, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from planted import POINTS, Planted
from rank_processes import lives, living_ranks, shared_memory_of
from reference_models import Reference

from moeserve import LLM, EngineError, SamplingParams, SettingsError
from moeserve.addresses import StoreAddress
from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.store import connect_store
from moeserve.distributed.store_server import start_store
from moeserve.engine import process_launcher
from moeserve.errors import DistributedError
from moeserve.processes import local

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="8MiB",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="float32",
    on_failure="end",  # so that each request ends with the error; continued ones are in test_resume.py
)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=200)
NOTICED_S = 100  # of a killed rank, at most: far less than the timeouts, and far more than it takes

# In this layout ranks 0 and 2 drive their replicas and serve ranks 1 and 3.
TWO_BY_TWO = dict(tensor_parallel_size=2, data_parallel_size=2)
NAMES = [f"rank {rank} (replica {rank // 2}, tp {rank % 2})" for rank in range(4)]
POINTS_OF_A_STEP = ["step", "attention", "router", "dispatch", "wait", "experts", "combine", "logits", "replayed"]
assert {*POINTS_OF_A_STEP, "moving", "loading", "agreement"} == POINTS.keys()


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def ports_of(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses on which processes listen."""
    connections = [each for process in processes for each in process.net_connections("inet")]
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def is_open(port: tuple[str, int]) -> bool:
    try:
        socket.create_connection(port, timeout=1).close()
    except OSError:
        return False
    return True


class Traces:
    """Processes, ports, shared memory and temporary files that an engine could leave behind."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """
        Args:
            folder: for temporary files of the engine, which is started later.
        """
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        self._ranks = living_ranks()
        self._own_ports = ports_of([psutil.Process()])
        self.processes: list[psutil.Process] = []
        self.ports: set[tuple[str, int]] = set()

    def record(self) -> None:
        """Record the processes and ports of the engine, while it lives."""
        self.processes = [process for process in living_ranks() if process not in self._ranks]
        self.ports = ports_of([psutil.Process(), *self.processes]) - self._own_ports
        assert {host for host, _ in self.ports} <= {"127.0.0.1"}

    def assert_none(self) -> None:
        """A killed process may take a moment until the last of its threads has ended, and its ports with it."""
        deadline = time.monotonic() + 200
        while True:
            ranks = {*self.processes, *living_ranks()} - {*self._ranks}
            left = [*filter(lives, ranks), *filter(is_open, self.ports)]
            if not left:
                break
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        assert os.listdir(self.temporary) == []
        assert shared_memory_of(process.pid for process in self.processes) == []


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traces:
    return Traces(tmp_path, monkeypatch)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def started_streams(llm: LLM, reference: Reference, num_streams: int) -> list[Iterator[Any]]:
    """Streams that have given a token each."""
    streams = [llm.stream(prompt, ENDLESS) for prompt in reference.prompts(*[20] * num_streams)]
    for stream in streams:
        next(stream)
    return streams


# ---- A rank is killed in a step. The detector does not depend on the point, so most points are left to `make soak`.

KILLS = [("agreement", 0), ("dispatch", 3), ("experts", 2), ("replayed", 1)]
ALL_KILLS = [("agreement", 0), ("agreement", 2), *((point, rank) for point in POINTS_OF_A_STEP for rank in range(4))]


@pytest.mark.parametrize(
    ("point", "rank"),
    [*KILLS, *(pytest.param(*each, marks=pytest.mark.soak) for each in ALL_KILLS if each not in KILLS)],
)
def test_a_rank_killed_in_a_step_is_named_and_nothing_is_left(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, point: str, rank: int
) -> None:
    planted = plant(rank=rank, point=point, action="kill")
    llm = LLM(reference.folder, **TWO_BY_TWO, **SETTINGS, enforce_eager=point != "replayed")
    traces.record()
    assert len(traces.processes) == 4
    assert not traces.ports
    streams = started_streams(llm, reference, 6)
    planted.trigger()
    for stream in streams:
        with pytest.raises(EngineError) as failure:
            list(stream)
        assert f"{NAMES[rank]}: killed by SIGKILL" in str(failure.value).splitlines()[0]
        assert [name for name in NAMES if name in str(failure.value)] == [NAMES[rank]]
    assert planted.seconds_since() < NOTICED_S
    with pytest.raises(EngineError):
        llm.generate([[3, 4]], GREEDY)
    assert not llm.core.has_work
    llm.shutdown()
    traces.assert_none()


def test_a_rank_killed_while_experts_move_is_named_and_nothing_is_left(
    reference: Reference, plant: Callable[..., Planted], traces: Traces
) -> None:
    planted = plant(rank=3, point="moving", action="kill")
    moving = dict(rebalance="auto", rebalance_horizon=10**9, expert_load_window=3, num_redundant_experts=4)
    llm = LLM(reference.folder, **TWO_BY_TWO, **SETTINGS, **moving)
    traces.record()
    planted.trigger()  # nothing moves before the first window has ended
    with pytest.raises(EngineError) as failure:
        llm.generate(reference.prompts(*[20] * 6), ENDLESS, use_tqdm=False)
    assert f"{NAMES[3]}: killed by SIGKILL" in str(failure.value).splitlines()[0]
    llm.shutdown()
    traces.assert_none()


@pytest.mark.parametrize("rank", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_killed_while_it_loads_is_named_and_nothing_is_left(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, rank: int
) -> None:
    planted = plant(rank=rank, point="loading", action="kill")
    planted.trigger()
    with pytest.raises(EngineError) as failure:
        LLM(reference.folder, **TWO_BY_TWO, **SETTINGS)
    assert f"{NAMES[rank]}: killed by SIGKILL" in str(failure.value)
    assert planted.seconds_since() < NOTICED_S
    traces.assert_none()


# ---- The first cause, as the user of a script sees it

SCRIPT = """
from moeserve import LLM, SamplingParams
llm = LLM({model!r}, **{settings!r})
params = SamplingParams(temperature=0, max_tokens=200)
streams = [llm.stream(prompt, params) for prompt in {prompts!r}]
for stream in streams:
    next(stream)
print("go", flush=True)
for stream in streams:
    list(stream)
"""


def run_script(
    reference: Reference, folder: Path, planted: Planted, **settings: Any
) -> tuple[int, str, list[psutil.Process]]:
    """Run a script whose engine has a planted fault. Return its exit status, its output, and its living processes."""
    script, mark = folder / "script.py", uuid.uuid4().hex
    script.write_text(
        SCRIPT.format(
            model=str(reference.folder),
            settings=SETTINGS | dict(enforce_eager=True) | settings,
            prompts=reference.prompts(*[20] * 4),
        )
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "MOESERVE_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if line == "go\n":
                planted.trigger()
            else:
                lines.append(line)
        status = process.wait(30)
    return status, "".join(lines), [each for each in psutil.process_iter() if _is_marked(each, mark)]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MOESERVE_TEST") == mark and lives(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_the_first_cause_is_in_the_first_screen_of_output(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, tmp_path: Path
) -> None:
    planted = plant(rank=3, point="attention", call=2, action="divide")
    status, output, living = run_script(reference, tmp_path, planted, **TWO_BY_TWO)
    first_screen = "\n".join(output.splitlines()[:40])
    for text in (rf"EngineError: .*{re.escape(NAMES[3])}: ZeroDivisionError: planted", r"models/decoder\.py"):
        assert re.search(text, first_screen), output
    # The others, who lost their neighbour, are not named, and print nothing.
    assert [name for name in NAMES if name in output] == [NAMES[3]], output
    assert "DistributedError" not in output
    assert status == 1
    assert living == []
    traces.assert_none()


# ---- Starts that fail


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (dict(data_parallel_size=1000), "1000 ranks"),
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3"),
        (dict(tensor_parallel_size=3, data_parallel_size=2), "tensor_parallel_size=3"),
    ],
)
def test_an_impossible_layout_is_refused_before_a_process_starts(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], named: str
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(local, "start_process", refuse)
    monkeypatch.setattr(process_launcher, "start_process", refuse)
    with pytest.raises(SettingsError, match=named):
        LLM(reference.folder, **layout, executor="mp", **SETTINGS)


@pytest.mark.parametrize("num_stores", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_stores_that_start_at_once_do_not_clash(num_stores: int) -> None:
    with ThreadPoolExecutor(20) as pool:
        servers = list(pool.map(lambda _: start_store(), range(num_stores)))
    stores = [connect_store(0, server.address, 10.0) for server in servers]
    for index, store in enumerate(stores):
        store.set("index", str(index))
    assert [int(store.get("index")) for store in stores] == list(range(num_stores))


@pytest.mark.parametrize("port", ["closed", "unanswered"])
def test_a_store_that_a_rank_cannot_reach_is_named(port: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        host, number = listener.getsockname()
        clients = [socket.socket() for _ in range(4)]
        if port == "closed":
            listener.close()
        else:  # more than its backlog: later clients get no answer, as behind a cut cable
            for client in clients:
                client.setblocking(False)
                client.connect_ex((host, number))
        with pytest.raises(DistributedError, match=rf"rank 3 .*127\.0\.0\.1:{number}"):
            connect(Mesh(tp=1, dp=4), 3, Rendezvous(StoreAddress(host=host, port=number, key="00"), 1.0))
        for client in clients:
            client.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_pairs_of_engines_at_once(reference: Reference) -> None:
    """Two cores start six at a time before a timeout ends."""
    prompts = reference.prompts(7, 12)
    expected = reference.continuations(prompts, 12)

    def use(_: int) -> list[list[int]]:
        with LLM(reference.folder, data_parallel_size=2, **SETTINGS) as llm:
            return tokens(llm.generate(prompts, GREEDY, use_tqdm=False))

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(use, range(200)):
            assert found == expected
    assert living_ranks() == []


# ---- Stopped or slow ranks


TIMEOUT_S = 5  # the shortest that a collective may have


@pytest.mark.slow_but("two")
@pytest.mark.parametrize(
    ("point", "collective"),
    [
        ("experts", r"reduce_scatter of group '\w+' \(.*step \d+, layer \d\)"),
        ("step", r"all_gather of group 'dp' "),  # outside of any collective: the others wait to agree
    ],
)
def test_a_stopped_rank_is_named_after_the_timeout(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, point: str, collective: str
) -> None:
    planted = plant(rank=2, point=point, call=2 if point == "experts" else 1, action="stop")
    timeouts = dict(collective_timeout=TIMEOUT_S, detect_hangs=False)
    with LLM(reference.folder, **TWO_BY_TWO, **timeouts, enforce_eager=True, **SETTINGS) as llm:
        traces.record()
        streams = started_streams(llm, reference, 4)
        planted.trigger()
        with pytest.raises(EngineError) as failure:
            list(streams[0])
        assert planted.seconds_since() >= TIMEOUT_S
    error = str(failure.value)
    assert re.search(r"rank.* 2\b", error), error
    assert re.search(collective, error), error
    traces.assert_none()


@pytest.mark.slow
def test_a_stopped_rank_that_no_other_waits_for_is_named_after_the_timeout(
    reference: Reference, plant: Callable[..., Planted], traces: Traces
) -> None:
    planted = plant(rank=0, point="step", action="stop")
    with LLM(reference.folder, executor="mp", step_timeout=5, detect_hangs=False, **SETTINGS) as llm:
        traces.record()
        (stream,) = started_streams(llm, reference, 1)
        planted.trigger()
        with pytest.raises(EngineError, match=r"rank 0: no step was finished for 5 s"):
            list(stream)
        assert planted.seconds_since() >= 5
    traces.assert_none()


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank", "layout"), [("step", 0, {}), ("step", 2, TWO_BY_TWO)], ids=["alone", "four"])
def test_a_rank_that_is_stopped_for_less_than_the_timeout_is_no_failure(
    reference: Reference, plant: Callable[..., Planted], point: str, rank: int, layout: dict[str, int]
) -> None:
    planted = plant(rank=rank, point=point, action="stop")
    timeouts = dict(collective_timeout=10, step_timeout=11, detect_hangs=False)
    with LLM(reference.folder, executor="mp", enforce_eager=True, **layout, **timeouts, **SETTINGS) as llm:
        streams = started_streams(llm, reference, 2)
        planted.trigger()
        pid = planted.stopped_pid()
        time.sleep(0.5 * timeouts["collective_timeout"])
        os.kill(pid, signal.SIGCONT)
        assert {list(stream)[-1].outputs[0].finish_reason for stream in streams} == {"length"}


@pytest.mark.slow
def test_a_rank_stopped_while_it_loads_is_named_after_the_timeout(
    reference: Reference, plant: Callable[..., Planted], traces: Traces
) -> None:
    planted = plant(rank=2, point="loading", action="stop")
    planted.trigger()
    with pytest.raises(EngineError, match=r"rank 2 did not load the model within 10 s \(load_timeout\)"):
        LLM(reference.folder, **TWO_BY_TWO, load_timeout=10, **SETTINGS)
    traces.assert_none()


@pytest.mark.slow
def test_a_rank_may_load_for_longer_than_a_collective_may_take(
    reference: Reference, plant: Callable[..., Planted]
) -> None:
    planted = plant(rank=2, point="loading", action="stop")
    planted.trigger()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(LLM, reference.folder, **TWO_BY_TWO, collective_timeout=TIMEOUT_S, **SETTINGS)
        pid = planted.stopped_pid()
        time.sleep(1.2 * TIMEOUT_S)
        os.kill(pid, signal.SIGCONT)
        started.result(60).shutdown()
