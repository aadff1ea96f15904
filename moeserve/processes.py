"""A child process that is watched: started, told what to do, heard to its last words, ended. Knows no work of ours.

Parent and child talk over a socket pair that the child inherits. Nobody else can connect to it, it leaves nothing on
the disk, and its end of file tells each side of the other's death: messages, secrecy and watch are one thing. Beside
it the parent waits on the child's pidfd, which speaks even where a stray copy of a socket is open somewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec

from moeserve import errors
from moeserve.errors import DistributedError, EngineError, MoeserveError
from moeserve.interrupts import interrupts_allowed

Incoming = TypeVar("Incoming")
Config = TypeVar("Config")

# How long those who follow a death with their own are waited for, so that the first cause can be named. Seconds.
SECONDS_TO_COLLECT = 0.5
# How often a process looks for a death where the system has no pidfd. Seconds.
SECONDS_BETWEEN_LOOKS = 0.2
# How long a process that was asked to go may take before it is killed. Seconds.
SECONDS_TO_GO = 2.0

# Files in which torch only passes a call on, from one layer of a model to the next.
PASSING_ON = (os.path.join("torch", "nn", "modules", "module.py"), os.path.join("torch", "utils", "_contextlib.py"))

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 2**20


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended that should have lived, and what it said last."""

    name: str  # of the process, as people know it: "rank 3"
    cause: str  # one line: "killed by SIGKILL", "ValueError: ..."
    follows_another: bool = False  # it ended because another rank had: a DistributedError
    error: str | None = None  # name of the class in moeserve/errors.py, where it was one of those
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}" + (f"\n\n{self.traceback.rstrip()}" if self.traceback else "")


class _LastWords(msgspec.Struct, frozen=True, tag="last words"):
    """The last message of a child: in one piece, so that who reads it knows of all deaths or of none."""

    deaths: list[Death]


class _Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child."""

    name: str
    parent_pid: int
    log_level: int
    config: msgspec.Raw


def death_of(error: BaseException, name: str) -> Death:
    """What is told of a process that an exception ended."""
    kind = type(error)
    is_known = isinstance(error, MoeserveError) and getattr(errors, kind.__name__, None) is kind
    message = str(error) if is_known else f"{kind.__name__}: {error}".removesuffix(": ")
    return Death(
        name=name,
        cause=message,
        follows_another=isinstance(error, DistributedError),
        error=kind.__name__ if is_known else None,
        traceback=_shown_traceback(error),
    )


def _shown_traceback(error: BaseException) -> str:
    """Two lines for each frame, and none for those that only pass a call on: so that its end is on the first screen."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        outer, innermost = link.stack[:-1], link.stack[-1:]
        frames = [frame for frame in outer if not frame.filename.endswith(PASSING_ON)] + innermost
        link.stack = traceback.StackSummary.from_list(
            [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in frames]
        )
        link = link.__cause__ or link.__context__
    return "".join(shown.format())


def root_cause(deaths: Sequence[Death]) -> Death:
    """The death that the others followed: the first that is no mere consequence of another."""
    return next((death for death in deaths if not death.follows_another), deaths[0])


def as_error(death: Death, while_doing: str) -> MoeserveError:
    """The exception for whoever started the process: of the child's own class where the user can put it right."""
    kind = getattr(errors, death.error or "", EngineError)
    if issubclass(kind, ValueError):
        return kind(f"{death.cause} ({death.name}, {while_doing})")
    return EngineError(f"{while_doing}: {death}")


