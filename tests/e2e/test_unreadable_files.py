"""Files and folders of a checkpoint that cannot be read: the error names the file and says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model

SHARD = "model-00001-of-00002.safetensors"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
FILES += ["model.safetensors.index.json", SHARD, "model.safetensors"]

# Loads every folder, and prints the error of each: its type and message.
LOAD = """
import json, sys
from moeserve import LLM
found = []
for folder in sys.argv[1:]:
    try:
        LLM(folder, num_threads=1, max_model_len=64, show_progress=False).shutdown()
        found.append(["", ""])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


def unreadable(path: Path) -> None:
    path.chmod(0)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("../blobs/0123abcd")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def command() -> list[str]:
    """The command that runs LOAD as a user whom permissions bind, as they do not bind root."""
    python = [sys.executable, "-c", LOAD]
    if os.geteuid() != 0:
        return python
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv, and permissions do not bind root")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *python]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [unreadable, folder_instead, dangling_link, truncated, empty])
def test_the_error_names_the_file(damage: object, whole: Path, command: list[str], tmp_path: Path) -> None:
    damaged: list[Path] = []
    for name in FILES:
        folder = Path(shutil.copytree(whole, tmp_path / name.replace(".", "-")))
        if "-of-" in name or "index" in name:
            tensors = load_file(folder / "model.safetensors")
            save_file(tensors, folder / SHARD)
            (folder / "model.safetensors").unlink()
            index = {"weight_map": dict.fromkeys(tensors, SHARD)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        damage(folder / name)  # type: ignore[operator]
        damaged.append(folder)
    run = subprocess.run([*command, *map(str, damaged)], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    for name, (kind, message) in zip(FILES, json.loads(run.stdout.splitlines()[-1]), strict=True):
        assert kind == "CheckpointError", (name, kind, message)
        assert name in message
        assert "missing" not in message or damage is dangling_link
        assert "Permission denied" in message or damage is not unreadable


def test_folders_that_cannot_be_opened_or_listed(whole: Path, command: list[str], tmp_path: Path) -> None:
    """A folder that can be entered but not listed is read if the names of its files are known."""
    folders = [Path(shutil.copytree(whole, tmp_path / f"{mode:03o}")) for mode in (0o000, 0o444, 0o111)]
    shards = Path(shutil.copytree(whole, tmp_path / "shards"))
    (shards / "model.safetensors").rename(shards / "model-00001-of-00001.safetensors")
    for folder, mode in zip([*folders, shards], (0o000, 0o444, 0o111, 0o111), strict=True):
        folder.chmod(mode)
    run = subprocess.run([*command, *map(str, [*folders, shards])], capture_output=True, text=True, timeout=200)
    for folder in [*folders, shards]:
        folder.chmod(0o755)
    assert run.returncode == 0, run.stderr
    closed, listed_only, entered_only, unlisted = json.loads(run.stdout.splitlines()[-1])
    for folder, (kind, message) in zip([*folders[:2], shards], (closed, listed_only, unlisted), strict=True):
        assert kind == "CheckpointError"
        assert str(folder) in message
        assert "chmod" in message
    assert entered_only == ["", ""]
