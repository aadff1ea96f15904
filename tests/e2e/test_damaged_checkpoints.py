"""Opening a checkpoint that is damaged at random succeeds or raises a named error, soon and in little memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import damaged_checkpoints
import pytest
from gguf_families import write_family
from reference_models import SHAPES, in_the_style_of_the_hub, make_reference
from safetensors.torch import load_file, save_file

NUM_CASES = 2000
NUM_PROCESSES = 2
MAX_CPU_SECONDS = 5.0
MAX_ADDED_BYTES = 640 * 2**20  # tables of requests of 2**24 tokens, the longest context, take 512 MiB
OF_GGUF: dict[str, dict[str, int]] = {
    "mixtral": {},
    "gpt-oss": {},
    "granite-hybrid-rope": {},
    "kimi-linear": dict(linear_num_heads=4),
    "qwen3-next": dict(linear_value_head_dim=10),
    "lfm2-moe": {},
    "ernie": {},
}


def make_bases(folder: Path) -> None:
    """Write the checkpoints that are damaged."""
    (folder / "configs").mkdir(parents=True)
    for name, shape in SHAPES.items():
        config = in_the_style_of_the_hub(json.loads(json.dumps(shape.config().to_dict(), default=str)))
        (folder / "configs" / f"{name}.json").write_text(json.dumps(config))
    (folder / "gguf").mkdir()
    for name, changes in OF_GGUF.items():
        shape = dataclasses.replace(SHAPES[name], settings=SHAPES[name].settings | changes)
        reference = make_reference(folder / "references" / name, shape)
        path = write_family(reference.folder, folder / f"{name}.gguf")
        file = damaged_checkpoints.GgufParts(path)
        file.entries = [entry for entry in file.entries if not entry[0].startswith("tokenizer")] + vocabulary(101)
        (folder / "gguf" / path.name).write_bytes(file.packed())
    (folder / "shards").mkdir()
    tensors = load_file(folder / "references" / "mixtral" / "model.safetensors")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shard_of_name = {name: names[place % 2] for place, name in enumerate(tensors)}
    for file_name in names:
        held = {name: tensor for name, tensor in tensors.items() if shard_of_name[name] == file_name}
        save_file(held, folder / "shards" / file_name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of_name}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    config = (folder / "references" / "mixtral" / "config.json").read_text()
    (folder / "shards" / "config.json").write_text(config)
    (folder / "shards" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 5}))


def vocabulary(size: int) -> list[list[Any]]:
    """Return the metadata of a byte-level vocabulary."""
    text, numbers = damaged_checkpoints.TEXT, 5
    tokens = [*map(chr, range(33, 33 + 94)), "ab", *(f"<{number}>" for number in range(size - 95))]
    return [
        ["tokenizer.ggml.model", text, text, "gpt2"],
        ["tokenizer.ggml.pre", text, text, "qwen2"],
        ["tokenizer.ggml.tokens", damaged_checkpoints.LIST, text, tokens],
        ["tokenizer.ggml.token_type", damaged_checkpoints.LIST, numbers, [1] * 95 + [3] * (size - 95)],
        ["tokenizer.ggml.merges", damaged_checkpoints.LIST, text, ["a b"]],
        ["tokenizer.ggml.eos_token_id", 4, 4, 95],
        ["tokenizer.ggml.add_bos_token", 7, 7, False],
        ["tokenizer.chat_template", text, text, "{{ messages[0].content }}"],
    ]


@pytest.mark.slow
def test_damaged_checkpoints_are_opened_or_refused(tmp_path: Path) -> None:
    make_bases(tmp_path)
    ends = [NUM_CASES * number // NUM_PROCESSES for number in range(NUM_PROCESSES + 1)]
    logs = [tmp_path / f"{number}.log" for number in range(NUM_PROCESSES)]
    environment = os.environ | {"MOESERVE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    processes = []
    for log, first, stop in zip(logs, ends, ends[1:], strict=False):
        command = [sys.executable, damaged_checkpoints.__file__, str(tmp_path), str(first), str(stop)]
        with log.open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, env=environment, stderr=subprocess.DEVNULL))
    try:
        for process in processes:
            process.wait(timeout=400)
    finally:
        for process in processes:
            process.kill()
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    for of_process, process in zip(lines, processes, strict=True):
        assert "case" not in of_process[-1], f"{of_process[-1]} ended the process with status {process.returncode}"
    found = {start["case"]: end for of_process in lines for start, end in zip(*[iter(of_process)] * 2, strict=True)}
    assert len(found) == NUM_CASES
    wrong = {number: end for number, end in found.items() if end["outcome"] not in ("opened", "refused")}
    assert not wrong, "\n".join(f"case {number}: {end['text']}" for number, end in wrong.items())
    slow = {number: end for number, end in found.items() if end["seconds"] > MAX_CPU_SECONDS}
    assert not slow
    large = {number: end for number, end in found.items() if end["added"] > MAX_ADDED_BYTES}
    assert not large
    kinds = Counter((number % len(damaged_checkpoints.CASES), end["outcome"]) for number, end in found.items())
    assert min(kinds.values()) > NUM_CASES // 50, "one kind is always opened, or always refused"
    assert len(kinds) == 2 * len(damaged_checkpoints.CASES)