class Channel(Generic[Incoming]):
    """Messages both ways over a stream socket, each a msgpack value behind its length.

    `send` never waits: what the socket does not take is kept until `flush`, or until `receive` waits. So two sides
    that both have much to say cannot block each other. One thread at a time receives; any may send.
    """

    def __init__(self, connection: socket.socket, incoming: type[Incoming]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._lock = threading.Lock()  # of the outbox
        self.is_closed = False  # the other side has gone, and all that it said was received

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        """Sends what the socket takes now, and keeps the rest. What goes to a side that has gone is lost."""
        self.send_encoded(self.encode(message))

    def encode(self, message: Any) -> bytes:
        """A message for `send_encoded`, where several are to get the same."""
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send_encoded(self, frame: bytes) -> None:
        with self._lock:
            self._outbox += frame
            self._write()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until the socket has taken everything. False: it did not in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        while True:
            with self._lock:
                self._write()
            if not self._outbox:
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            poll.poll(None if left is None else left * 1000)

    def receive(self, timeout_s: float | None = 0.0) -> list[Incoming]:
        """All messages that have come. Waits for the first one, at most so long; None: for ever, or until the end.

        Raises:
            msgspec.DecodeError: the other side sent what it must not.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._read()
            messages = self._take_messages()
            if messages or self.is_closed:
                return messages
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            poll = select.poll()
            poll.register(self, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poll.poll(None if left is None else left * 1000)
            if self._outbox:
                self.send_encoded(b"")

    def close(self) -> None:
        self._socket.close()
        self.is_closed = True

    def _write(self) -> None:
        try:
            while self._outbox:
                num_sent = self._socket.send(memoryview(self._outbox)[:_CHUNK_BYTES], socket.MSG_NOSIGNAL)
                del self._outbox[:num_sent]
        except BlockingIOError:
            pass
        except OSError:  # the other side has gone; its end of file, or the watch, tells why
            self._outbox.clear()

    def _read(self) -> None:
        try:
            while not self.is_closed:
                piece = self._socket.recv(_CHUNK_BYTES)
                self._inbox += piece
                self.is_closed = not piece
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    def _take_messages(self) -> list[Incoming]:
        messages, start = [], 0
        while len(self._inbox) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbox, start)
            end = start + _LENGTH.size + length
            if len(self._inbox) < end:
                break
            messages.append(self._decoder.decode(bytes(self._inbox[start + _LENGTH.size : end])))
            start = end
        del self._inbox[:start]
        return messages


class Watched(Protocol[Incoming]):
    """A process that this one talks with and watches, wherever it runs."""

    name: str  # what it is called in messages to people: "rank 3"
    channel: Channel[Incoming]

    @property
    def watched_fds(self) -> list[int]:
        """What becomes readable, beside the channel, when the process has died."""
        ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_unread(self) -> bool:
        """Whether messages have come that `receive` has not returned: `deaths` may have found them."""
        ...

    def receive(self, timeout_s: float = 0.0) -> list[Incoming]:
        """Messages that have come. Last words are not among them: see `deaths`."""
        ...

    def deaths(self) -> list[Death]:
        """Its own, and those of its own children that it told of; empty while it lives and complains of nothing."""
        ...

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        ...

    def close(self) -> None:
        """Forgets one that has ended."""
        ...


class Line(Generic[Incoming]):
    """A channel to a process, on which last words come between its messages."""

    def __init__(self, name: str, connection: socket.socket, incoming: Any) -> None:
        self.name = name
        self.channel: Channel[Incoming] = Channel(connection, incoming | _LastWords)
        self._messages: list[Incoming] = []
        self._last_words: list[Death] = []

    def cause_of_end(self) -> str | None:
        """One line, once the process has ended."""
        raise NotImplementedError

    @property
    def has_ended(self) -> bool:
        return self.cause_of_end() is not None

    @property
    def has_unread(self) -> bool:
        return bool(self._messages)

    def receive(self, timeout_s: float = 0.0) -> list[Incoming]:
        self._listen(0.0 if self._messages else timeout_s)
        messages, self._messages = self._messages, []
        return messages

    def deaths(self) -> list[Death]:
        cause = self.cause_of_end()  # before its last words are looked for: they come before its end
        with contextlib.suppress(msgspec.DecodeError):  # they may be cut off in the middle
            self._listen(0.0)
        if self._last_words:
            return self._last_words
        return [] if cause is None else [Death(name=self.name, cause=cause)]

    def _listen(self, timeout_s: float) -> None:
        for message in self.channel.receive(timeout_s):
            if isinstance(message, _LastWords):
                self._last_words += message.deaths
            else:
                self._messages.append(message)


def say_last_words(channel: Channel[Any], deaths: Sequence[Death]) -> None:
    """To whoever watches this process. Waits a little until they are sent."""
    channel.send(_LastWords(list(deaths)))
    channel.flush(SECONDS_TO_GO)


class Child(Line[Incoming]):
    """A process on this host that this one started, from its start to its end. See `Watched`."""

    def __init__(
        self,
        module: str,
        name: str,
        config: Any,
        incoming: Any,
        *,
        environment: Mapping[str, str],
    ) -> None:
        """Starts `python -m module` and hands it its configuration.

        Args:
            name: what the process is called in messages: "rank 3".
            config: what `run_child` gives to the child: anything that msgspec can encode.
            incoming: type of the messages that the child sends, without `Death`.
            environment: of the child.
        """
        if not sys.executable:
            raise EngineError("this Python does not know its own program (sys.executable), so it can start no other")
        ours, theirs = socket.socketpair()
        with theirs:
            # Not in our session: a Ctrl-C in the terminal is ours to handle, and must not end the child.
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment) | _same_modules(),
                start_new_session=True,
            )
        super().__init__(name, ours, incoming)
        self.pid = self._process.pid
        self._pidfd = _open_pidfd(self.pid)
        self.channel.send(
            _Launch(
                name=name,
                parent_pid=os.getpid(),
                log_level=logging.getLogger("moeserve").getEffectiveLevel(),
                config=msgspec.Raw(msgspec.msgpack.encode(config)),
            )
        )

    @property
    def watched_fds(self) -> list[int]:
        return [] if self._pidfd is None else [self._pidfd]

    def cause_of_end(self) -> str | None:
        status = self._process.poll()
        return None if status is None else _exit_cause(status)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def collect_deaths(
    children: Sequence[Watched[Any]], seen: Sequence[Death] = (), *, seconds: float = SECONDS_TO_COLLECT
) -> list[Death]:
    """All deaths that can be known soon after a first sign of one. Ends early once the first cause is among them."""
    deadline = time.monotonic() + seconds
    while True:
        deaths_of_child = [child.deaths() for child in children]
        deaths = [*seen, *(death for each in deaths_of_child for death in each)]
        living = [child for child, its_deaths in zip(children, deaths_of_child, strict=True) if not its_deaths]
        left = deadline - time.monotonic()
        if left <= 0 or not living or any(not death.follows_another for death in deaths):
            return deaths
        _wait_for_sockets(living, left)


def wait_for_news(children: Sequence[Watched[Any]], timeout_s: float | None) -> None:
    """Waits for a message or a death of any of them; also sends what could not be sent before."""
    # What `deaths` took from a socket will not make it readable again.
    _wait_for_sockets(children, 0.0 if any(child.has_unread for child in children) else timeout_s)


def _wait_for_sockets(children: Sequence[Watched[Any]], timeout_s: float | None) -> None:
    poll = select.poll()
    for child in children:
        if not child.channel.is_closed:
            poll.register(child.channel, select.POLLIN | (select.POLLOUT if child.channel.has_unsent else 0))
        for fd in child.watched_fds:
            poll.register(fd, select.POLLIN)
        if not child.watched_fds:
            timeout_s = SECONDS_BETWEEN_LOOKS if timeout_s is None else min(timeout_s, SECONDS_BETWEEN_LOOKS)
    with interrupts_allowed():
        poll.poll(None if timeout_s is None else timeout_s * 1000)
    for child in children:
        if child.channel.has_unsent:
            child.channel.send_encoded(b"")


def end_all(children: Sequence[Watched[Any]], *, patience_s: float = 0.0) -> None:
    """Ends processes: gives them time to go by themselves, then kills. None is left afterwards."""
    deadline = time.monotonic() + patience_s
    for child in children:
        child.channel.flush(max(0.0, deadline - time.monotonic()))
        child.wait(deadline - time.monotonic())
    for child in children:
        child.kill()
    deadline = time.monotonic() + SECONDS_TO_GO
    for child in children:
        child.wait(deadline - time.monotonic())
        child.close()


class Parent:
    """The parent, as its child sees it: what it said first, and the channel to it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._launch = _receive_launch(self._socket)
        self._channel: Channel[Any] | None = None
        self._children: Sequence[Watched[Any]] = ()
        self._children_may_end = threading.Event()
        self._may_speak = threading.Lock()
        self.name = self._launch.name
        logging.basicConfig(
            level=self._launch.log_level, format=f"%(levelname)s {self.name.replace('%', '%%')}: %(message)s"
        )
        threading.Thread(target=self._follow_into_death, name="watch-parent", daemon=True).start()

    def config(self, kind: type[Config]) -> Config:
        """What the parent passed as `config`."""
        return msgspec.msgpack.decode(self._launch.config, type=kind)

    def channel(self, incoming: Any) -> Channel[Any]:
        """The channel to the parent. To be called once.

        Args:
            incoming: type of the messages that the parent sends.
        """
        channel: Channel[Any] = Channel(self._socket, incoming)
        self._channel = channel
        return channel

    def fail(self, deaths: Sequence[Death]) -> NoReturn:
        """Says last words, for itself and for the children it watches, and ends them all. The first caller is heard."""
        self._may_speak.acquire()  # never released: a second caller waits until the process is gone
        deaths = collect_deaths(self._children, deaths)
        for child in self._children:
            child.kill()
        channel = self._channel or self.channel(None)
        say_last_words(channel, deaths)
        _leave(1)

    def watch_children(self, children: Sequence[Watched[Any]]) -> None:
        """From now on, the death of one of them is told to the parent, and ends this process.

        Whoever works in this process comes to know of the death by a failure of its own, which `run_child` reports.
        But where it waits for the dead, or for something else, somebody must speak for it.
        """
        self._children = children

        def watch() -> None:
            ends = select.poll()
            for child in children:
                for fd in child.watched_fds:
                    ends.register(fd, select.POLLIN)
            has_pidfds = all(child.watched_fds for child in children)
            while not any(child.has_ended for child in children):
                ends.poll(None if has_pidfds else SECONDS_BETWEEN_LOOKS * 1000)
            if not self._children_may_end.is_set():
                self.fail([])

        if children:
            threading.Thread(target=watch, name="watch-children", daemon=True).start()

    def let_children_end(self) -> None:
        """Their ends are no longer deaths."""
        self._children_may_end.set()

    def _follow_into_death(self) -> None:
        """Ends this process when its parent has died, whatever it is doing."""
        pidfd = _open_pidfd(self._launch.parent_pid)
        poll = select.poll()
        poll.register(self._socket, 0)  # only the hang-up: messages are for the main thread
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        while os.getppid() == self._launch.parent_pid:
            if poll.poll(SECONDS_BETWEEN_LOOKS * 1000 if pidfd is None else None):
                break
        os._exit(1)


def run_child(work: Callable[[Parent], None]) -> NoReturn:
    """The whole life of a process that a `Child` started: call it from a module's `__main__`.

    An exception of `work` becomes the last words. Nothing is torn down at the end: a group whose other ranks have gone
    could block that.
    """
    parent = Parent(int(sys.argv[1]))
    try:
        work(parent)
    except BaseException as error:
        parent.fail([death_of(error, parent.name)])
    _leave(0)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _receive_launch(connection: socket.socket) -> _Launch:
    """The first message. What comes behind it stays in the socket."""

    def exactly(num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = connection.recv(num_bytes - len(data))
            if not piece:
                _leave(1)  # the parent died before it could say anything
            data += piece
        return bytes(data)

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    return msgspec.msgpack.decode(exactly(length), type=_Launch)


def _same_modules() -> dict[str, str]:
    """Environment in which a child finds the modules that this process finds, whatever changed `sys.path`."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # safe: `-m` alone would look in the working folder first


def _exit_cause(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _open_pidfd(pid: int) -> int | None:
    """None where the system has none, or the process is no longer there."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
