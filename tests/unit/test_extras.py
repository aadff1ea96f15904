"""Without the packages of the extras, everything else works, and an error names the extra that is missing."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_text import byte_level_tokenizer

from moeserve import LLM, SettingsError, StructuredOutputsParams
from moeserve.api.startup import tokenizer_of
from moeserve.api.tokenizer import TextCodec
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.worker.grammars import Grammars

# test_metrics.py, test_load_view.py, test_launch.py and test_default_model.py check further extras.
NEEDS_TRANSFORMERS = r"needs transformers .*pip install 'moeserve\[transformers\]'"


@pytest.fixture(autouse=True)
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "transformers",
        "ray",
        "llguidance",
        "moeserve.executor.ray.cluster",
    ):  # the last one may be imported already
        monkeypatch.setitem(sys.modules, name, None)


def write_tokenizer_json(folder: Path) -> None:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))


def write_vocabulary(folder: Path) -> None:
    """Write the older files of a byte-level vocabulary."""
    model = json.loads(byte_level_tokenizer().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def write_tiktoken(folder: Path) -> None:
    tokens = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (folder / "tiktoken.model").write_text("".join(tokens))
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_config_that_adds_a_token(folder: Path) -> None:
    write_tokenizer_json(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<new>"}))


def test_a_complete_tokenizer_json_is_read(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    codec = TextCodec.load(str(tmp_path))
    assert codec is not None
    assert codec.decode(codec.encode("a text")) == "a text"
    with pytest.raises(SettingsError, match=NEEDS_TRANSFORMERS):
        tokenizer_of(codec)


@pytest.mark.parametrize("write", [write_vocabulary, write_tiktoken, write_config_that_adds_a_token])
def test_other_tokenizers_need_transformers(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    with pytest.raises(SettingsError, match=NEEDS_TRANSFORMERS):
        TextCodec.load(str(tmp_path))


def test_checkpoints_of_benchmarks_need_transformers(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"pip install 'moeserve\[transformers\]'"):
        make_checkpoint("mixtral-mini", tmp_path / "checkpoint")


def test_the_ray_executor_needs_ray() -> None:
    with pytest.raises(SettingsError, match=r"executor='ray' needs Ray .*pip install 'moeserve\[ray\]'"):
        LLM(executor="ray")


def test_structured_outputs_need_llguidance(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    params = StructuredOutputsParams(choice=["yes", "no"])
    with pytest.raises(SettingsError, match=r"need llguidance .*pip install 'moeserve\[structured\]'"):
        Grammars(str(tmp_path), 400).check(params.for_engine())
