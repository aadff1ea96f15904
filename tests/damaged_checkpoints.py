"""Opens checkpoints that are damaged at random, in a process whose end or memory the test can see.

    python damaged_checkpoints.py FOLDER FIRST STOP

Case N is the same in every run. A line of JSON before and after each case says what happened.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from moeserve import LLM, SamplingParams
from moeserve.errors import MoeserveError
from moeserve.models.inspection import inspect

DEEP, LONG = "@deep@", "@long@"  # written as a hundred thousand lists in each other, and a number of 5000 digits
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 0.5, -0.0, 1e-320, 1e300, float("inf"), float("nan")),
    *(2**15, 2**20, 2**24, 2**31 - 1, 2**31, 2**53, 2**63, 2**64 - 1, 2**200, LONG, DEEP),
    *("", "x", "..", "../../x", "/x", "a\0b", "\ud800", "日本", "x" * 300, "x" * 10**5),
    *(f"{name}.safetensors" for name in ("x" * 300, "a\0b", "\ud800", "../x")),
    *([], {}, [[]], [None], [1, 2], ["x"], {"x": None}, [{}], [0] * 1000),
]
QUANTIZATIONS: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "version": "gemm"},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}, "input_activations": None}
        },
    },
]


# ---- JSON ----


def damaged_json(content: Any, dice: random.Random) -> bytes:
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        content = damaged_value(content, dice)
    text = json.dumps(content).replace(json.dumps(LONG), "1" + "0" * 5000)
    data = text.replace(json.dumps(DEEP), "[" * 10**5 + "]" * 10**5).encode()
    return damaged_bytes(data, dice) if dice.random() < 0.15 else data


def damaged_value(value: Any, dice: random.Random) -> Any:
    """Return a value of which one part, at any depth, is another."""
    if isinstance(value, dict) and value and dice.random() < 0.95:
        key = dice.choice(list(value))
        match dice.randrange(12):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {(str(dice.choice(ODD)) if name == key else name): part for name, part in value.items()}
            case 2:
                return value | {key: value[dice.choice(list(value))]}
            case _:
                return value | {key: damaged_value(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], *([damaged_value(value[place], dice)] * dice.randrange(3)), *value[place + 1 :]]
    if isinstance(value, int) and dice.random() < 0.3:
        return value + dice.choice((-1, 1, 8))
    return dice.choice(ODD)


def damaged_bytes(data: bytes, dice: random.Random, until: int | None = None) -> bytes:
    """Return bytes that are cut off, or of which some of the first `until` are others."""
    found, end = bytearray(data), min(until or len(data), len(data)) or 1
    match dice.randrange(4):
        case 0:
            return data[: dice.randrange(len(data) + 1)]
        case 1:
            place = dice.randrange(end)
            found[place:place] = dice.randbytes(dice.randrange(1, 20))
        case 2:
            place = dice.randrange(end)
            found[place : place + 8] = struct.pack("<Q", dice.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
        case 3:
            for _ in range(dice.randrange(1, 5)):
                found[dice.randrange(end) % len(found)] = dice.randrange(256)
    return bytes(found)


# ---- cases ----


def config_case(bases: Path, folder: Path, dice: random.Random) -> Callable[[], object]:
    """A config.json of any family, which is described without weights."""
    config = json.loads(dice.choice(sorted((bases / "configs").iterdir())).read_text())
    if dice.random() < 0.3:
        config["quantization_config"] = dice.choice(QUANTIZATIONS)
    if dice.random() < 0.3 and "quantization_config" in config:
        config["quantization_config"] = damaged_value(config["quantization_config"], dice)
    folder.mkdir()
    (folder / "config.json").write_bytes(damaged_json(config, dice))
    return lambda: inspect(folder, None)


def shards_case(bases: Path, folder: Path, dice: random.Random) -> Callable[[], object]:
    """A checkpoint of two shards, of which one file is damaged."""
    shutil.copytree(bases / "shards", folder)
    path = dice.choice(sorted(folder.iterdir()))
    if path.suffix == ".json":
        path.write_bytes(damaged_json(json.loads(path.read_text()), dice))
        return lambda: load(folder)
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    if dice.random() < 0.6:
        header = damaged_json(json.loads(content[8 : 8 + length]), dice)
        new_length = dice.choice((0, 1, 2**31, 2**40, 2**63)) if dice.random() < 0.05 else len(header)
        path.write_bytes(struct.pack("<Q", new_length) + header + content[8 + length :])
    else:
        path.write_bytes(damaged_bytes(content, dice, 8 + length))
    return lambda: load(folder)


def gguf_case(bases: Path, folder: Path, dice: random.Random) -> Callable[[], object]:
    """A GGUF file whose metadata, tensors or bytes are damaged."""
    base = dice.choice(sorted((bases / "gguf").iterdir()))
    folder.mkdir()
    path = folder / dice.choice(("m.gguf", "m.gguf", "m-00001-of-00001.gguf"))
    file = GgufParts(base)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        file.damage(dice)
    content = file.packed()
    path.write_bytes(damaged_bytes(content, dice, file.header_size) if dice.random() < 0.3 else content)
    return lambda: load(path)


CASES = (config_case, shards_case, gguf_case)


def load(path: Path) -> None:
    """Load a model and let it compute two tokens."""
    with LLM(str(path), dtype="float32", kv_cache_memory=2**20) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)


# ---- GGUF ----

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
MANY = (0, 1, 2, 5, 33, 2**20, 2**31, 2**40, 2**62, 2**63, 2**64 - 1)


def packed_text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


class GgufParts:
    """The parts of a GGUF file, which can be packed again."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.entries: list[list[Any]] = [  # key, type, type of items, value
            [key, int(field.types[0]), int(field.types[-1]), field.contents()]
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        ]
        self.tensors: list[list[Any]] = [
            [each.name, each.shape.tolist(), int(each.tensor_type), each.data_offset - reader.data_offset]
            for each in reader.tensors
        ]
        self.data = path.read_bytes()[reader.data_offset :]
        self.counts: list[int | None] = [None, None]
        self.header_size = 0

    def damage(self, dice: random.Random) -> None:
        entry, tensor = dice.choice(self.entries), dice.choice(self.tensors)
        match dice.randrange(14):
            case 0:
                self.entries.remove(entry)
            case 1:
                self.entries.append(list(entry))
            case 2:
                entry[0] = dice.choice(("x", "general.alignment", "split.count", "general.architecture", "\ud800"))
            case 3 | 4 | 5:
                if isinstance(entry[3], int):
                    entry[3] = dice.choice((0, 1, entry[3] + 1, entry[3] * 2, entry[3] // 2, 2**15, 2**24, 2**31 - 1))
                else:
                    entry[1:] = self.value(dice)
            case 6:
                entry[1:] = self.value(dice)
            case 7:
                tensor[0] = dice.choice(
                    ("x", "", "..", "blk.0.x", "blk.99999999999999999999.attn_q.weight", "x" * 10**5)
                )
            case 8:
                tensor[1][dice.randrange(len(tensor[1]))] = dice.choice(MANY)
            case 9:
                tensor[1] = dice.choice(([], tensor[1][::-1], [*tensor[1], 1], [*tensor[1], 2, 2, 2, 2], tensor[1][:1]))
            case 10:
                tensor[2] = dice.randrange(45)
            case 11:
                tensor[3] = dice.choice((0, 1, 32, tensor[3] + 32, *MANY))
            case 12:
                dice.choice((self.tensors.remove, self.tensors.append))(tensor)
            case 13:
                self.counts[dice.randrange(2)] = dice.choice(MANY)

    @staticmethod
    def value(dice: random.Random) -> tuple[int, int, Any]:
        """Return a type, the type of items and a value. Some values do not have their type."""
        number = dice.choice([each for each in ODD if isinstance(each, int) and each < 2**64])
        word = dice.choice([each for each in ODD if isinstance(each, str)])
        match dice.randrange(6):
            case 0:
                return 10 if number >= 0 else 11, 0, number
            case 1:
                return 12, 0, dice.choice([each for each in ODD if isinstance(each, float)])
            case 2:
                return TEXT, 0, word
            case 3:
                return LIST, 10, [abs(number)] * dice.choice((0, 1, 2, 3, 1000))
            case 4:
                return LIST, TEXT, [word] * dice.choice((0, 1, 2, 3))
        return LIST, LIST, dice.choice((0, 5))

    def packed(self) -> bytes:
        counts = [
            len(items) if count is None else count
            for items, count in zip((self.tensors, self.entries), self.counts, strict=True)
        ]
        header = b"GGUF" + struct.pack("<IQQ", 3, *counts)
        header += b"".join(self.packed_entry(*entry) for entry in self.entries)
        for name, dims, kind, offset in self.tensors:
            header += packed_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset % 2**64)
        self.header_size = len(header)
        return header + bytes(-len(header) % 32) + self.data

    @staticmethod
    def packed_entry(key: str, kind: int, of_items: int, value: Any) -> bytes:
        start = packed_text(key) + struct.pack("<I", kind)
        if kind == TEXT:
            return start + packed_text(value)
        if kind != LIST:
            form = FORMS[kind]
            limit = 2 ** (8 * struct.calcsize(form))
            return start + struct.pack(f"<{form}", value % limit if form.isupper() else value)
        if of_items == LIST:
            return start + struct.pack("<IQ", LIST, 2) + struct.pack("<IQ", LIST, 1) * 1000
        items = map(packed_text, value) if of_items == TEXT else (struct.pack(f"<{FORMS[of_items]}", v) for v in value)
        return start + struct.pack("<IQ", of_items, len(value)) + b"".join(items)


def main() -> None:
    bases, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(first, stop):
        dice = random.Random(number)
        folder = bases / f"case-{number}"
        open_it = CASES[number % len(CASES)](bases, folder, dice)
        print(json.dumps({"case": number}), flush=True)
        start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, text = "opened", ""
        try:
            open_it()
        except MoeserveError as error:
            outcome, text = "refused", str(error)
        except BaseException as error:
            outcome, text = type(error).__name__, traceback.format_exc()[-1500:]
        added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        seconds = time.process_time() - start
        print(json.dumps({"outcome": outcome, "text": text, "seconds": seconds, "added": added}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
