"""Hosts made of Linux namespaces: each with its own network, processes, memory files and /tmp, joined by a bridge.

They need root and iproute2. What a host runs ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import secrets
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SUBNET = "10.77.0"
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
# Folders that a host has for itself.
OWN_FOLDERS = ("/tmp/ray", "/dev/shm")


def why_impossible() -> str:
    """Return why hosts cannot be made here; "" if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing"
    try:
        with hosts(2):
            return ""
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"hosts of network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}"


@dataclass
class Host:
    """One host. Its init process holds the namespaces."""

    name: str
    address: str
    init: subprocess.Popen[bytes]
    init_pid: int
    bridge: str  # the namespace in which its cable ends
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    memory: Path | None = None  # the control group of all commands, if their memory is limited

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", "--target", str(self.init_pid), "--net", "--pid", "--mount", "--ipc", "--uts", *command]

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command with its output in a file."""
        in_group = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.memory / "cgroup.procs")] if self.memory else []
        with log.open("a") as output:
            process = subprocess.Popen(
                in_group + self.command(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                env=os.environ | environment,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def processes(self) -> dict[int, str]:
        """Return the command line of each process of this host but its init, by its process id outside."""
        found = {}
        namespace = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns" / "pid") == namespace:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command and int(folder.name) != self.init_pid:
                        found[int(folder.name)] = command
        return found

    def kill(self, part: str) -> int:
        """Kill the processes whose command line contains `part`. Return their number."""
        return self.signal(part, signal.SIGKILL)

    def signal(self, part: str, number: int) -> int:
        """Send a signal to the processes whose command line contains `part`. Return their number."""
        victims = [pid for pid, command in self.processes().items() if part in command]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(victims)

    def link(self, state: str) -> None:
        """Set the cable "up" or "down"."""
        _ip("-n", self.bridge, "link", "set", f"v{self.name}", state)

    def end(self) -> None:
        """Kill the init of this host: all its processes end with process 1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        self.init.wait(10)
        for process in self.running:
            process.wait(10)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts that reach each other: 10.77.0.1 and so on, each on its interface eth0."""
    tag = secrets.token_hex(2)
    bridge = f"b{tag}"
    with contextlib.ExitStack() as ending:
        # The bridge has a namespace of its own, so that nothing of this machine's network changes or is reached.
        _add_namespace(f"moe-{bridge}", ending)
        in_bridge = ["-n", f"moe-{bridge}"]
        _ip(*in_bridge, "link", "add", bridge, "type", "bridge")
        _ip(*in_bridge, "link", "set", bridge, "up")
        made = []
        for number in range(1, count + 1):
            name = f"{tag}{number}"
            _add_namespace(f"moe-{name}", ending)
            made.append(_host(name, f"{SUBNET}.{number}", bridge, in_bridge))
            ending.callback(made[-1].end)
        yield made


@contextlib.contextmanager
def memory_limit(host: Host, num_bytes: int) -> Iterator[Path]:
    """Limit the memory of the commands that a host starts, and return the folder of their control group, of version 1.

    What still runs when the context is left is killed.
    """
    # The host has another /sys than this machine.
    script = f"mount -t tmpfs none {MEMORY_GROUPS.parent} && mkdir {MEMORY_GROUPS}"
    script += f" && mount -t cgroup -o memory none {MEMORY_GROUPS}"
    subprocess.run(host.command(["sh", "-c", script]), check=True, capture_output=True)
    host.memory = MEMORY_GROUPS / f"moe-{host.name}"
    host.memory.mkdir()
    try:
        (host.memory / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield host.memory
    finally:
        while pids := (host.memory / "cgroup.procs").read_text().split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        host.memory.rmdir()
        host.memory = None


class LossyCable:
    """A cable between two hosts, 10.78.0.1 and 10.78.0.2, that loses packets at random."""

    ADDRESSES = ("10.78.0.1", "10.78.0.2")

    def __init__(self, ends: Sequence[Host], loss: float = 0.0, delay_s: float = 0.0) -> None:
        """
        Args:
            loss: share of the packets that are lost.
            delay_s: time that a packet takes.
        """
        self.is_cut = False  # all packets are lost
        self.num_passed = self.num_lost = 0
        self._delay_s = delay_s
        self._chance, self._loss = random.Random(0), loss
        self._devices = [self._connect(host, number) for number, host in enumerate(ends, start=1)]
        self._closed, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._closing)
        self._thread.join()
        for fd in (*self._devices, self._closed):
            os.close(fd)

    def _carry(self) -> None:
        poll = select.poll()
        for fd in (*self._devices, self._closed):
            poll.register(fd, select.POLLIN)
        other = dict(zip(self._devices, reversed(self._devices), strict=True))
        under_way: deque[tuple[float, int, bytes]] = deque()  # when and where packets arrive
        while True:
            timeout_ms = max(0.0, under_way[0][0] - time.monotonic()) * 1000 if under_way else None
            for fd, _ in poll.poll(timeout_ms):
                if fd == self._closed:
                    return
                packet = os.read(fd, 2**16)
                if self.is_cut or self._chance.random() < self._loss:
                    self.num_lost += 1
                else:
                    self.num_passed += 1
                    under_way.append((time.monotonic() + self._delay_s, other[fd], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, fd, packet = under_way.popleft()
                os.write(fd, packet)

    @staticmethod
    def _connect(host: Host, number: int) -> int:
        """Make the host's end of the cable, and return the device that gives its packets."""
        with ThreadPoolExecutor(1) as thread:  # which enters the host's network
            device = thread.submit(_open_tun, f"/proc/{host.init_pid}/ns/net", "lossy").result()
        for command in (f"address add 10.78.0.{number}/24 dev lossy", "link set lossy up"):
            subprocess.run(host.command(["ip", *command.split()]), check=True, capture_output=True)
        return device


def _open_tun(network: str, name: str) -> int:
    """Let this thread enter a network for good, make an interface there, and return the device that has its packets."""
    with open(network) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{network} cannot be entered")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _add_namespace(name: str, ending: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    ending.callback(_ip, "netns", "delete", name)


def _host(name: str, address: str, bridge: str, in_bridge: list[str]) -> Host:
    own = ["-n", f"moe-{name}"]
    cable = ["link", "add", f"v{name}", "netns", f"moe-{bridge}", "type", "veth"]
    _ip(*cable, "peer", "name", "eth0", "netns", f"moe-{name}")
    _ip(*in_bridge, "link", "set", f"v{name}", "master", bridge, "up")
    _ip(*own, "address", "add", f"{address}/24", "dev", "eth0")
    _ip(*own, "link", "set", "eth0", "up")
    _ip(*own, "link", "set", "lo", "up")
    inside = ["ip", "netns", "exec", f"moe-{name}"]
    mounts = " && ".join(f"mkdir -p {folder} && mount -t tmpfs none {folder}" for folder in OWN_FOLDERS)
    script = f"{mounts} && hostname host{address.rsplit('.', 1)[1]} && exec sleep infinity"
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--uts"]
    init = subprocess.Popen([*inside, *unshare, "sh", "-c", script], start_new_session=True)
    try:
        return Host(name, address, init, _sleeping_child(init.pid), f"moe-{bridge}")
    except BaseException:
        init.kill()
        raise


def _sleeping_child(pid: int) -> int:
    """Return the process id, as seen here, of a host's init once it has made its mounts."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):
                    return int(child)
        time.sleep(0.02)
    raise RuntimeError("a host did not come up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
