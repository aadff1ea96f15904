"""moeserve's server compared with other servers, and with `AsyncLLM` without HTTP, under the same load.

    python -m moeserve.bench.servers [--model qwen3-mini] [--server NAME ...] [--clients 1 --clients 8 ...] [--rounds 3]

- *load*: a number of clients, each of which sends its next request when its last one has ended. Prompts are random
  token ids, new for each request, so nothing is cached. Outputs have a fixed number of tokens and are streamed.
- *servers*: `moeserve serve`, `vllm serve` and llama.cpp's `llama-server`, in bf16 with the same number of threads, and
  otherwise with their defaults. All run at once, but only one receives requests. Checkpoints without a tokenizer get
  one.
- *asyncllm*: the same number of tasks on `AsyncLLM` in this process, with the engine in separate processes as in
  `moeserve serve`. The difference is the cost of HTTP, including the client's, which shares the cores.
- *tokens/s*: from the first request to the last token, including prefill. Medians over the rounds.
- *first token*, *between tokens*: as in `moeserve bench serve`, over all requests of all rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import moeserve
from moeserve import AsyncLLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.decode import Workload, draw_prompts
from moeserve.bench.engines import start_all
from moeserve.bench.harness import Row, add_choices, add_models, at_least, interleave, make_parser, percentile
from moeserve.bench.peers.environments import PeerError, peers_folder, pinned_version, python_of, recommended_libraries
from moeserve.bench.peers.llama_server import server_path
from moeserve.bench.peers.peers import make_gguf, peer_variables
from moeserve.bench.report import show_and_save
from moeserve.bench.serve import Answer, closed_loop, load
from moeserve.bench.vocabulary import with_tokenizer
from moeserve.machine import usable_cores
from moeserve.planner.traffic import fixed_traffic
from moeserve.sampling_params import RequestOutputKind

MODELS = ("qwen3-mini",)
CLIENTS = (1, 8, 32)
MIN_REQUESTS = 4
KV_CACHE = "1GiB"
SECONDS_TO_START = 900  # vLLM compiles at its first start
SECONDS_TO_END = 20

Prompts = Sequence[list[int]]
Load = Callable[[Prompts, int, int], tuple[list[Answer], float]]  # (prompts, new tokens, clients)


@dataclass(frozen=True)
class Target:
    """A running server, or `AsyncLLM`."""

    version: str
    settings: Row
    run: Load


@dataclass(frozen=True)
class Sizes:
    """The limits that servers are started with."""

    num_threads: int
    max_requests: int
    max_request_tokens: int


@dataclass(frozen=True)
class Command:
    """The command that starts a server."""

    arguments: list[str]
    variables: dict[str, str]
    ready_path: str
    version: str
    settings: Row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("servers", "Servers under the same load.", rounds=3)
    add_models(parser, MODELS)
    add_choices(parser, "--server", STARTS, "all that are installed")
    parser.add_argument(
        "--clients", type=at_least(1), action="append", help=f"clients at a time, repeatable (default: {CLIENTS})"
    )
    parser.add_argument("--requests", type=at_least(1), default=2, help="requests of each client (default: 2)")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128)
    parser.add_argument("--new-tokens", type=at_least(2), default=64, help="new tokens of each request")
    options = parser.parse_args(arguments)
    clients: Sequence[int] = options.clients or CLIENTS
    for checkpoint in map(find_checkpoint, options.model or MODELS):
        model = with_tokenizer(checkpoint)
        sizes = Sizes(options.threads, max(clients), options.prompt_tokens + options.new_tokens)
        with ExitStack() as stack:
            start = functools.partial(start_target, model, sizes, stack)
            targets, left_out = start_all(options.server, list(STARTS), start)
            vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
            facts = {"benchmark": "servers", "model": checkpoint.name, "without": left_out}
            for number in clients:  # vLLM compiles at the first step of a size
                warm_up = Workload(number, options.prompt_tokens, min(8, options.new_tokens), vocab_size)
                measure(targets, warm_up, number, 1)
            for number in clients:
                num_requests = max(MIN_REQUESTS, options.requests * number)
                workload = Workload(num_requests, options.prompt_tokens, options.new_tokens, vocab_size)
                show_and_save(options.json, [facts | measure(targets, workload, number, options.rounds)])


def measure(targets: dict[str, Target], workload: Workload, num_clients: int, num_rounds: int) -> Row:
    """Return the row for one number of clients.

    Raises:
        PeerError: a request failed.
    """
    sources = {name: random.Random(num_clients) for name in targets}

    def one_round(name: str) -> tuple[list[Answer], float]:
        prompts = draw_prompts(workload, sources[name])  # the same for all servers
        answers, seconds = targets[name].run(prompts, workload.new_tokens, num_clients)
        for answer in answers:
            if answer.error is not None or answer.num_output != workload.new_tokens:
                raise PeerError(f"{name} has answered {answer.num_output} tokens: {answer.error}")
        return answers, seconds

    samples = interleave({name: functools.partial(one_round, name) for name in targets}, num_rounds)
    return {
        "clients": num_clients,
        "workload": asdict(workload),
        "engines": {
            name: {"version": targets[name].version, "settings": targets[name].settings, **figures(rounds)}
            for name, rounds in samples.items()
        },
    }


def figures(rounds: Sequence[tuple[list[Answer], float]]) -> Row:
    """Return the rate and latencies of a server, over all rounds and in each."""
    return {
        "rate": statistics.median(rate(*each) for each in rounds),
        **waits([answer for answers, _ in rounds for answer in answers]),
        "rounds": [{"rate": rate(answers, seconds), **waits(answers)} for answers, seconds in rounds],
    }


def rate(answers: Sequence[Answer], seconds: float) -> float:
    return sum(answer.num_output for answer in answers) / seconds


def waits(answers: Sequence[Answer]) -> Row:
    """Return medians and 99th percentiles, in seconds."""
    kinds = {
        "first_token": [answer.first_token for answer in answers],
        "between_tokens": [
            after - before
            for answer in answers
            for before, after in zip(answer.event_times, answer.event_times[1:], strict=False)
        ],
    }
    return {
        name: {"median": statistics.median(values), "p99": percentile(values, 0.99)} for name, values in kinds.items()
    }


# ---- Targets


def own_settings(sizes: Sizes) -> Row:
    return {
        "dtype": "bfloat16",
        "num_threads": sizes.num_threads,
        "max_model_len": sizes.max_request_tokens,
        "max_num_seqs": sizes.max_requests,
        "kv_cache_memory": KV_CACHE,
        "packed_cache": 0,
    }


@contextlib.contextmanager
def async_llm(model: Path, sizes: Sizes) -> Iterator[Target]:
    """Start `AsyncLLM` with the settings that the server uses."""
    llm = AsyncLLM(model, executor="mp", show_progress=False, **own_settings(sizes))

    async def run(prompts: Prompts, new_tokens: int, num_clients: int) -> tuple[list[Answer], float]:
        answers = [Answer(len(prompt)) for prompt in prompts]
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def send(index: int) -> None:
            sent_at, answer = time.perf_counter(), answers[index]
            async for output in llm.generate({"prompt_token_ids": prompts[index]}, params):
                answer.event_times.append(time.perf_counter() - sent_at)
                answer.num_output += len(output.outputs[0].token_ids)

        return answers, await closed_loop(send, len(prompts), num_clients)

    try:
        yield Target(f"moeserve {moeserve.__version__}", {}, lambda *arguments: asyncio.run(run(*arguments)))
    finally:
        llm.shutdown()


def moeserve_command(model: Path, sizes: Sizes, port: int) -> Command:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own_settings(sizes).items()]
    arguments = [sys.executable, "-m", "moeserve", "serve", str(model), f"--port={port}", *flags]
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


def start_target(model: Path, sizes: Sizes, stack: ExitStack, name: str) -> Target:
    """Start a server or `AsyncLLM`. Closing the stack stops it.

    Raises:
        PeerError: it is not installed, or does not start.
    """
    return stack.enter_context(STARTS[name](model, sizes))


@contextlib.contextmanager
def started(name: str, command: Callable[[Path, Sizes, int], Command], model: Path, sizes: Sizes) -> Iterator[Target]:
    """Start a server, and stop it when the context is left.

    Raises:
        PeerError: it is not installed, or does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    start, log = command(model, sizes, port), peers_folder() / "logs" / f"server-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            start.arguments, env=start.variables, stdout=output, stderr=output, preexec_fn=os.setpgrp
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, f"{url}{start.ready_path}", name, log)

        def run(prompts: Prompts, new_tokens: int, num_clients: int) -> tuple[list[Answer], float]:
            requests = fixed_traffic(len(prompts[0]), new_tokens).requests * len(prompts)
            return asyncio.run(load(f"{url}/v1", requests, prompts, num_clients=num_clients))

        yield Target(start.version, start.settings, run)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):  # the server, or processes that it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise PeerError(f"{name} does not start\n{log} ends with:\n{tail}")
        time.sleep(0.2)


STARTS: dict[str, Callable[[Path, Sizes], contextlib.AbstractContextManager[Target]]] = {
    "asyncllm": async_llm,
    "moeserve": functools.partial(started, "moeserve", moeserve_command),
    "vllm": functools.partial(started, "vllm", vllm_command),
    "llama.cpp": functools.partial(started, "llama.cpp", llama_command),
}


if __name__ == "__main__":
    main()
