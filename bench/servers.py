"""Servers under the same load: moeserve's, vLLM's and llama.cpp's, and `AsyncLLM` without HTTP.

All targets run at once, in bf16 with the same number of threads, and otherwise with their defaults; only one receives
requests at a time. Prompts are random token ids, new for each request, so nothing is cached. Outputs have a fixed
number of tokens and are streamed. Checkpoints without a tokenizer get one. Rounds of targets alternate.

- *--clients*: each client sends its next request when its last one has ended. *--rate*: requests arrive as a Poisson
  process at this mean rate, whether or not earlier ones have ended, and with --long-every a long prompt among them
  every so many seconds.
- *asyncllm*: `AsyncLLM` in this process, with the engine in separate processes as in `moeserve serve`. The difference
  is the cost of HTTP, including the client's, which shares the cores.
- *prefill_decode*: two servers of moeserve with half of the threads each, one for prompts and one for decoding, behind
  a router (docs/server.md). It needs `--new-tokens` of 2 or more, and 2 threads.
- *rate*: output tokens per second, from the first request to the last token, including prefill; the median of rounds.
- *first token*, *between tokens*: as in `moeserve bench serve`, over all requests of all rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import moeserve
from moeserve import AsyncLLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.engines import start_all
from moeserve.bench.harness import Row, add_choices, add_models, at_least, interleave, make_parser, percentile
from moeserve.bench.peers import processes
from moeserve.bench.peers.environments import PeerError, peers_folder, pinned_version, python_of, recommended_libraries
from moeserve.bench.peers.install import server_path
from moeserve.bench.peers.peers import make_gguf, peer_variables
from moeserve.bench.report import show_and_save
from moeserve.bench.serve import FIRST_TOKEN_ID, Answer, load, send_all
from moeserve.bench.vocabulary import with_tokenizer
from moeserve.machine import usable_cores
from moeserve.planner.traffic import RecordedRequest, fixed_traffic
from moeserve.sampling_params import RequestOutputKind

MODELS = ("qwen3-mini",)
CLIENTS = (1, 8, 32)
MIN_REQUESTS = 4
KV_CACHE = "1GiB"


@dataclass(frozen=True)
class Load:
    """The requests of one round, the same for all targets."""

    requests: Sequence[RecordedRequest]
    num_clients: int
    arrivals: Sequence[float] | None  # seconds from the start; None: each client sends its next request after its last


Send = Callable[[Load, list[list[int]]], tuple[list[Answer], float]]  # (load, prompts) -> answers, seconds


@dataclass(frozen=True)
class Target:
    """A running server, or `AsyncLLM`."""

    version: str
    settings: Row
    run: Send


@dataclass(frozen=True)
class Sizes:
    """The limits that servers are started with."""

    num_threads: int
    max_requests: int
    max_request_tokens: int
    quantization: str | None

    def own_settings(self, num_threads: int) -> Row:
        settings = {
            "dtype": "bfloat16", "num_threads": num_threads, "max_model_len": self.max_request_tokens,
            "max_num_seqs": self.max_requests, "kv_cache_memory": KV_CACHE, "packed_cache": 0,
        }  # fmt: skip
        return settings | ({"quantization": self.quantization} if self.quantization else {})


@dataclass(frozen=True)
class Command:
    """The command that starts a server."""

    arguments: list[str]
    variables: dict[str, str]
    ready_path: str
    version: str
    settings: Row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("servers", __doc__, rounds=3)
    add_models(parser, MODELS)
    add_choices(parser, "--server", STARTS, "all that are installed, without prefill_decode")
    parser.add_argument("--clients", type=at_least(1), action="append", help=f"repeatable (default: {CLIENTS})")
    parser.add_argument("--rate", type=float, action="append", help="requests per second instead, repeatable")
    parser.add_argument("--requests", type=at_least(1), help="of each client (default: 2), or of each rate (16)")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128)
    parser.add_argument("--new-tokens", type=at_least(2), default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--long-every", type=float, help="seconds between long prompts, with --rate")
    parser.add_argument("--long-tokens", type=at_least(1), default=2048, help="tokens of a long prompt")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of moeserve")
    options = parser.parse_args(arguments)
    if min([*(options.rate or ()), options.long_every or 1.0, 1.0]) <= 0:
        parser.error("--rate and --long-every must be more than 0")
    if "prefill_decode" in (options.server or ()) and options.threads < 2:
        parser.error("--threads must be at least 2 for prefill_decode, one for each engine")
    fixed = fixed_traffic(options.prompt_tokens, options.new_tokens).requests
    loads: dict[str, Load] = {}
    for number in () if options.rate else options.clients or CLIENTS:
        count = max(MIN_REQUESTS, (options.requests or 2) * number)
        loads[f"{number} clients"] = Load(fixed * count, number, None)
    for rate in options.rate or ():
        arrivals = draw_arrivals(rate, options.requests or 16, random.Random(0))
        sent = [(arrival, fixed[0]) for arrival in arrivals]
        if options.long_every:
            long = fixed_traffic(options.long_tokens, options.new_tokens).requests[0]
            count = int(arrivals[-1] / options.long_every) + 1
            sent += [(index * options.long_every, long) for index in range(count)]
            sent.sort(key=lambda each: each[0])
        loads[f"{rate:g} requests/s"] = Load([request for _, request in sent], 1, [arrival for arrival, _ in sent])
    longest = max(max(each.prompt_tokens for each in load.requests) for load in loads.values()) + options.new_tokens
    max_requests = max(len(load.requests) if load.arrivals else load.num_clients for load in loads.values())
    sizes = Sizes(options.threads, min(64, max_requests), longest, options.quantization)
    for checkpoint in map(find_checkpoint, options.model or MODELS):
        model = with_tokenizer(checkpoint)
        with ExitStack() as stack:
            known = [name for name in STARTS if name != "prefill_decode"]
            start = functools.partial(start_target, model, sizes, stack)
            targets, left_out = start_all(options.server, known, start)
            vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
            facts = {"benchmark": "servers", "model": checkpoint.name, "without": left_out}
            for each in loads.values():  # vLLM compiles at the first step of a size
                measure(targets, Load(each.requests[: each.num_clients + 1], each.num_clients, None), vocab_size, 1)
            for name, each in loads.items():
                row = facts | {"load": name, "clients": None if each.arrivals else each.num_clients}
                show_and_save(options.json, [row | measure(targets, each, vocab_size, options.rounds)])


def draw_arrivals(rate: float, num_requests: int, random_source: random.Random) -> list[float]:
    """Draw the arrivals of a Poisson process of `rate` requests per second."""
    return list(itertools.accumulate(random_source.expovariate(rate) for _ in range(num_requests)))


def measure(targets: dict[str, Target], load: Load, vocab_size: int, num_rounds: int) -> Row:
    """Return the row for one load.

    Raises:
        PeerError: a request failed.
    """
    sources = {name: random.Random(load.num_clients) for name in targets}
    tokens = range(min(FIRST_TOKEN_ID, vocab_size // 2), vocab_size)

    def one_round(name: str) -> tuple[list[Answer], float]:
        # The same prompts for all servers.
        prompts = [sources[name].choices(tokens, k=each.prompt_tokens) for each in load.requests]
        answers, seconds = targets[name].run(load, prompts)
        for answer, request in zip(answers, load.requests, strict=True):
            if answer.error is not None or answer.num_output != request.output_tokens:
                raise PeerError(f"{name} has answered {answer.num_output} tokens: {answer.error}")
        return answers, seconds

    samples = interleave({name: functools.partial(one_round, name) for name in targets}, num_rounds)
    first = min(load.requests, key=lambda each: each.prompt_tokens)
    return {
        "workload": {
            "batch": len(load.requests), "prompt_tokens": first.prompt_tokens, "new_tokens": first.output_tokens,
        },
        "engines": {
            name: {"version": targets[name].version, "settings": targets[name].settings, **figures(rounds)}
            for name, rounds in samples.items()
        },
    }  # fmt: skip


def figures(rounds: Sequence[tuple[list[Answer], float]]) -> Row:
    """Return the rate and latencies of a server, over all rounds and in each. Long prompts have their own latencies."""
    row: Row = {"rate": statistics.median(rate(*each) for each in rounds)}
    answers = [answer for of_round, _ in rounds for answer in of_round]
    lengths = sorted({answer.num_prompt for answer in answers})
    for length in lengths:
        own = waits([answer for answer in answers if answer.num_prompt == length])
        row |= own if length == lengths[0] else {f"prompts of {length}": own}
    return row | {"rounds": [{"rate": rate(*each), **waits(each[0])} for each in rounds]}


def rate(answers: Sequence[Answer], seconds: float) -> float:
    return sum(answer.num_output for answer in answers) / seconds


def waits(answers: Sequence[Answer]) -> Row:
    """Return medians and 99th percentiles, in seconds."""
    kinds = {
        "first_token": [answer.first_token for answer in answers],
        "between_tokens": [wait for answer in answers for wait in answer.between_tokens],
    }
    return {
        name: {"median": statistics.median(values), "p99": percentile(values, 0.99)} for name, values in kinds.items()
    }


# ---- Targets


@contextlib.contextmanager
def async_llm(model: Path, sizes: Sizes) -> Iterator[Target]:
    """Start `AsyncLLM` with the settings that the server uses."""
    llm = AsyncLLM(model, executor="mp", show_progress=False, **sizes.own_settings(sizes.num_threads))

    async def run(load: Load, prompts: list[list[int]]) -> tuple[list[Answer], float]:
        answers = [Answer(len(prompt)) for prompt in prompts]

        async def send(index: int) -> None:
            sent_at, answer = time.perf_counter(), answers[index]
            params = SamplingParams(
                temperature=0, max_tokens=load.requests[index].output_tokens, ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            async for output in llm.generate({"prompt_token_ids": prompts[index]}, params):
                answer.event_times.append(time.perf_counter() - sent_at)
                answer.num_output += len(output.outputs[0].token_ids)

        return answers, await send_all(send, len(prompts), load.num_clients, load.arrivals)

    try:
        yield Target(f"moeserve {moeserve.__version__}", {}, lambda *arguments: asyncio.run(run(*arguments)))
    finally:
        llm.shutdown()


def moeserve_command(model: Path | None, settings: Row, port: int) -> Command:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    arguments = [sys.executable, "-m", "moeserve", "serve", *([str(model)] if model else []), f"--port={port}", *flags]
    return Command(arguments, dict(os.environ), "/ready", f"moeserve {moeserve.__version__}", {})


def vllm_command(model: Path, sizes: Sizes, port: int) -> Command:
    python = python_of("vllm")
    cores = list(range(usable_cores()))
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    preloaded = recommended_libraries(python)
    settings = {
        # By default, it leaves one of two cores to its front end.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: sizes.num_threads])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # The module behind `vllm serve`. The command itself fails in the package vllm-cpu, because it expects a package
    # vllm.
    arguments = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    arguments += ["--host=127.0.0.1", "--dtype=bfloat16"]
    arguments += [f"--max-model-len={sizes.max_request_tokens}", f"--max-num-seqs={sizes.max_requests}"]
    variables = peer_variables("vllm", python, preloaded) | settings
    named = {"preloaded": [Path(library).name for library in preloaded], **settings}
    return Command(arguments, variables, "/health", f"vllm-cpu {pinned_version('vllm', 'vllm-cpu')}", named)


def llama_command(model: Path, sizes: Sizes, port: int) -> Command:
    per_request = -(-sizes.max_request_tokens // 256) * 256  # the server rounds each request's cache up
    arguments = [str(server_path()), "--model", str(make_gguf(model, "bf16")), "--port", str(port)]
    arguments += ["--threads", str(sizes.num_threads), "--parallel", str(sizes.max_requests)]
    arguments += ["--ctx-size", str(sizes.max_requests * per_request), "--cache-ram", "0"]  # no prompt is used twice
    variables = peer_variables("llama.cpp", server_path(), [])
    version = f"llama-server of llama-cpp-python {pinned_version('llama.cpp', 'llama_cpp_python')}"
    return Command(arguments, variables, "/health", version, {"preloaded": []})


def own_command(model: Path, sizes: Sizes, port: int) -> Command:
    return moeserve_command(model, sizes.own_settings(sizes.num_threads), port)


def start_target(model: Path, sizes: Sizes, stack: ExitStack, name: str) -> Target:
    """Start a server or `AsyncLLM`. Closing the stack stops it.

    Raises:
        PeerError: it is not installed, or does not start.
    """
    return stack.enter_context(STARTS[name](model, sizes))


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(name: str, make: Callable[[int], Command]) -> Iterator[tuple[str, Command]]:
    """Start a server, yield its URL when it is ready, and stop it when the context is left.

    Args:
        make: returns the command for a port.
    """
    port = free_port()
    command, log = make(port), peers_folder() / "logs" / f"server-{name}.log"
    process = processes.start(command.arguments, log, command.variables)
    try:
        processes.wait_until_ready(process, f"http://127.0.0.1:{port}{command.ready_path}", name, log)
        yield f"http://127.0.0.1:{port}", command
    finally:
        process.terminate()
        processes.end(process)


def target_of(url: str, command: Command) -> Target:
    def run(each: Load, prompts: list[list[int]]) -> tuple[list[Answer], float]:
        sending = load(f"{url}/v1", each.requests, prompts, num_clients=each.num_clients, arrivals=each.arrivals)
        return asyncio.run(sending)

    return Target(command.version, command.settings, run)


@contextlib.contextmanager
def started(name: str, command: Callable[[Path, Sizes, int], Command], model: Path, sizes: Sizes) -> Iterator[Target]:
    with serving(name, functools.partial(command, model, sizes)) as (url, made):
        yield target_of(url, made)


@contextlib.contextmanager
def prefill_decode(model: Path, sizes: Sizes) -> Iterator[Target]:
    with ExitStack() as stack:
        half, urls = sizes.num_threads // 2, {}
        for name, num_threads in (("prefill", half), ("decode", sizes.num_threads - half)):
            settings = sizes.own_settings(num_threads) | {"kv_transfer_address": "127.0.0.1"}
            urls[name], _ = stack.enter_context(serving(name, functools.partial(moeserve_command, model, settings)))
        yield target_of(*stack.enter_context(serving("router", functools.partial(moeserve_command, None, urls))))


STARTS: dict[str, Callable[[Path, Sizes], contextlib.AbstractContextManager[Target]]] = {
    "asyncllm": async_llm,
    "moeserve": functools.partial(started, "moeserve", own_command),
    "vllm": functools.partial(started, "vllm", vllm_command),
    "llama.cpp": functools.partial(started, "llama.cpp", llama_command),
    "prefill_decode": prefill_decode,
}
