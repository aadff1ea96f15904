"""A day's traffic in a few minutes, through a router and two engines, one of which is replaced at noon. Needs Linux.

- *traffic*: requests at random times, eight times as many at 15 o'clock as at 3, with the lengths and common prefixes
  of --traffic.
- *replaced*: one engine gets SIGTERM, answers what it has begun, and is started again at the same address. Meanwhile
  the router sends all requests to the other one. Every request must get all its tokens.
- *by hour*: latencies of the requests that arrive in it, as `moeserve bench serve` takes them, and what the processes
  of each server hold: memory (what several processes share is divided among them), open files and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.bench.harness import Row, at_least, environment, make_parser, percentile, save
from moeserve.bench.peers import processes
from moeserve.bench.peers.environments import peers_folder
from moeserve.bench.plots import Curves, save_curves
from moeserve.bench.serve import Answer, draw_prompts, load, take
from moeserve.bench.servers import free_port
from moeserve.errors import SettingsError
from moeserve.machine import usable_cores
from moeserve.planner.traffic import choose_traffic

HOURS = 24
BUSIEST_HOUR = 15
SWING = 7 / 9  # the busiest hour has (1 + SWING) / (1 - SWING) = 8 times the requests of the quietest
REPLACED_AT = 12
KV_CACHE = "256MiB"  # pages of the cache are taken as they are used: a small one is full soon, and memory then flat
ALWAYS_DIRECT = 2**30  # tokens: no prompt is so long that the router has another server compute it


@dataclass(frozen=True)
class Holdings:
    """Resources that the processes of a server hold."""

    memory: int  # bytes
    files: int
    threads: int


@dataclass
class Server:
    """`moeserve serve` at one address, which can be replaced."""

    name: str
    port: int
    flags: Sequence[str]
    process: subprocess.Popen[str] | None = None
    hours: dict[int, list[Holdings]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "moeserve", "serve", "--port", str(self.port), *self.flags]
        log = peers_folder() / "logs" / f"day-{self.name}.log"
        self.process = processes.start(command, log, os.environ)
        processes.wait_until_ready(self.process, f"{self.url}/ready", self.name, log)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)  # longer than --drain-timeout
            processes.end(self.process)

    def replace(self) -> None:
        self.stop()
        self.start()

    def take_stock(self, hour: int) -> None:
        """Add what the processes hold now to the samples of the hour. A process that ends meanwhile is left out."""
        assert self.process is not None
        parts = []
        for folder in process_tree(self.process.pid):
            with contextlib.suppress(OSError):
                parts.append(holdings(folder))
        if parts:
            total = Holdings(*(sum(getattr(each, name) for each in parts) for name in Holdings.__dataclass_fields__))
            self.hours.setdefault(hour, []).append(total)


def process_tree(pid: int) -> Iterator[Path]:
    """Yield the folders in /proc of a process and its descendants."""
    folder = Path(f"/proc/{pid}")
    yield folder
    with contextlib.suppress(OSError):
        for task in (folder / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from process_tree(int(child))


def holdings(folder: Path) -> Holdings:
    """Return what one process holds, given its folder in /proc."""
    lines = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    num_files, num_threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    return Holdings(int(lines["Pss"].split()[0]) * 1024, num_files, num_threads)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("day", __doc__, rounds=None, threads=False)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the day (default: 10)")
    parser.add_argument("--requests", type=at_least(HOURS), default=600, help="requests of the day (default: 600)")
    parser.add_argument("--traffic", help="as for `moeserve bench serve` (default: the sample)")
    parser.add_argument("--length", type=float, default=0.02, help="multiplies recorded lengths (default: 0.02)")
    parser.add_argument("--vocab-size", type=at_least(1), default=30000, help="of random tokens (default: 30000)")
    parser.add_argument("--plot", type=Path, help="write charts as SVG, for light and for dark pages")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes must be more than 0")
    if not Path("/proc/self/smaps_rollup").exists():
        raise SettingsError("this benchmark reads /proc, which only Linux has")

    threads = str(max(1, usable_cores() // 2))
    engine = [*([options.model] if options.model else []), "--num-threads", threads, "--kv-cache-memory", KV_CACHE]
    # The router sends requests to the first one if both have equally many, so that is the busier one.
    replaced, stays = (Server(name, free_port(), engine) for name in ("engine 1", "engine 2"))
    flags = [flag for each in (replaced, stays) for flag in ("--prefill", each.url, "--decode", each.url)]
    router = Server("router", free_port(), [*flags, "--min-remote-prefill", str(ALWAYS_DIRECT)])
    servers = (router, replaced, stays)
    hour_s = options.minutes * 60 / HOURS
    arrivals = [hour * hour_s for hour in draw_hours(options.requests, random.Random(0))]
    traffic = take(choose_traffic(options.traffic).scaled(length=options.length), options.requests)

    async def day() -> tuple[list[Answer], float]:
        began_at = time.perf_counter()
        sending = load(f"{router.url}/v1", traffic, draw_prompts(traffic, options.vocab_size), arrivals=arrivals)
        watching = asyncio.create_task(watch(servers, began_at, hour_s))
        (answers, _), replaced_for = await asyncio.gather(sending, replace_at_noon(replaced, began_at, hour_s))
        watching.cancel()
        return answers, replaced_for

    try:
        for server in (replaced, stays, router):
            server.start()
        answers, replaced_for = asyncio.run(day())
    finally:
        for server in servers:
            server.stop()
    rows = [hour_row(hour, answers, arrivals, hour_s, servers) for hour in range(HOURS)]
    failures = [
        {"hour": round(arrival / hour_s, 2), "tokens": answer.num_output, "error": answer.error}
        for answer, request, arrival in zip(answers, traffic, arrivals, strict=True)
        if answer.num_output != request.output_tokens
    ]
    print(f"{replaced.name} was replaced in {replaced_for:.1f} s.")
    show(rows, servers, failures)
    facts = {"benchmark": "day", "minutes": options.minutes, "requests": len(answers), "failures": failures}
    save(options.json, [{**facts, "replaced_for": replaced_for, "hours": rows, "environment": environment()}])
    if options.plot is not None:
        save_curves(options.plot, charts(rows, servers), "hour", (REPLACED_AT, REPLACED_AT + replaced_for / hour_s))
    return int(bool(failures))


def draw_hours(num_requests: int, random_source: random.Random) -> list[float]:
    """Draw the times of requests in hours from the start of the day, in order."""
    minutes = range(HOURS * 60)
    weights = [1 + SWING * math.cos((minute / 60 - BUSIEST_HOUR) / HOURS * 2 * math.pi) for minute in minutes]
    drawn = random_source.choices(minutes, weights, k=num_requests)
    return sorted((minute + random_source.random()) / 60 for minute in drawn)


async def watch(servers: Sequence[Server], began_at: float, hour_s: float) -> None:
    """Sample what the servers hold, eight times in an hour of the day, until cancelled."""
    while True:
        hour = int((time.perf_counter() - began_at) / hour_s)
        for server in servers:
            await asyncio.to_thread(server.take_stock, hour)
        await asyncio.sleep(hour_s / 8)


async def replace_at_noon(server: Server, began_at: float, hour_s: float) -> float:
    """Replace a server at noon. Returns the seconds for which it was not ready."""
    await asyncio.sleep(REPLACED_AT * hour_s - (time.perf_counter() - began_at))
    since = time.perf_counter()
    await asyncio.to_thread(server.replace)
    return time.perf_counter() - since


def hour_row(
    hour: int, answers: Sequence[Answer], arrivals: Sequence[float], hour_s: float, servers: Sequence[Server]
) -> Row:
    """Return the figures of one hour. Latencies are in seconds; what a server holds is the median of its samples."""
    of_hour = [answer for answer, arrival in zip(answers, arrivals, strict=True) if int(arrival / hour_s) == hour]
    row: Row = {"hour": hour, "requests": len(of_hour)}
    of_hour = [answer for answer in of_hour if answer.event_times]  # random tokens may be no text
    between = [wait for answer in of_hour for wait in answer.between_tokens]
    for name, waits in (("first_token", [answer.first_token for answer in of_hour]), ("between_tokens", between)):
        if waits:
            row[name] = {"median": statistics.median(waits), "p99": percentile(waits, 0.99)}
    for server in servers:
        samples = server.hours.get(hour)
        if samples:
            row[server.name] = {
                name: statistics.median(getattr(each, name) for each in samples)
                for name in Holdings.__dataclass_fields__
            }
    return row


def show(rows: Sequence[Row], servers: Sequence[Server], failures: Sequence[Row]) -> None:
    """Print a table by hour."""
    print(f"{len(failures)} requests failed.")
    if failures:
        print(
            f"first failure: at {failures[0]['hour']} o'clock, {failures[0]['tokens']} tokens, {failures[0]['error']}"
        )
    print(f"{'':16}{'first token, ms':>20}" + "".join(f"{server.name:>24}" for server in servers))
    columns = f"{'MiB':>10}{'files':>7}{'threads':>7}" * len(servers)
    print(f"{'hour':>6}{'requests':>10}{'median':>10}{'p99':>10}{columns}")
    for row in rows:
        waits = row.get("first_token")
        line = f"{row['hour']:6}{row['requests']:10}"
        line += f"{1000 * waits['median']:10.0f}{1000 * waits['p99']:10.0f}" if waits else " " * 20
        for server in servers:
            held = row.get(server.name)
            line += f"{held['memory'] / 2**20:10.0f}{held['files']:7.0f}{held['threads']:7.0f}" if held else " " * 24
        print(line)


def charts(rows: Sequence[Row], servers: Sequence[Server]) -> list[Curves]:
    """Return the charts by hour."""

    def points(*path: str, scale: float = 1.0) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for row in rows:
            value: Any = row
            for name in path:
                value = value.get(name) if value else None
            if value is not None:
                found.append((row["hour"] + 0.5, value * scale))
        return found

    latencies = {
        f"{name.replace('_', ' ')}, p99": points(name, "p99", scale=1000) for name in ("first_token", "between_tokens")
    }
    held = {"memory, MiB": ("memory", 2**-20), "open files": ("files", 1.0), "threads": ("threads", 1.0)}
    return [
        Curves("milliseconds", latencies),
        *(
            Curves(title, {server.name: points(server.name, name, scale=scale) for server in servers})
            for title, (name, scale) in held.items()
        ),
    ]
