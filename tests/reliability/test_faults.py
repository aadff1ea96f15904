"""Faults of real processes: what is noticed and how soon, what the error says, and that nothing is left behind.

What a test measures is among its recorded properties, and in its failure.
"""

from __future__ import annotations

import os
import re
import socket
import statistics
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
from planted import POINTS, Fault, Planted
from rank_processes import free_blocks, lives, living_ranks
from reference_models import Reference

from moeserve import LLM, EngineError, SamplingParams, SettingsError
from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.store import start_store
from moeserve.engine import replicas
from moeserve.errors import DistributedError
from moeserve.protocol import Request

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="8MiB", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32"
)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=200)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
ALL_BLOCKS = 256 // 16 * 8  # of each replica

# In this layout ranks 0 and 2 drive their replicas and serve ranks 1 and 3.
TWO_BY_TWO = dict(tensor_parallel_size=2, data_parallel_size=2)
NAMES = [f"rank {rank} (replica {rank // 2}, tp {rank % 2})" for rank in range(4)]
POINTS_OF_A_STEP = ["step", "attention", "router", "dispatch", "wait", "experts", "combine", "logits", "played"]
POINTS_OF_MOVING = ["moving", "switch"]
assert {*POINTS_OF_A_STEP, *POINTS_OF_MOVING, "loading", "agreement"} == POINTS.keys()

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


@pytest.fixture(scope="module")
def four(reference: Reference) -> Iterator[LLM]:
    """Four replicas of one rank."""
    with LLM(reference.folder, data_parallel_size=4, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planted]:
    """Plants a fault in the ranks that this test starts."""

    def plant(**fault: Any) -> Planted:
        folder = tmp_path / "planted"
        folder.mkdir()
        planted = Planted(folder, Fault(**fault) if fault else None)
        for name, value in planted.environment.items():
            monkeypatch.setenv(name, value)
        return planted

    return plant


