"""Short prompts concurrent with long ones: one engine, or a prefill engine and a decode engine behind a router.

    python -m moeserve.bench.disaggregated [--model NAME ...] [--seconds 60] [--rounds 3] [--json PATH]

- *one engine*: `moeserve serve` with all threads. *prefill and decode*: two servers with half of the threads each, and
  a router (docs/server.md). All run at once; the two configurations receive requests in turns.
- *load*: short prompts every --short-every seconds and long ones every --long-every seconds, whether or not earlier
  requests have ended. Prompts are random token ids, new for each request; times and lengths are the same for both.
- *first token*: time from sending a request to its first text, over all requests of all rounds. *speed-up*: the 99th
  percentile of short prompts with one engine over that of this configuration; the median over the rounds. The first
  round is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, add_models, at_least, interleave, make_parser, percentile
from moeserve.bench.report import show_and_save
from moeserve.bench.serve import FIRST_TOKEN_ID, Answer, load
from moeserve.bench.servers import wait_until_ready
from moeserve.bench.vocabulary import with_tokenizer
from moeserve.planner.traffic import RecordedRequest, fixed_traffic

MODELS = ("qwen3-mini",)
ONE, TWO = "one engine", "prefill and decode"


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    seconds: int
    short_every: float  # seconds
    long_every: float
    short_tokens: int
    long_tokens: int
    new_tokens: int

    def requests(self) -> list[tuple[float, RecordedRequest]]:
        """Return the requests, each with the seconds after which it is sent. Short ones are sent between long ones."""
        kinds = ((self.long_every, 0.0, self.long_tokens), (self.short_every, 0.5, self.short_tokens))
        return sorted(
            (
                ((index + shift) * every, fixed_traffic(num_tokens, self.new_tokens).requests[0])
                for every, shift, num_tokens in kinds
                for index in range(max(1, int(self.seconds / every)))
            ),
            key=lambda each: each[0],
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("disaggregated", "Short prompts beside long ones, with one engine and with two.", rounds=3)
    add_models(parser, MODELS)
    parser.add_argument("--seconds", type=at_least(1), default=60, help="of a round (default: 60)")
    parser.add_argument("--short-every", type=float, default=0.5, help="seconds (default: 0.5)")
    parser.add_argument("--long-every", type=float, default=10.0, help="seconds (default: 10)")
    parser.add_argument("--short-tokens", type=at_least(1), default=64)
    parser.add_argument("--long-tokens", type=at_least(1024), default=2048, help="1024 or more (default: 2048)")
    parser.add_argument("--new-tokens", type=at_least(2), default=8, help="new tokens of each request")
    options = parser.parse_args(arguments)
    if options.threads < 2:
        parser.error("--threads must be at least 2, one for each engine")
    names = ("seconds", "short_every", "long_every", "short_tokens", "long_tokens", "new_tokens")
    clients = Load(**{name: getattr(options, name) for name in names})
    for checkpoint in map(find_checkpoint, options.model or MODELS):
        rows = measure(with_tokenizer(checkpoint), clients, options.rounds, options.threads)
        facts = {"benchmark": "disaggregated", "model": checkpoint.name, "threads": options.threads}
        show_and_save(options.json, [facts | vars(clients) | row for row in rows])


def measure(model: Path, clients: Load, num_rounds: int, num_threads: int) -> list[Row]:
    """Return one row for one engine, and one for two engines."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    chance = random.Random(5)
    length = clients.long_tokens + clients.new_tokens
    engine = [str(model), "--dtype=bfloat16", f"--max-model-len={length}", "--kv-cache-memory=1GiB"]
    transfer = [*engine, "--kv-transfer-address=127.0.0.1"]
    half = num_threads // 2
    with (
        serving(*engine, f"--num-threads={num_threads}") as one,
        serving(*transfer, f"--num-threads={half}") as prefill,
        serving(*transfer, f"--num-threads={num_threads - half}") as decode,
        serving(f"--prefill={prefill}", f"--decode={decode}") as router,
    ):

        def one_round(url: str) -> list[Answer]:
            arrivals, requests = zip(*clients.requests(), strict=True)
            prompts = [
                [chance.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(each.prompt_tokens)] for each in requests
            ]
            answers, _ = asyncio.run(load(f"{url}/v1", requests, prompts, arrivals=arrivals))
            return answers

        sides = {ONE: lambda: one_round(one), TWO: lambda: one_round(router)}
        rounds = interleave(sides, num_rounds, warms_up=True)
    slowest = {name: [waits(each, clients.short_tokens)["p99"] for each in found] for name, found in rounds.items()}
    rows = []
    for name, found in rounds.items():
        answers = [answer for each in found for answer in each]
        speed_ups = [before / after for before, after in zip(slowest[ONE], slowest[name], strict=True)]
        row = {
            "engine": name,
            "short": waits(answers, clients.short_tokens),
            "long": waits(answers, clients.long_tokens),
            "failed": sum(answer.error is not None for answer in answers),
            "speed_up": statistics.median(speed_ups),
            "p99_of_rounds": slowest[name],
        }
        rows.append(row)
    return rows


def waits(answers: Sequence[Answer], prompt_tokens: int) -> Row:
    """Return the seconds to the first token, for prompts of one length."""
    found = [answer.first_token for answer in answers if answer.error is None and answer.num_prompt == prompt_tokens]
    return {"requests": len(found), "median": statistics.median(found), "p99": percentile(found, 0.99)}


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Start `moeserve serve`, yield its URL when it is ready, and terminate it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, "-m", "moeserve", "serve", f"--port={port}", *flags]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, f"{url}/ready", "moeserve serve", log)
            yield url
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
