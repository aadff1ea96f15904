"""Processes in Ray actors: the actor of one rank, and the base class of all actors.

The process that creates an actor exchanges messages with it over a channel, as with a process on its own host. Each
side has a socket pair, and two threads carry its bytes in calls of the actor. As long as these calls are answered, the
actor, its node and the network between are working.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeserve.addresses import address_on
from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.store_server import start_store
from moeserve.errors import EngineError
from moeserve.executor.ray.errors import exit_cause, first_line
from moeserve.executor.ray.nodes import facts_of_rank
from moeserve.executor.ray.placement import Place
from moeserve.processes import logs, progress_records
from moeserve.processes.channel import Channel
from moeserve.processes.failures import report_of
from moeserve.processes.progress_records import Phase, ProgressRecord, ProgressRecords, set_phase
from moeserve.processes.supervision import SECONDS_TO_EXIT, Watched, WatchedProcess, send_failures
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round
from moeserve.worker.protocol import RankStart

# A serving actor that has not answered for this long has failed.
SECONDS_OF_SILENCE = 7.0
# An actor that has not been called for this long exits.
SECONDS_UNTIL_ORPHANED = 30.0
SECONDS_OF_A_READ = 0.5
# The same two limits for an actor that imports torch or loads the model: on busy cores, its other threads get no time.
SECONDS_TO_START = 180.0
PIECE_BYTES = 2**20
TRANSFERS_AT_ONCE = 128  # per rank; further transfers wait


class ActorProcess:
    """The process of an actor, with a channel to the process that created it.

    An actor that is no longer called exits.
    """

    OUTGOING: ClassVar[Any] = None  # type of the messages that the process sends, besides failure reports

    def __init__(self, name: str, log_level: int, log_format: logs.LogFormat) -> None:
        self.name = name
        logs.start_log(log_level, log_format, process=name)
        logging.getLogger("ray").setLevel(max(log_level, logging.WARNING))
        self._socket, self._tunnel = socket.socketpair()
        self._channel: Channel[Any] | None = None
        self._is_serving = False  # the model is loaded
        self._records = ProgressRecords(1)
        progress_records.attach(self._records.fd, 0)
        self._last_call = time.monotonic()
        threading.Thread(target=self._end_as_orphan, name="watch-creator", daemon=True).start()

    @ray.method(concurrency_group="tunnel")
    def write(self, data: bytes) -> None:
        """Receive bytes for this side of the channel. Only one call at a time."""
        self._tunnel.sendall(data)

    @ray.method(concurrency_group="tunnel")
    def read(self) -> tuple[bytes, bytes]:
        """Return bytes that this side of the channel sends, after a short wait, and the encoded progress record.

        The record is empty while the model is loaded. Only one call at a time.
        """
        self._last_call = time.monotonic()
        poll = select.poll()
        poll.register(self._tunnel, select.POLLIN)
        data = self._tunnel.recv(PIECE_BYTES) if poll.poll(SECONDS_OF_A_READ * 1000) else b""
        return data, self._records.encoded(0) if self._is_serving else b""

    def _open_channel(self, incoming: Any) -> Channel[Any]:
        """Return the channel to the process that created the actor. May be called once."""
        self._channel = Channel(self._socket, incoming)
        return self._channel

    def _start_serving(self) -> None:
        """Mark the model as loaded. From now on, `read` returns progress records."""
        set_phase(Phase.IDLE)
        self._is_serving = True

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """Report an error over the channel, and raise an error without its details to Ray."""
        try:
            yield
        except BaseException as error:
            send_failures(self._channel or self._open_channel(None), [report_of(error, self.name)])
            raise RuntimeError(f"{self.name} has failed") from None

    def _exit(self) -> None:
        """Exit once the other side has read all messages."""
        poll = select.poll()
        poll.register(self._tunnel, select.POLLIN)
        deadline = time.monotonic() + SECONDS_TO_EXIT
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        ray.actor.exit_actor()

    def _end_as_orphan(self) -> None:
        while time.monotonic() - self._last_call < SECONDS_UNTIL_ORPHANED:
            time.sleep(SECONDS_OF_A_READ)
        os._exit(1)


class RankActor(ActorProcess):
    """One rank. It does nothing until `start` is called."""

    def __init__(self, name: str, log_level: int, log_format: logs.LogFormat) -> None:
        # Importing torch can block this process for longer than SECONDS_OF_SILENCE, and on busy cores for longer than
        # SECONDS_UNTIL_ORPHANED. No call is answered before the import ends, and the time without calls counts from
        # then.
        importlib.import_module("moeserve.worker.worker")
        super().__init__(name, log_level, log_format)
        self._store: Any = None
        self._worker: Any = None
        self._thread = threading.local()
        self._answers = False
        self._transfers: Any = None
        self._ends: dict[int, Future[TransferResult]] = {}  # futures of transfers in progress, by number

    def facts(self, data: bytes) -> bytes:
        """Return the `NodeFacts` of the actor's node, after fetching the model's files if the model is in a hub."""
        with self._reporting_failures():
            return msgspec.msgpack.encode(facts_of_rank(msgspec.msgpack.decode(data, type=EngineConfig)))

    def open_store(self, interface: str | None, address: str) -> bytes:
        """Open the store where ranks meet, on an address that other nodes can reach. Return its `StoreAddress`."""
        with self._reporting_failures():
            host = address_on(interface) if interface else address
            self._store = start_store(host)
            return msgspec.msgpack.encode(self._store.address)

    def start(self, data: bytes, *, show_progress: bool) -> bytes:
        """Connect to the other ranks and load the model. Return the rank's `Loaded`."""
        with self._reporting_failures():
            from moeserve.config.allocation import refusing_what_cannot_be_allocated
            from moeserve.models.checkpoint.model_files import on_this_host
            from moeserve.worker.rank_process import join
            from moeserve.worker.worker import Worker

            start = msgspec.msgpack.decode(data, type=RankStart)
            self._answers = start.answers
            config = on_this_host(start.config, only_cached=True)
            groups = join(start)
            with refusing_what_cannot_be_allocated(config):
                self._worker = Worker(config, groups, show_progress=show_progress)
            self._transfers = self._worker.start_transfers(lambda ended: self._ends[ended.number].set_result(ended))
            self._start_serving()
            return msgspec.msgpack.encode(self._worker.facts)

    @ray.method(concurrency_group="transfers")
    def transfer(self, data: bytes) -> bytes:
        """Run one transfer of KV cache blocks. Return its result."""
        transfer = msgspec.msgpack.decode(data, type=Transfer)
        end: Future[TransferResult] = Future()
        self._ends[transfer.number] = end
        self._transfers.submit(transfer)
        result = end.result()
        del self._ends[transfer.number]
        return msgspec.msgpack.encode(result)

    def execute(self, data: bytes) -> bytes:
        """Run one round. Return the result, or b"" from a rank that need not answer, or after the last round."""
        if self._worker is None:
            return b""
        with self._reporting_failures():
            if not hasattr(self._thread, "is_prepared"):  # Ray runs calls of one actor in several threads
                self._worker.prepare_thread()
                self._thread.is_prepared = True
            set_phase(Phase.COMPUTING)
            result = self._worker.execute(msgspec.msgpack.decode(data, type=Round))
            set_phase(Phase.IDLE)
            if result.agreement.ends_all:
                self._worker.close()  # collective: all ranks
                self._worker = None  # no rank runs rounds that were sent after this one
            return msgspec.msgpack.encode(result) if self._answers else b""


