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
    for name, text in (("tokenizer.json", tokenizer(num_tokens)), ("tokenizer_config.json", json.dumps(config))):
        path = folder / name
        if not path.exists() or path.read_text() != text:  # names of GGUF files depend on its time
            path.write_text(text)
    for path in checkpoint.iterdir():
        if not (link := folder / path.name).exists():
            link.symlink_to(path)
    return folder


def tokenizer(num_tokens: int) -> str:
    """Return the tokenizer.json of a byte-level BPE tokenizer with `num_tokens` tokens, at least 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    merges = itertools.chain(
        itertools.product(letters, letters), itertools.product(pairs, letters), itertools.product(pairs, pairs)
    )
    chosen = list(itertools.islice(merges, num_tokens - len(SPECIAL) - 256))
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in chosen)]
    made = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(tokens)}, merges=chosen))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str()
