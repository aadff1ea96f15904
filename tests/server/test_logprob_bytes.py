"""The bytes of tokens beside their log-probabilities. A character may consist of several tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "logprobs": True,
    "top_logprobs": 5,
    "max_tokens": 12,
}


def test_bytes_of_tokens_are_those_of_the_text(tiny_server: RunningServer) -> None:
    """The tokens of the tiny model are bytes."""
    outputs = {"structured_outputs": {"choice": ["\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}!"]}}
    answer = tiny_server.openai().chat.completions.create(**ASKED, extra_body=outputs)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    *positions, end = choice.logprobs.content or ()
    content = (choice.message.content or "").encode()
    assert content.decode() == outputs["structured_outputs"]["choice"][0]
    assert b"".join(bytes(position.bytes or ()) for position in positions) == content
    assert all(len(position.bytes or ()) == 1 for position in positions)
    assert bytes(end.bytes or ()) == b"<|eos|>"


def test_bytes_of_other_vocabularies_are_unknown(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, show_progress=False)
    with running(llm) as server:
        (choice,) = server.openai().chat.completions.create(**ASKED).choices
    llm.shutdown()
    assert choice.logprobs is not None
    assert choice.logprobs.content
    for position in choice.logprobs.content:
        assert all(token.bytes is None for token in (position, *position.top_logprobs))