class ActorHandle:
    """An actor and two threads that carry its channel. See `ProcessHandle`."""

    def __init__(self, actor: Any, name: str, tunnel: socket.socket) -> None:
        """
        Args:
            tunnel: the other end of the channel.
        """
        self.actor = actor
        self.record = ProgressRecord()  # as last received
        self.answered_s = time.monotonic()  # time of the last answer
        self._tunnel = tunnel
        self._cause: str | None = None  # why the actor has ended
        self._ended = threading.Event()
        self._end_signal = WakeUp()
        self._lock = threading.Lock()  # guards the cause and the resources that `close` releases
        self._is_closed = False
        for carry in (self._carry_from_actor, self._carry_to_actor):
            threading.Thread(target=self._watch, args=(carry,), name=f"{carry.__name__} {name}", daemon=True).start()

    @property
    def watched_fds(self) -> list[int]:
        return [self._end_signal.fd]

    def exit_cause(self) -> str | None:
        return self._cause

    def kill(self) -> None:
        if ray.is_initialized():  # else this call would start another cluster
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self.actor)

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(max(0.0, timeout_s))

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tunnel.shutdown(socket.SHUT_RDWR)

    def _watch(self, carry: Callable[[], None]) -> None:
        """Carry bytes in one direction until the channel is closed here. A failure counts as the process's end."""
        try:
            carry()
            return
        except _SilenceError as error:
            cause = str(error)
        except RayActorError as error:
            cause = exit_cause(error)
        except Exception as error:  # of any kind: the actor cannot be reached
            cause = f"it cannot be reached through Ray any more ({type(error).__name__}: {first_line(error)})"
        with self._lock:
            if self._is_closed:
                return
            self._cause = self._cause or cause
            self._ended.set()
            self._end_signal.wake()

    def _carry_from_actor(self) -> None:
        timeout_s = SECONDS_TO_START
        unread = bytearray()  # buffered until our side reads it: an actor that is not read would exit
        while not self._is_closed:
            answer = self.actor.read.remote()
            try:
                data, record = ray.get(answer, timeout=timeout_s)
            except GetTimeoutError:  # this process itself may have been stopped for a while
                try:
                    data, record = ray.get(answer, timeout=SECONDS_OF_A_READ)
                except GetTimeoutError:
                    raise _SilenceError(timeout_s) from None
            self.answered_s = time.monotonic()
            self.record = ProgressRecord.decoded(record) if record else ProgressRecord()
            unread += data
            timeout_s = SECONDS_OF_SILENCE if record else SECONDS_TO_START
            with contextlib.suppress(BlockingIOError):
                while unread:
                    del unread[: self._tunnel.send(memoryview(unread)[:PIECE_BYTES], socket.MSG_DONTWAIT)]

    def _carry_to_actor(self) -> None:
        while data := self._tunnel.recv(PIECE_BYTES):
            ray.get(self.actor.write.remote(data))


