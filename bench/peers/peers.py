"""Starts a peer in a separate process, and sends it requests.

    with start_peer("llama.cpp-q8_0", make_checkpoint("mixtral-mini"), num_threads=2) as peer:
        tokens, seconds = peer.generate(prompts, 64)

Threads of an engine may spin after their work, so a peer's processes are stopped by a signal between requests. Our own
OpenMP variables are not passed on, so within a request each engine's threads wait as its defaults specify.

transformers needs no installation: without an environment of its own it runs in moeserve's, so at least one peer is
always available. A peer's `settings` record which of the two environments was used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moeserve.bench.peers import processes
from moeserve.bench.peers.environments import PeerError, is_installed, peers_folder, python_of, recommended_libraries

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """The settings with which a peer is started."""

    adapter: str
    environment: str
    gguf_kind: str | None = None
    preloads: bool = False  # preload the libraries that its authors recommend

    def python(self, folder: Path) -> Path:
        """Return the Python of its environment. Without one, transformers uses moeserve's."""
        if self.environment == "transformers" and not is_installed("transformers", folder):
            return Path(sys.executable)
        return python_of(self.environment, folder)


PEERS = {
    "llama.cpp-bf16": Recipe("serve_llama_cpp", "llama.cpp", "bf16"),
    "llama.cpp-q8_0": Recipe("serve_llama_cpp", "llama.cpp", "q8_0"),
    "llama.cpp-q4_0": Recipe("serve_llama_cpp", "llama.cpp", "q4_0"),
    "ik_llama.cpp-bf16": Recipe("serve_ik_llama_cpp", "ik_llama.cpp", "bf16"),
    "ik_llama.cpp-q8_0": Recipe("serve_ik_llama_cpp", "ik_llama.cpp", "q8_0"),
    "ik_llama.cpp-q4_0": Recipe("serve_ik_llama_cpp", "ik_llama.cpp", "q4_0"),
    "vllm": Recipe("serve_vllm", "vllm", preloads=True),
    "transformers": Recipe("serve_transformers", "transformers", preloads=True),
}
EXPERTS_PEERS = {
    "vllm": Recipe("serve_vllm", "vllm", preloads=True),
    "kt-kernel": Recipe("serve_kt_kernel", "kt-kernel"),
}


def start_peer(
    name: str,
    checkpoint: Path,
    num_threads: int,
    *,
    max_requests: int = 32,
    max_request_tokens: int = 1024,
    folder: Path | None = None,
) -> Peer:
    """Load a checkpoint into a peer, and generate a first token.

    Args:
        checkpoint: a folder in Hugging Face layout. llama.cpp writes a GGUF file next to it, once,
            for itself and ik_llama.cpp.
        max_requests: maximum number of prompts in a request.
        max_request_tokens: maximum tokens of a prompt with its output.
        folder: folder of the environments; None: the default.

    Raises:
        PeerError: it is not installed, or cannot load the checkpoint.
    """
    recipe = PEERS[name]
    model = make_gguf(checkpoint, recipe.gguf_kind, folder) if recipe.gguf_kind else checkpoint.absolute()
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    return Peer(name, recipe, folder).load(
        "load",
        model=str(model),
        num_threads=num_threads,
        max_requests=max_requests,
        max_request_tokens=max_request_tokens,
        first_prompt=random.Random(0).choices(range(vocab_size), k=32),
    )


def start_experts_peer(name: str, shape: Mapping[str, int], num_threads: int) -> Peer:
    """Load one layer's experts with random bf16 weights into a peer.

    Args:
        shape: the fields of `adapters.experts.Shape`.

    Raises:
        PeerError: it is not installed, or cannot run these experts.
    """
    peer = Peer(f"{name}-experts", EXPERTS_PEERS[name])
    return peer.load("load_experts", shape=dict(shape), num_threads=num_threads)


def make_gguf(checkpoint: Path, kind: str, folder: Path | None = None) -> Path:
    """Write a checkpoint as a GGUF file next to it, unless it exists. Quantized files are made from the bf16 file.

    The file name contains a digest of the checkpoint's files, so a changed checkpoint gets a new file.

    Raises:
        PeerError: llama.cpp is not installed, or the model family is not supported.
    """
    checkpoint = checkpoint.absolute()
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(checkpoint.iterdir())]
    digest = hashlib.sha256(f"{files}\n{(FOLDER / 'adapters' / 'write_gguf.py').read_text()}".encode()).hexdigest()[:8]
    target = checkpoint.with_name(f"{checkpoint.name}-{digest}.{kind}.gguf")
    if target.exists():
        return target
    inputs = [str(checkpoint), str(target)]
    if kind != "bf16":
        inputs = [str(make_gguf(checkpoint, "bf16", folder)), str(target), kind]
    command = [str(python_of("llama.cpp", folder)), "-m", "adapters.write_gguf", *inputs]
    log = (folder or peers_folder()) / "logs" / "write-gguf.log"
    processes.run(command, log, os.environ, cwd=FOLDER)
    return target


