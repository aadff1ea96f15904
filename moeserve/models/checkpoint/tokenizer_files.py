"""Tokenizers of checkpoints: the vocabulary, its special tokens, and its chat templates.

The tokenizers library reads `tokenizer.json` without transformers, an optional dependency that takes long to import.
transformers is imported only for other vocabularies, and for configs that change the meaning of `tokenizer.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from moeserve.errors import CheckpointError, SettingsError, missing_extra
from moeserve.models.checkpoint.tiktoken_file import load_tiktoken

# transformers does not read these vocabularies correctly: it omits the space that a SentencePiece model puts before a
# text, and guesses the split of text for a tiktoken file. tiktoken.model is read by tiktoken_file.py if
# tokenizer_config.json names a known split.
UNREAD_VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "tiktoken.model")
# Files that contain a vocabulary, in order of preference, and files that may accompany them.
VOCABULARY_FILES = ("tokenizer.json", *UNREAD_VOCABULARY_FILES, "tekken.json", "vocab.json", "vocab.txt")
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
UNREAD_TOKENIZER = "unread_tokenizer.txt"  # why the tokenizer of a GGUF file cannot be used
CONFIG_FILE, NAMED_TOKENS_FILE, ADDED_TOKENS_FILE, _ = COMPANION_FILES

# Keys of tokenizer_config.json that change how tokenizer.json is used.
CHANGING_KEYS = ("split_special_tokens", "fast_tokenizer_files", "fix_mistral_regex")
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and its chat templates."""

    path: str  # folder of the tokenizer
    backend: Tokenizer
    special_tokens: Mapping[str, str]  # by the name in chat templates, such as "bos_token"
    chat_templates: Mapping[str, str]  # by name; a single template is "default"
    adds_bos: bool = False  # True: texts begin with bos_token, even if the vocabulary does not add it
    fast: Any = None  # the transformers object with the same tokenizer; None: transformers was not used

    @classmethod
    def from_transformers(cls, fast: Any, *, adds_bos: bool = False) -> LoadedTokenizer:
        """Return a tokenizer made from a fast tokenizer of transformers."""
        backend = fast.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return cls(
            path=fast.name_or_path,
            backend=backend,
            special_tokens=fast.special_tokens_map,
            chat_templates=_templates_by_name(fast.chat_template),
            adds_bos=adds_bos,
            fast=fast,
        )

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token; None if there is no special token of this name."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(folder: str) -> LoadedTokenizer | None:
    """Load the tokenizer of a folder. Return None if the folder has no tokenizer files.

    Raises:
        CheckpointError: there is no such folder, or a tokenizer file is damaged, missing or of an unknown kind.
        SettingsError: the tokenizer requires transformers, which is not installed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"tokenizer {folder!r}: there is no such folder")
    if (unread := root / UNREAD_TOKENIZER).is_file():
        reason = unread.read_text(encoding="utf-8")
        raise CheckpointError(f"{reason}; tokenizer='FOLDER' can name a folder with the model's tokenizer.json")
    found = [name for name in (*VOCABULARY_FILES, *COMPANION_FILES) if os.path.lexists(root / name)]
    if not found:
        return None
    remedy = (
        "add the tokenizer.json of the checkpoint, or of another with the same vocabulary; or remove "
        f"{', '.join(found)} to work with token ids only"
    )
    vocabulary = found[0]
    tiktoken = load_tiktoken(root) if vocabulary == "tiktoken.model" else None
    if tiktoken is None and vocabulary in (*UNREAD_VOCABULARY_FILES, *COMPANION_FILES):
        raise CheckpointError(f"{root} has no tokenizer but {vocabulary}, which moeserve cannot read: {remedy}")
    try:
        if vocabulary == "tokenizer.json" and (loaded := _read_alone(root)) is not None:
            return loaded
        fast = load_with_transformers(folder) if tiktoken is None else tiktoken
        adds_bos = _read(root / CONFIG_FILE).get("add_bos_token") is True
    except SettingsError:
        raise
    except Exception as error:  # a damaged file raises an error of any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{root / vocabulary} cannot be loaded ({reason:.400}): {remedy}") from error
    if not fast.is_fast:
        raise CheckpointError(
            f"{root / vocabulary} gives a tokenizer without a fast version ({type(fast).__name__}): {remedy}"
        )
    return LoadedTokenizer.from_transformers(fast, adds_bos=adds_bos)


def tokenizer_config(folder: str) -> dict[str, Any]:
    """Return tokenizer_config.json of a folder without entries that name files; empty if there is no such file."""
    return {
        name: value
        for name, value in _read(Path(folder) / CONFIG_FILE).items()
        if not name.endswith(("_file", "_files", "name_or_path"))
    }


def load_with_transformers(folder: str) -> Any:
    """Return the tokenizer of a folder as an object of transformers.

    Raises:
        SettingsError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes about half as long to import as torch
    except ImportError as error:
        raise missing_extra(f"reading the tokenizer in {folder} needs transformers", "transformers", error) from None

    # tokenizer.json is complete. The config may name a class of another family, which would change its meaning.
    loader = PreTrainedTokenizerFast if (Path(folder) / "tokenizer.json").is_file() else AutoTokenizer
    return loader.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)


def _read_alone(root: Path) -> LoadedTokenizer | None:
    """Read tokenizer.json. Return None if other files in the folder make transformers change its meaning."""
    config = _read(root / CONFIG_FILE)
    if any(config.get(key) for key in CHANGING_KEYS):
        return None
    backend = Tokenizer.from_file(str(root / "tokenizer.json"))
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
    backend.no_padding()
    backend.no_truncation()
    known = {token.content: (token_id, token) for token_id, token in backend.get_added_tokens_decoder().items()}
    added = config.get("added_tokens_decoder")
    if added is None:
        config |= _read(root / NAMED_TOKENS_FILE)
        ids = _read(root / ADDED_TOKENS_FILE)
        if any(token not in known or known[token][0] != token_id for token, token_id in ids.items()):
            return None
    elif any(known.get(entry["content"], (None, None))[1] != AddedToken(**entry) for entry in added.values()):
        return None
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    special = {
        name: _content(value)
        for name, value in config.items()
        if name.endswith("_token") and not isinstance(value, (bool, type(None)))  # such as add_bos_token
    }
    known_special = {token for token, (_, entry) in known.items() if entry.special}
    if isinstance(others, dict) or not known_special.issuperset([*special.values(), *map(_content, others)]):
        return None
    return LoadedTokenizer(
        path=str(root),
        backend=backend,
        special_tokens=special,
        chat_templates=_read_templates(root, config),
        adds_bos=config.get("add_bos_token") is True,
    )


def _content(token: Any) -> Any:
    """Return the text of a token, which is a string or an object in the config."""
    return token["content"] if isinstance(token, dict) else token


def _read_templates(root: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the chat templates of a folder by name. Templates in files replace those of tokenizer_config.json."""
    files = {path.name.removesuffix(".jinja"): path for path in (root / TEMPLATE_FOLDER).glob("*.jinja")}
    if os.path.lexists(root / TEMPLATE_FILE):
        files["default"] = root / TEMPLATE_FILE
    in_files = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return in_files or _templates_by_name(config.get("chat_template"))


def _templates_by_name(templates: Any) -> Mapping[str, str]:
    """Return templates by name, from any of the forms that tokenizer configs use."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        return {template["name"]: template["template"] for template in templates}
    return templates or {}


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist."""
    if not os.path.lexists(path):  # a dangling link is an error
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
