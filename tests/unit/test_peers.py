"""Peers: requests, stopping between requests, closing, and installation. The adapter is that of transformers."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.peers import environments
from moeserve.bench.peers import install as install_module
from moeserve.bench.peers.environments import (
    ENVIRONMENTS,
    STAMP,
    PeerError,
    recommended_libraries,
    requirements,
)
from moeserve.bench.peers.install import install
from moeserve.bench.peers.peers import PEERS, Peer, make_gguf, start_peer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral-tiny", tmp_path_factory.mktemp("checkpoint") / "mixtral-tiny")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Peer]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Peer("transformers", PEERS["transformers"], tmp_path) as process:
        yield process


def wait_until_stopped(pid: int) -> None:
    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    deadline = time.monotonic() + 200
    while state() != "T":
        assert time.monotonic() < deadline, f"process {pid} is {state()}"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_peer_computes_the_model(checkpoint: Path, tmp_path: Path) -> None:
    source = random.Random(0)
    prompts = [source.choices(range(160), k=32) for _ in range(4)]
    with start_peer("transformers", checkpoint, 1, folder=tmp_path) as peer:
        outputs, seconds = peer.generate(prompts, 6)
        assert min(seconds, peer.startup_seconds) > 0
        assert "transformers" in peer.version
        assert peer.settings["environment"] == "moeserve's"
        assert peer.settings["threads"] == 1
    tokens = torch.tensor([[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)])
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(tokens).logits[:, 31:-1]
    chosen = logits.gather(-1, tokens[:, 32:, None])[..., 0]
    gaps = (logits.amax(-1) - chosen) / logits.std(-1)  # bf16 decides near ties either way
    assert gaps.shape == (4, 6)
    assert gaps.max() < 0.2


def test_a_peer_is_stopped_between_requests_and_ended_by_close(process: Peer) -> None:
    for _ in range(2):
        with pytest.raises(PeerError, match="nonsense"):
            process.request("nonsense")
        wait_until_stopped(process.pid)
    variables = Path(f"/proc/{process.pid}/environ").read_text()
    assert "PATH=" in variables
    assert "OMP_" not in variables, "our OpenMP variables do not reach a peer"
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.close()  # again does no harm


def test_peer_that_died_raises_with_the_end_of_its_log(process: Peer, tmp_path: Path) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    (tmp_path / "logs" / "transformers.log").write_text("first\nlast line\n")
    with pytest.raises(PeerError, match=r"ended with -9.*\n[^$]*last line"):
        process.request("load")


@pytest.mark.slow
def test_missing_checkpoint_is_an_error(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(PeerError, match="cannot load"):
        start_peer("transformers", tmp_path, 1, folder=tmp_path)


def test_recommended_libraries_are_preloaded_if_they_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "tcmalloc", lambda: None)
    python = tmp_path / "bin" / "python"
    assert recommended_libraries(python) == []
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr(environments, "tcmalloc", lambda: "libtcmalloc_minimal.so.4")
    assert recommended_libraries(python) == ["libtcmalloc_minimal.so.4", str(tmp_path / "lib" / "libiomp5.so")]


def test_transformers_runs_in_its_own_environment_once_that_is_installed(tmp_path: Path) -> None:
    home = tmp_path / "transformers"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "lib" / "libiomp5.so").touch()  # which the loader passes over
    (home / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (home / "bin" / "python").chmod(0o755)
    (home / STAMP).write_text(requirements("transformers").read_text())
    with Peer("transformers", PEERS["transformers"], tmp_path) as peer:
        assert peer.settings["environment"] == "its own"
        assert peer.settings["preloaded"][-1] == "libiomp5.so"
        with pytest.raises(PeerError, match="nonsense"):
            peer.request("nonsense")


def test_missing_environment_names_the_command_that_installs_it(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / STAMP).write_text("of another version")
    with pytest.raises(PeerError, match=r"moeserve bench peers llama\.cpp"):
        make_gguf(checkpoint, "bf16", tmp_path)


@pytest.mark.soak
def test_an_environment_is_made_once_and_again_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install_module, "MIN_PYTHON", (3, 10))  # nothing is installed that needs a newer one
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    nothing = tmp_path / "kt-kernel.txt"
    nothing.write_text("")
    folder = tmp_path / "peers"
    with pytest.raises(PeerError, match="No module named 'kt_kernel'"):  # nothing was installed, so the check fails
        install("kt-kernel", folder)
    assert not (folder / "kt-kernel" / STAMP).exists()

    monkeypatch.setitem(ENVIRONMENTS, "kt-kernel", "json")
    python = install("kt-kernel", folder)
    assert python.exists()
    marker = folder / "kt-kernel" / "marker"
    marker.touch()
    assert install("kt-kernel", folder) == python
    assert marker.exists()  # found, not made again
    nothing.write_text("# other pins\n")
    install("kt-kernel", folder)
    assert not marker.exists()


def test_pip_gets_the_options_and_an_older_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(install_module.processes, "run", lambda command, *rest: commands.append(command))
    monkeypatch.setattr(install_module.venv, "create", lambda home, with_pip: home.mkdir())
    monkeypatch.setattr(install_module, "MIN_PYTHON", (3, 10))
    install_module.main(["kt-kernel", "--folder", str(tmp_path), "--pip-option=--extra-index-url=some-index"])
    assert "--extra-index-url=some-index" in commands[0]
    monkeypatch.setattr(install_module, "MIN_PYTHON", (3, 99))
    with pytest.raises(PeerError, match=r"3\.99"):
        install("llama.cpp", tmp_path)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_requirement_is_pinned(name: str) -> None:
    lines = requirements(name).read_text().splitlines()
    assert lines
    assert [line for line in lines if "==" not in line] == []