class Peer:
    """An adapter and the processes that it starts: one process group, which runs only during requests."""

    def __init__(self, name: str, recipe: Recipe, folder: Path | None = None) -> None:
        folder = folder or peers_folder()
        python = recipe.python(folder)
        preloaded = recommended_libraries(python) if recipe.preloads else []
        self.version = ""  # set once a model is loaded
        self.settings: dict[str, Any] = {  # recorded in results
            "environment": "moeserve's" if python == Path(sys.executable) else "its own",
            "preloaded": [Path(library).name for library in preloaded],
        }
        self.startup_seconds = 0.0  # from making the engine to its first token
        self._name = name
        self._log = folder / "logs" / f"{name}.log"
        self._process = processes.start(
            [str(python), "-m", f"adapters.{recipe.adapter}"],
            self._log,
            peer_variables(recipe.environment, python, preloaded),
            cwd=FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def load(self, method: str, **options: Any) -> Peer:
        """Load a model, or the experts of a layer.

        Raises:
            PeerError: loading has failed.
        """
        answer = self.request(method, **options)
        self.version = answer["version"]
        self.settings |= answer["settings"]
        self.startup_seconds = answer.get("startup_seconds", 0.0)
        return self

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        """Decode greedily, ignoring the end of sequence. All prompts of a request have the same length.

        Returns:
            New tokens, and the seconds that the peer took, without the transport of the request.
        """
        prompt_ids = [list(prompt) for prompt in prompts]
        answer = self.request("generate", prompts=prompt_ids, num_tokens=num_tokens)
        lengths = [len(output) for output in answer["tokens"]]
        if lengths != [num_tokens] * len(prompts):
            raise PeerError(f"expected {len(prompts)} x {num_tokens} tokens, got {lengths}")
        return answer["tokens"], float(answer["seconds"])

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        return self.generate(prompts, num_tokens)[1]

    def experts_seconds(self, num_rows: int, num_runs: int = 5) -> list[float]:
        """Return the seconds of each run of the experts over `num_rows` rows, with random routing.

        Raises:
            PeerError: the results are wrong.
        """
        answer = self.request("experts", num_rows=num_rows, num_runs=num_runs)
        if not answer["relative_error"] < 0.02:  # bf16 has 8 significant bits, about 0.4%
            raise PeerError(f"its results differ from float32 by {answer['relative_error']:.1%}")
        return [float(seconds) for seconds in answer["seconds"]]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, method: str, **values: Any) -> Mapping[str, Any]:
        """Continue the peer's processes, send a request, and stop them again after the answer.

        Raises:
            PeerError: the answer is an error, or the peer has exited.
        """
        requests, answers = self._pipes()
        processes.send_signal(self._process, signal.SIGCONT)
        try:
            requests.write(json.dumps({"do": method, **values}) + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise PeerError(f"{self._name} ended with {code}\n{processes.log_end(self._log)}")
        processes.send_signal(self._process, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name} cannot {method}: {answer['error']}\nMore in {self._log}")
        return answer

    def close(self) -> None:
        """Terminate the peer. May be called twice."""
        if self._process.poll() is None:
            processes.send_signal(self._process, signal.SIGCONT)
            for pipe in self._pipes():
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        processes.end(self._process)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin
        assert self._process.stdout
        return self._process.stdin, self._process.stdout


def peer_variables(environment: str, python: Path, preloaded: Sequence[str]) -> dict[str, str]:
    """Return the peer's environment variables: ours, except those for OpenMP, Python and moeserve, and its own."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "KMP_", "PYTHON", "MOESERVE_")) and name != "LD_PRELOAD"
    }
    ours |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if preloaded:
        ours |= {"LD_PRELOAD": ":".join(preloaded)}
    if environment == "vllm":
        ours |= {"VLLM_NO_USAGE_STATS": "1"}
        ours |= {"VLLM_CACHE_ROOT": str(python.parent.parent / "compiled")}  # so that later starts compile nothing
    return ours