class _SilenceError(Exception):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer for {timeout_s:g} s: the process hangs, or its node or the network has failed")


def start_actor(kind: type[ActorProcess], name: str, place: Place, resources: dict[str, Any]) -> WatchedProcess[Any]:
    """Start an actor at a place. `resources` are the Ray options of its resources."""
    actor_class: Any = ray.remote(
        concurrency_groups={"tunnel": 3, "transfers": TRANSFERS_AT_ONCE}, max_restarts=0, max_task_retries=0
    )(kind)
    actor = actor_class.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=place.group, placement_group_bundle_index=place.bundle
        ),
        **resources,
    ).remote(name, logs.log_level(), logs.log_format())
    ours, tunnel = socket.socketpair()
    return WatchedProcess(name, ours, kind.OUTGOING, ActorHandle(actor, name, tunnel))


def handle_of(process: Watched) -> ActorHandle:
    """Return the handle of a process that runs in an actor."""
    assert isinstance(process, WatchedProcess)
    assert isinstance(process.handle, ActorHandle)
    return process.handle


def actor_of(process: Watched) -> Any:
    """Return the actor in which a process runs."""
    return handle_of(process).actor


def answer_of(process: WatchedProcess[Any], reference: Any, timeout_s: float = SECONDS_TO_START) -> Any:
    """Return the answer to a call of an actor, which may still be starting.

    Raises:
        EngineError: the actor does not start.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        failures = process.failures()
        why = failures[0] if failures else first_line(error)
        raise EngineError(f"{process.name} did not start within {timeout_s:g} s: {why}") from None
