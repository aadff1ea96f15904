"""A made-up tokenizer for synthetic checkpoints, so that servers write text and the results include detokenization.

The tokens are two special ones, the 256 bytes, and combinations of two, three and four letters.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

SPECIAL = ("<s>", "</s>")


def with_tokenizer(checkpoint: Path) -> Path:
    """Return a checkpoint's folder if it has a tokenizer, else a folder with links to its files and a tokenizer."""
    if (checkpoint / "tokenizer.json").exists():
        return checkpoint
    checkpoint = checkpoint.absolute()
    folder = checkpoint.with_name(f"{checkpoint.name}-text")
    folder.mkdir(exist_ok=True)
    num_tokens = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer.json", tokenizer(num_tokens)), ("tokenizer_config.json", config)):
        path, text = folder / name, json.dumps(content)
        if not path.exists() or path.read_text() != text:  # names of GGUF files depend on its time
            path.write_text(text)
    for path in checkpoint.iterdir():
        if not (link := folder / path.name).exists():
            link.symlink_to(path)
    return folder


def tokenizer(num_tokens: int) -> dict[str, object]:
    """Return the tokenizer.json of a byte-level BPE tokenizer with `num_tokens` tokens, at least 258."""
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    merges = itertools.chain(
        itertools.product(letters, letters), itertools.product(pairs, letters), itertools.product(pairs, pairs)
    )
    chosen = list(itertools.islice(merges, num_tokens - len(SPECIAL) - 256))
    tokens = [*SPECIAL, *byte_symbols(), *("".join(merge) for merge in chosen)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": name, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for index, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {name: index for index, name in enumerate(tokens)},
            "merges": [list(merge) for merge in chosen],
        },
    }


def byte_symbols() -> list[str]:
    """Return the visible characters that byte-level tokenizers (GPT-2's) use for the bytes."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
