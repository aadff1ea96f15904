"""Make two virtual hosts on this one, and run generate.py on a Ray cluster of both. Run it as root: `make demo-ray`.

A host is a set of Linux namespaces: a network, processes, /tmp/ray and /dev/shm of its own. A virtual cable joins the
two; nothing of this machine's network changes. On both the same `moeserve launch` is started, as on real ones. When
this program ends or is killed, so do the hosts and all their processes.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GENERATE = Path(__file__).with_name("generate.py")
HEAD = "10.78.0.1"
COMMAND = [sys.executable, "-m", "moeserve", "launch", "--head", HEAD, "--nodes", "2", "--num-cpus", "1", "--"]
COMMAND += [sys.executable, str(GENERATE), "--data-parallel-size", "2"]

# The start-up script of a host. It waits for its network cable; its first process stays, to reap orphaned processes.
BOOT = """set -e
mkdir -p /tmp/ray
mount -t tmpfs none /tmp/ray
mount -t tmpfs none /dev/shm
hostname "$1"
read -r cable
ip address add "$2/24" dev eth0
ip link set eth0 up
ip link set lo up
shift 2
set +e
"$@" < /dev/null
exit $?
"""


def main() -> int:
    missing = [tool for tool in ("ip", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        print(f"two_hosts.py needs {' and '.join(missing)}: install iproute2 and util-linux", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print(
            "two_hosts.py makes network namespaces, for which it must be root: sudo make demo-ray.\n"
            "Without: generate.py makes a Ray cluster of this host alone.",
            file=sys.stderr,
        )
        return 1
    # Without a token, anyone who can reach a cluster can run programs there.
    environment = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "TMPDIR": "/tmp"}
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE"):
        environment.pop(name, None)
    with host("host1", HEAD, environment) as head, host("host2", "10.78.0.2", environment) as other:
        cable = ["ip", "link", "add", "eth0", "netns", str(head.pid), "type", "veth"]
        joined = subprocess.run([*cable, "peer", "name", "eth0", "netns", str(other.pid)], check=False)
        if joined.returncode:
            print("no network of two hosts can be made here; a container needs --privileged for it", file=sys.stderr)
            return 1
        for each in (other, head):
            each.stdin.write(b"\n")
            each.stdin.close()
        return head.wait()


@contextlib.contextmanager
def host(name: str, address: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a host, which runs COMMAND when its cable is there. The network belongs to the returned process."""
    namespaces = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--net", "--ipc", "--uts"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *namespaces, "sh", "-c", BOOT, "sh", name, address, *COMMAND],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # so that a Ctrl-C in the terminal is ours to handle
    )
    try:
        while process.poll() is None and network_of(str(process.pid)) == network_of("self"):
            time.sleep(0.02)
        yield process
    finally:
        process.kill()  # its first process ends with it, and with that all others of the host
        process.wait()


def network_of(process: str) -> str:
    """Return the identity of a process's network namespace."""
    return os.readlink(f"/proc/{process}/ns/net")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
