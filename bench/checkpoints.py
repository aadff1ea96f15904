"""Synthetic checkpoints for benchmarks: writes one, and prints its folder.

Weights are random, so the generated text is meaningless, but a step takes the same time and memory as in a trained
model of the same shape. There is no tokenizer: benchmarks send token ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.bench.harness import plain_parser
from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError, missing_extra
from moeserve.models.checkpoint.model_files import find_model


def make_checkpoint(name: str, folder: Path | None = None) -> Path:
    """Write a checkpoint in Hugging Face layout with transformers, unless it exists already.

    The files are written to a temporary folder, which is renamed once complete.

    Args:
        folder: folder to write; None: a folder in moeserve's cache.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the folder has other content.
        SettingsError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("the checkpoints of benchmarks are made by transformers", "transformers", error) from None

    folder = folder or cache_folder() / "bench" / name
    config = CONFIGS[name]
    if folder.exists() and any(folder.iterdir()):
        path = folder / "config.json"
        if not path.exists() or json.loads(path.read_text()) != config:
            raise CheckpointError(f"{folder} holds something other than {name}; delete it or name another folder")
        return folder

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(partial), dtype=torch.bfloat16
        )
    model.save_pretrained(partial, max_shard_size=2**29)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return folder


def changed_copy(model: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Write a copy of a checkpoint whose tensors are changed, given their names, and return its folder."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for shard in sorted(model.glob("*.safetensors")):
        tensors = load_file(shard)
        changed = {name: change(name, weight).to(weight.dtype).contiguous() for name, weight in tensors.items()}
        save_file(changed, folder / shard.name, metadata={"format": "pt"})
    return folder


def find_checkpoint(name: str) -> Path:
    """Return the folder of a synthetic checkpoint, which is written if needed, or of another that is named or in a hub.

    Raises:
        CheckpointError: `name` is neither a synthetic checkpoint nor another, or it cannot be fetched.
    """
    if name in CONFIGS:
        return make_checkpoint(name)
    folder = find_model(name).fetch(shows_progress=True)
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{name}: no such checkpoint; known names are {', '.join(CONFIGS)}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = plain_parser("checkpoint", __doc__)
    parser.add_argument("name", choices=CONFIGS, metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument("folder", type=Path, nargs="?", help="default: a folder in moeserve's cache")
    options = parser.parse_args(arguments)
    print(make_checkpoint(options.name, options.folder))


def small_mixtral_config(
    *, hidden_size: int, expert_size: int, num_layers: int, num_experts: int, vocab_size: int
) -> dict[str, Any]:
    """Return a Mixtral config.json for engines with `load_format="dummy"`: top-2 routing, head size 64 or 32."""
    num_heads = max(4, hidden_size // 64)
    return CONFIGS["mixtral-mini"] | {
        "hidden_size": hidden_size,
        "intermediate_size": expert_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // num_heads,
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
        "vocab_size": vocab_size,
    }


def _read_configs() -> dict[str, dict[str, Any]]:
    """Return the configs by name. Their keys are those that both transformers 4.57 and 5 read."""
    configs = json.loads(Path(__file__).with_name("models.json").read_text())
    common = configs.pop("common")
    configs["mixtral-small"] = configs["mixtral-mini"] | {"num_hidden_layers": 4}  # for several engines at once
    return {name: common | fields for name, fields in configs.items()}


CONFIGS = _read_configs()
CONFIGS["skewed-mini"] = small_mixtral_config(
    hidden_size=512, expert_size=768, num_layers=6, num_experts=16, vocab_size=8192
)  # whose routers `rebalance.py` skews
