"""Start a prefill server, a decode server and a router on this machine, and send them requests.

`python examples/disaggregated/serve_and_ask.py` serves the default model. All processes end with this program.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

SHORT = "What is the capital of England?"
LONG = f"Here is a note, which is long: {'the sun is warm and the sea is blue. ' * 40}Now answer. {SHORT}"


def main() -> None:
    # On several machines: --host and --kv-transfer-address of each, and one --kv-transfer-key-file for all.
    engine = ["--kv-transfer-address", "127.0.0.1", "--max-model-len", "1024", "--kv-cache-memory", "64MiB"]
    with (
        serving(*engine) as prefill,
        serving(*engine) as decode,
        serving("--prefill", prefill, "--decode", decode, "--min-remote-prefill", "256") as router,
    ):
        for question in (SHORT, LONG):
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 32}
            answer = json.loads(read(f"{router}/v1/chat/completions", body))
            print(f"{answer['usage']['prompt_tokens']} tokens:", answer["choices"][0]["message"]["content"])
        show(f"{router}/metrics", r"moeserve_router_requests_total.*")
        show(f"{decode}/metrics", r"moeserve_external_prefix_cache_hits_total.*")


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Start `moeserve serve` on a free port of the loopback interface. Yields its URL."""
    command = [sys.executable, "-m", "moeserve", "serve", "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r" at (http://\S+)/v1", line):
                break
            print(line, end="", file=sys.stderr)
        else:
            raise SystemExit("the server has not started; see above")
        # Its log is read on, or a full pipe would stop it.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        server.terminate()
        server.wait()


def read(url: str, body: object = None) -> str:
    """Return the answer to a request. It is a POST request if it has a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def show(url: str, pattern: str) -> None:
    """Print the metrics of a server that match a pattern."""
    print(*re.findall(f"^{pattern}$", read(url), re.MULTILINE), sep="\n")


if __name__ == "__main__":
    main()
