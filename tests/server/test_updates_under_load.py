"""A trainer updates a server again and again while requests run.

What the server and the trainer hold does not grow, and the tokens of each version are those of a fresh engine.
"""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from server_process import ServerProcess, serving
from test_load import assert_flat
from tiny_model import save_tiny_model

from moeserve import LLM, SamplingParams
from moeserve.models.weight_update import CHUNK_PREFIX, SHARED_MEMORY
from moeserve.rl import WeightSender

NUM_MODELS = 3  # more than two, so that weights and prefixes of neither of the last versions are taken for new ones
SETTINGS: dict[str, Any] = dict(dtype="float32", max_model_len=64, kv_cache_memory="4MiB", num_threads=1)
PROMPTS = [[first, *range(2, 5 + first)] for first in range(1, 5)]
BODY = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Span:
    """The tokens of one output that weights of one version have computed."""

    before: tuple[int, ...]  # the prompt, and the output's tokens of earlier versions
    token_ids: list[int]
    version: str


class Load:
    """Clients that send one request after the other while it is entered. Their outputs are kept as spans."""

    def __init__(self, server: ServerProcess) -> None:
        self.spans: list[Span] = []
        self._ended: list[None] = []  # appending is atomic, unlike counting
        self._url = server.url
        self._is_over = False
        self._has_ended = threading.Event()

    @property
    def num_outputs(self) -> int:
        return len(self._ended)

    def __enter__(self) -> Load:
        self._is_over = False
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._clients = [self._threads.submit(self._send_requests, prompt) for prompt in PROMPTS]
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._threads.shutdown()
        for client in self._clients:
            client.result()

    def wait_for_an_end(self) -> None:
        """Wait until a request ends."""
        self._has_ended.clear()
        assert self._has_ended.wait(60)

    def connect(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers={"Authorization": "Bearer admin"}, timeout=60)

    def _send_requests(self, prompt: list[int]) -> None:
        with self.connect() as http:
            while not self._is_over:
                (choice,) = http.post("/v1/completions", json=BODY | {"prompt": prompt}).json()["choices"]
                token_ids = choice["token_ids"]
                self.spans += [
                    Span((*prompt, *token_ids[:start]), token_ids[start:stop], version)
                    for version, start, stop in choice["weight_versions"]
                ]
                self._ended.append(None)
                self._has_ended.set()


def save_models(folder: Path) -> list[Path]:
    """Save models of one shape, whose weights differ."""
    first = save_tiny_model(folder / "0")
    (shard,) = first.glob("*.safetensors")
    generator = torch.Generator().manual_seed(7)
    others = [folder / str(index) for index in range(1, NUM_MODELS)]
    for other in others:
        shutil.copytree(first, other)
        tensors = load_file(shard)
        for tensor in tensors.values():
            tensor += 0.5 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, other / shard.name)
    return [first, *others]


def chunks_in_use(server: ServerProcess) -> list[str]:
    """Return the trainer's chunks that are still in shared memory, or that a process of the server still maps."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in server.processes())
    left = SHARED_MEMORY.glob(f"{CHUNK_PREFIX}{os.getpid()}-*")
    return [line for line in maps.splitlines() if CHUNK_PREFIX in line] + [str(path) for path in left]


def compare_with_fresh_engines(spans: list[Span], models: list[Path]) -> None:
    for index, folder in enumerate(models):
        own = [span for span in spans if (0 if span.version == "default" else int(span.version)) % NUM_MODELS == index]
        assert own
        with LLM(folder, show_progress=False, **SETTINGS) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": list(span.before)} for span in own],
                [SamplingParams(temperature=0, max_tokens=len(span.token_ids), ignore_eos=True) for span in own],
                use_tqdm=False,
            )
        for span, output in zip(own, outputs, strict=True):
            assert output.outputs[0].token_ids == span.token_ids, span


@pytest.mark.parametrize(
    ("num_updates", "flags"),
    [
        (30, ()),
        pytest.param(1000, ("-dp=2",), marks=[pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_grows_and_each_span_is_exact(num_updates: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    models = save_models(tmp_path)
    tensors = [load_file(next(model.glob("*.safetensors"))) for model in models]
    common = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    common += ["--rl", "--admin-key=admin", "--served-model-name=tiny"]
    with serving(str(models[0]), *common, *flags) as server:
        load, number = Load(server), 0
        sender = WeightSender(server.url, "shm", api_key="admin", chunk_bytes=50_000)

        def update(times: int) -> None:
            nonlocal number
            with load, load.connect() as http:
                for _ in range(times):
                    number += 1
                    load.wait_for_an_end()
                    assert http.post("/pause?mode=retract&clear_cache=false").json() == {"status": "paused"}
                    sender.send(tensors[number % NUM_MODELS], str(number))
                    assert http.post("/resume").json() == {"status": "resumed"}

        def trainer() -> tuple[int, int]:
            own = psutil.Process()
            return own.num_fds(), own.num_threads()

        update(num_updates // 5)
        before, trainer_before, num_before = server.holdings(), trainer(), load.num_outputs
        update(num_updates)
        assert_flat(before, server.holdings(), load.num_outputs - num_before)
        assert trainer() == trainer_before
        assert chunks_in_use(server) == []
    num_versions = len({span.version for span in load.spans})
    print(f"{load.num_outputs} outputs with {len(load.spans)} spans of {num_versions} versions")
    assert len(load.spans) >= load.num_outputs + num_updates
    compare_with_fresh_engines(load.spans, models)
