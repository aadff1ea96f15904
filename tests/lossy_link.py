"""A cable that is slow and loses frames: carries them between two interfaces, each way later, and not all.

    python lossy_link.py INTERFACE INTERFACE DELAY_MS LOSS SEED

In Python, since not every kernel has a queueing discipline that does it (netem). Who sends must compute checksums
itself: see `send_whole_frames`.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import random
import selectors
import socket
import struct
import sys
import time

EVERY_PROTOCOL = 3  # ETH_P_ALL
PACKET_OUTGOING = 4  # what the host itself sends on the interface; the rest is what comes in
MAX_FRAME = 65600
SIOCETHTOOL = 0x8946
SWITCHES = (0x00000017, 0x0000001F, 0x00000024, 0x0000002C)  # ETHTOOL_STXCSUM, STSO, SGSO, SGRO


def send_whole_frames(interface: str) -> None:
    """Turns off what leaves checksums and cutting to a device: a frame that is carried by hand needs both done."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for switch in SWITCHES:
            value = array.array("I", [switch, 0])
            fcntl.ioctl(asking, SIOCETHTOOL, struct.pack("16sP", interface.encode(), value.buffer_info()[0]))


def carry(names: list[str], delay_s: float, loss: float, seed: int) -> None:
    """Until it is killed."""
    chance = random.Random(seed)
    ends = []
    for name in names:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
        end.bind((name, 0))
        end.setblocking(False)
        ends.append(end)
    waiting = selectors.DefaultSelector()
    for index, end in enumerate(ends):
        waiting.register(end, selectors.EVENT_READ, index)
    due: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        left = max(0.0, due[0][0] - time.monotonic()) if due else None
        for key, _ in waiting.select(left):
            frame, sender = ends[key.data].recvfrom(MAX_FRAME)
            if sender[2] != PACKET_OUTGOING and chance.random() >= loss:
                count += 1
                heapq.heappush(due, (time.monotonic() + delay_s * (0.5 + chance.random()), count, 1 - key.data, frame))
        while due and due[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(due)
            ends[to].send(frame)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        send_whole_frames(sys.argv[1])
    else:
        first, second, delay_ms, loss, seed = sys.argv[1:]
        for interface in (first, second):
            send_whole_frames(interface)
        carry([first, second], float(delay_ms) / 1000, float(loss), int(seed))