def ports_of(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Where they listen."""
    connections = [each for process in processes for each in process.net_connections("inet")]
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def is_open(port: tuple[str, int]) -> bool:
    try:
        socket.create_connection(port, timeout=1).close()
    except OSError:
        return False
    return True


class Traces:
    """What an engine's processes could leave behind, and whether they have."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """To be made before the engine, in a folder that will be its processes' own for temporary files."""
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._ranks = living_ranks()
        self._own_ports = ports_of([psutil.Process()])
        self.processes: list[psutil.Process] = []
        self.ports: set[tuple[str, int]] = set()

    def look(self) -> None:
        """To be called while the engine lives."""
        self.processes = [process for process in living_ranks() if process not in self._ranks]
        self.ports = ports_of([psutil.Process(), *self.processes]) - self._own_ports
        assert {host for host, _ in self.ports} == {"127.0.0.1"}

    def assert_none(self, seconds: float = 1.0) -> None:
        """A process that has ended may take a moment until the last of its threads has, and its ports with it."""
        deadline = time.monotonic() + seconds
        while left := [*filter(lives, self.processes), *filter(is_open, self.ports)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        assert [process for process in living_ranks() if process not in self._ranks] == []
        assert os.listdir(self.temporary) == []
        assert set(os.listdir("/dev/shm")) <= self._shared_memory


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traces:
    return Traces(tmp_path, monkeypatch)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- R4: killed in the middle of a step


EACH_POINT_ONCE = [
    ("agreement", 0),
    ("attention", 1),
    ("router", 2),
    ("dispatch", 3),
    ("wait", 1),
    ("experts", 2),
    ("combine", 3),
    ("logits", 0),
    ("played", 1),
]
ALL_POINTS = [("agreement", 0), ("agreement", 2), *((point, rank) for point in POINTS_OF_A_STEP for rank in range(4))]


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        *EACH_POINT_ONCE,
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ALL_POINTS if each not in EACH_POINT_ONCE),
    ],
)
def test_a_rank_killed_in_a_step_is_named_and_nothing_is_left(
    reference: Reference,
    plant: Callable[..., Planted],
    traces: Traces,
    point: str,
    rank: int,
    record_property: Record,
) -> None:
    planted = plant(rank=rank, point=point, action="kill")
    llm = LLM(reference.folder, **TWO_BY_TWO, **SETTINGS, enforce_eager=point != "played")
    traces.look()
    assert len(traces.processes) == 4
    assert len(traces.ports) == 1  # the store
    streams = [llm.stream(prompt, ENDLESS) for prompt in reference.prompts(*[20] * 6)]
    for stream in streams:
        next(stream)
    planted.trigger()
    times = []
    for stream in streams:
        with pytest.raises(EngineError) as failure:
            list(stream)
        times.append(planted.seconds_since())
        first_line = str(failure.value).splitlines()[0]
        assert f"{NAMES[rank]}: killed by SIGKILL" in first_line
        assert [name for name in NAMES if name in str(failure.value)] == [NAMES[rank]]
    record_property("seconds until the first error", times[0])
    record_property("seconds until the last error", times[-1])
    with pytest.raises(EngineError, match="takes no requests"):
        llm.generate([[3, 4]], GREEDY)
    assert not llm.core.has_work
    llm.shutdown()
    traces.assert_none()
    assert times[0] <= 1.0, times
    assert times[-1] <= 5.0, times


@pytest.mark.parametrize(("point", "rank"), [("moving", 3), ("switch", 1)])
def test_a_rank_killed_while_experts_move_is_named_and_nothing_is_left(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, point: str, rank: int
) -> None:
    planted = plant(rank=rank, point=point, action="kill")
    moving = dict(rebalance="auto", rebalance_horizon=10**9, expert_load_window=3, num_redundant_experts=4)
    llm = LLM(reference.folder, **TWO_BY_TWO, **SETTINGS, **moving)
    traces.look()
    planted.trigger()  # nothing moves before the first window has ended
    with pytest.raises(EngineError) as failure:
        llm.generate(reference.prompts(*[20] * 6), ENDLESS, use_tqdm=False)
    assert f"{NAMES[rank]}: killed by SIGKILL" in str(failure.value).splitlines()[0]
    llm.shutdown()
    traces.assert_none()


# ---- R6: the root cause, as the user of a script sees it

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
    """A script whose engine gets a planted fault. Its exit status, all that it wrote, and what of it still lives."""
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


@pytest.mark.parametrize(
    ("rank", "fault", "cause", "line"),
    [
        (3, dict(point="attention", call=3, action="divide"), "ZeroDivisionError: planted", "raise ZeroDivisionError"),
        (0, dict(point="experts", call=2, action="exhaust"), "MemoryError: planted", "raise MemoryError"),
        (1, dict(point="experts", call=1, action="allocate"), "RuntimeError: .*can't allocate memory", "torch.empty"),
    ],
)
def test_the_root_cause_is_in_the_first_screen_of_output(
    reference: Reference,
    plant: Callable[..., Planted],
    traces: Traces,
    tmp_path: Path,
    rank: int,
    fault: dict[str, Any],
    cause: str,
    line: str,
    record_property: Record,
) -> None:
    planted = plant(rank=rank, **fault)
    status, output, living = run_script(reference, tmp_path, planted, **TWO_BY_TWO)
    seconds = planted.seconds_since()
    record_property("seconds from the fault to the end of the script", seconds)
    first_screen = "\n".join(output.splitlines()[:40])
    told = re.search(
        rf"EngineError: the engine failed while it served 4 requests: {re.escape(NAMES[rank])}: {cause}", output
    )
    assert told, output
    assert told[0] in first_screen, output
    assert line in first_screen, output
    where = {"attention": "layers/attention.py", "experts": "moe/layer.py"}[fault["point"]]
    assert where in first_screen, output
    # The others, who lost their neighbour, are not named, and say nothing.
    assert [name for name in NAMES if name in output] == [NAMES[rank]], output
    assert "DistributedError" not in output
    assert status == 1
    assert seconds < 5, seconds
    assert living == []
    traces.assert_none()


# ---- Starts that fail


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (dict(data_parallel_size=1000), "needs 1000 ranks"),
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3: the checkpoint's attention heads cannot be divided"),
        (dict(tensor_parallel_size=3, data_parallel_size=2), "tensor_parallel_size=3: .* use one of 1, 2, 4"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_a_process_starts(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], message: str
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    started = time.monotonic()
    with pytest.raises(SettingsError, match=message):
        LLM(reference.folder, **layout, **SETTINGS)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("rank", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_killed_while_it_loads_is_named_and_nothing_is_left(
    reference: Reference, plant: Callable[..., Planted], traces: Traces, rank: int, record_property: Record
) -> None:
    planted = plant(rank=rank, point="loading", action="kill")
    planted.trigger()
    with pytest.raises(EngineError) as failure:
        LLM(reference.folder, **TWO_BY_TWO, **SETTINGS)
    seconds = planted.seconds_since()
    record_property("seconds until the error", seconds)
    assert f"while the model was loaded: {NAMES[rank]}: killed by SIGKILL" in str(failure.value)
    assert seconds < 5, seconds
    traces.assert_none()


@pytest.mark.parametrize("num_stores", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_stores_that_start_at_once_do_not_clash(num_stores: int) -> None:
    with ThreadPoolExecutor(20) as pool:
        stores = list(pool.map(lambda _: start_store(), range(num_stores)))
    assert len({store.port for store in stores}) == num_stores
    for index, store in enumerate(stores):
        store.set("index", str(index))
    assert [int(store.get("index")) for store in stores] == list(range(num_stores))


def join_at(port: int, timeout_s: float) -> None:
    connect(Mesh(tp=1, dp=4), 3, Rendezvous("127.0.0.1", port, timeout_s))


@pytest.mark.parametrize("port", ["closed", "unanswered"])
def test_a_rank_that_cannot_reach_the_store_says_so(port: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        host_port = listener.getsockname()
        clients = [socket.socket() for _ in range(4)]
        if port == "closed":
            listener.close()
        else:  # more than it keeps: to those who come later it is as if the network was cut
            for client in clients:
                client.setblocking(False)
                client.connect_ex(host_port)
        started = time.monotonic()
        with pytest.raises(DistributedError, match=rf"rank 3 cannot reach the store at 127\.0\.0\.1:{host_port[1]}"):
            join_at(host_port[1], timeout_s=2)
        assert time.monotonic() - started < 5
        for client in clients:
            client.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_pairs_of_engines_at_once(reference: Reference) -> None:
    """Six at a time are what two cores start before anybody's patience ends."""
    prompts = reference.prompts(7, 12)
    expected = [reference.greedy(prompt, 12) for prompt in prompts]

    def use(_: int) -> list[list[int]]:
        with LLM(reference.folder, data_parallel_size=2, **SETTINGS) as llm:
            return tokens(llm.generate(prompts, GREEDY, use_tqdm=False))

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(use, range(200)):
            assert found == expected
    assert living_ranks() == []


# ---- R5: stopped or slow


@pytest.mark.parametrize(
    ("rank", "point", "operation"),
    [(2, "experts", "reduce_scatter"), pytest.param(1, "attention", "reduce_scatter", marks=pytest.mark.soak)],
)
def test_a_rank_stopped_inside_a_layer_is_named_at_the_timeout(
    reference: Reference,
    plant: Callable[..., Planted],
    traces: Traces,
    rank: int,
    point: str,
    operation: str,
    record_property: Record,
) -> None:
    planted = plant(rank=rank, point=point, call=2, action="stop")
    with LLM(reference.folder, **TWO_BY_TWO, collective_timeout=5, enforce_eager=True, **SETTINGS) as llm:
        traces.look()
        streams = [llm.stream(prompt, ENDLESS) for prompt in reference.prompts(*[20] * 4)]
        for stream in streams:
            next(stream)
        planted.trigger()
        with pytest.raises(EngineError) as failure:
            list(streams[0])
        seconds = planted.seconds_since()
    record_property("seconds until the error", seconds)
    error = str(failure.value)
    assert re.search(rf"No failure report from .*rank.* {rank}\b", error), error
    assert re.search(
        rf"{operation} of group '\w+' \(.*step \d+, layer \d\) failed: not all ranks joined within 5 s", error
    ), error
    assert 5 <= seconds < 10, seconds
    traces.assert_none()


def test_a_slow_rank_is_no_fault(reference: Reference, plant: Callable[..., Planted], traces: Traces) -> None:
    """It sleeps for 0.8 of the timeout in the middle of a layer, and goes on."""
    planted = plant(rank=3, point="experts", call=2, action="sleep")
    with LLM(reference.folder, **TWO_BY_TWO, collective_timeout=5, enforce_eager=True, **SETTINGS) as llm:
        traces.look()
        prompts = reference.prompts(*[20] * 4)
        planted.trigger()
        started = time.monotonic()
        assert tokens(llm.generate(prompts, GREEDY)) == [reference.greedy(prompt, 12) for prompt in prompts]
        assert time.monotonic() - started > 4
        assert free_blocks(llm, ALL_BLOCKS) == [ALL_BLOCKS] * 2
    traces.assert_none()


# ---- Aborts


def test_an_abort_in_any_step_leaves_no_block_behind(reference: Reference, plant: Callable[..., Planted]) -> None:
    """After every number of steps, from none to the last, with a neighbour on each replica."""
    gate = plant()
    settings = SETTINGS | dict(max_num_batched_tokens=16)
    with LLM(reference.folder, data_parallel_size=2, **settings) as llm:
        found: dict[str, list[int]] = {}
        ends: dict[str, str] = {}

        def add(name: str, prompt: list[int], num_tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            found[name] = []
            llm.core.add(Request(request_id=name, prompt_token_ids=prompt, params=params.for_engine(), seed=0))

        def finish() -> None:
            while llm.core.has_work:
                for update in llm.core.step():
                    found[update.request_id] += update.token_ids
                    if update.finish_reason is not None:
                        assert update.request_id not in ends
                        ends[update.request_id] = update.finish_reason

        num_steps, num_tokens_of = 0, []
        while not num_tokens_of or num_tokens_of[-1] < 12:
            first, second, prompt = reference.prompts(9, 14, 40, seed=num_steps)
            victim = f"victim {num_steps}"
            gate.close()
            add(f"first {num_steps}", first, 30)
            add(f"second {num_steps}", second, 30)
            gate.pass_steps(1)
            add(victim, prompt, 12)
            gate.pass_steps(num_steps)  # it is taken in after the step that waits, so it runs in so many
            llm.core.abort(victim)
            gate.open()
            finish()
            num_tokens_of.append(len(found[victim]))
            whole = reference.greedy(prompt, 12)
            assert found[victim] == whole[: num_tokens_of[-1]]
            assert ends[victim] == ("abort" if num_tokens_of[-1] < 12 else "length")
            assert found[f"first {num_steps}"] == reference.greedy(first, 30)
            assert found[f"second {num_steps}"] == reference.greedy(second, 30)
            assert free_blocks(llm, ALL_BLOCKS) == [ALL_BLOCKS] * 2
            # What an aborted prompt left in the prefix cache has been computed.
            assert tokens(llm.generate([prompt], GREEDY)) == [whole]
            num_steps += 1
        # Its prompt takes three steps, the last of which gives a token.
        assert num_tokens_of == [0, 0, 0, *range(1, 13)]


def test_news_that_comes_before_another_request_is_told_once(four: LLM, reference: Reference) -> None:
    prompts = reference.prompts(9, 14, 11)
    streams = []
    for prompt in prompts:
        streams.append(four.stream(prompt, SamplingParams(temperature=0, max_tokens=40)))
        next(streams[-1])
        time.sleep(0.1)  # more tokens come, and nobody asks for them before the next request
    assert [list(stream)[-1].outputs[0].token_ids for stream in streams] == [
        reference.greedy(prompt, 40) for prompt in prompts
    ]


# ---- Idle replicas


def test_one_busy_replica_among_four(
    four: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Its steps need the three that have nothing to do, every time."""
    prompts = reference.prompts(*range(3, 43), seed=11)
    expected = [reference.greedy(prompt, 12) for prompt in prompts]
    chosen, choose = [], replicas.DPRouter.choose

    def choose_and_tell(*arguments: Any) -> int:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(replicas.DPRouter, "choose", choose_and_tell)
    times = []
    for number in range(200):
        num_tokens = 1 + number % 12
        started = time.monotonic()
        (output,) = four.generate(
            [prompts[number % 40]], SamplingParams(temperature=0, max_tokens=num_tokens), use_tqdm=False
        )
        times.append(time.monotonic() - started)
        assert output.outputs[0].token_ids == expected[number % 40][:num_tokens]
        assert output.outputs[0].finish_reason == "length"
    record_property("seconds of the longest request", max(times))
    assert chosen == [0] * 200
    assert max(times) < 10  # so no step took longer
    assert free_blocks(four, ALL_BLOCKS) == [ALL_BLOCKS] * 4


def cores_used_by(processes: list[psutil.Process], seconds: float) -> float:
    """By this process and those together, in the mean over some time in which this one sleeps."""
    pids = [os.getpid(), *(process.pid for process in processes)]

    def seconds_used() -> float:
        files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    before, started = seconds_used(), time.monotonic()
    time.sleep(seconds)
    return (seconds_used() - before) / (time.monotonic() - started)


def seconds_to_answer(llm: LLM, pauses: list[float]) -> list[float]:
    """Of a request of three tokens of prompt and one of output, after each pause."""
    found = []
    for pause in pauses:
        time.sleep(pause)
        started = time.monotonic()
        llm.generate([[3, 4, 5]], ONE_TOKEN, use_tqdm=False)
        found.append(time.monotonic() - started)
    return found


def see_it_idle(llm: LLM, others: list[psutil.Process], pauses: list[float], record: Record) -> None:
    """What a busy machine adds to each wake-up and to each step is kept out of both figures as far as it can be."""
    awake = seconds_to_answer(llm, [0.0] * 20)
    time.sleep(0.5)
    own = [process for process in living_ranks() if process not in others]
    assert len(own) == 4
    used = [cores_used_by(own, 2) for _ in range(3)]
    record("cores used while idle", used)
    answers = seconds_to_answer(llm, pauses)
    awake += seconds_to_answer(llm, [0.0] * 20)
    record("seconds to answers after pauses, and without", (answers, awake))
    usual = statistics.median(awake)
    assert statistics.median(answers) - usual < 0.05, (answers, awake)
    assert sorted(answers)[-2] - usual < 0.2, (answers, awake)  # a wake-up that is lost costs up to a second
    assert statistics.median(used) < 0.01, used


def test_four_idle_replicas_use_less_than_a_hundredth_of_a_core_and_wake_at_once(
    four: LLM, record_property: Record
) -> None:
    see_it_idle(four, [], [1.0, 1.3, 0.7, 1.7, 2.2], record_property)


def test_idle_replicas_of_two_ranks_too(reference: Reference, record_property: Record) -> None:
    others = living_ranks()
    with LLM(reference.folder, **TWO_BY_TWO, **SETTINGS) as llm:
        see_it_idle(llm, others, [1.4, 2.1, 1.1], record_property)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_first_request_after_a_minute_of_idling(four: LLM, record_property: Record) -> None:
    see_it_idle(four, [], [60.0] * 5, record_property)
