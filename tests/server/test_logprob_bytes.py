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


def test_bytes_of_other_vocabularies(tmp_path: Path) -> None:
    """A token such as <0xC3> is one byte, and may be a part of a character."""
    folder = save_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary |= {"<0xC3>": vocabulary.pop(first), "<0xA9>": vocabulary.pop(second)}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, show_progress=False)
    ids = [vocabulary["<0xC3>"], vocabulary["<0xA9>"]]
    bias = {"logit_bias": {str(token_id): 100.0 for token_id in ids}}
    with running(llm) as server:
        (choice,) = server.openai().chat.completions.create(**ASKED, **bias).choices
    llm.shutdown()
    assert choice.logprobs is not None
    assert choice.logprobs.content
    for position in choice.logprobs.content:
        assert bytes(position.bytes or ()) in (b"\xc3", b"\xa9")


def test_offsets_are_those_of_the_text(tiny_server: RunningServer) -> None:
    """Each token of the tiny model is a byte. Those of one character have its place."""
    outputs = {"structured_outputs": {"choice": ["\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}!"]}}
    for stream in (False, True):
        answer = tiny_server.openai().completions.create(
            model=MODEL, prompt="Hi", echo=True, logprobs=1, max_tokens=12, stream=stream, extra_body=outputs
        )
        chunks: list[Any] = list(answer) if stream else [answer]
        places = [each for chunk in chunks for each in chunk.choices[0].logprobs.text_offset]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == "Hi" + outputs["structured_outputs"]["choice"][0]
        assert places[:9] == [0, 1, 2, 2, 2, 2, 3, 3, 4]
