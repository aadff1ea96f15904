"""moeserve's server with a model that does what its user writes, so that agents and libraries receive tool calls.

    scripted_server.py FOLDER

For each `[call NAME {...}]` in the user's message, an answer has this call, if a tool of this name is offered. The
answer after the last result repeats that result. For `[answer {...}]`, the answer is this JSON. The first token of a
conversation takes more than a second. FOLDER receives a checkpoint of random weights with the default model's
tokenizer; its engine is started but generates nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import transformers

from moeserve import AsyncLLM
from moeserve.api.default_model import default_model
from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.run import serve
from moeserve.server.settings import ServerSettings

SECONDS_TO_FIRST_TOKEN = 1.2  # a server sends the headers of a stream after a second
MAX_MODEL_LEN = 200_000  # agents send tens of thousands of tokens
REQUEST = re.compile(r"\[(?:call (\S+)|answer) (\{.*?\})\]", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
REASONING = "<think>\nI do what the user wrote.\n</think>\n\n"
TEMPLATE = """
{%- if tools %}{{ "<|im_start|>system\n# Tools\n" ~ (tools | tojson) ~ "<|im_end|>\n" }}{% endif %}
{%- for message in messages %}
    {{- "<|im_start|>" ~ message.role ~ "\n" }}
    {%- if message.reasoning_content %}{{ "<think>\n" ~ message.reasoning_content ~ "\n</think>\n" }}{% endif %}
    {%- if message.role == "tool" %}{{ "<tool_response>\n" ~ message.content ~ "\n</tool_response>" }}
    {%- else %}{{ message.content if message.content is string }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- "\n<tool_call>\n" ~ (call.function | tojson) ~ "\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""


def save_model(folder: Path) -> Path:
    """Save a tiny checkpoint with the default model's tokenizer and a template that renders everything."""
    config = transformers.MixtralConfig(
        vocab_size=49_152, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    source = default_model()
    shutil.copy(source / "tokenizer.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def answer_to(prompt: str) -> str:
    """Return what the model answers."""
    requests = list(REQUEST.finditer(prompt))
    results = RESULT.findall(prompt, requests[0].start() if requests else len(prompt))
    if len(results) >= len(requests):
        return f"The tool returned: {results[-1]}" if results else "Hello."
    name, text = requests[len(results)].groups()
    if name is None:
        return str(text)
    if f'"name": "{name}"' not in prompt:
        return "Hello."  # to a request without tools, in which an agent asks for a title, for example
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


async def generate(llm: AsyncLLM, prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[RequestOutput]:
    """Yield the answer token by token, as `AsyncLLM.generate` does."""
    codec = llm.codec
    assert codec is not None
    token_ids = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else codec.encode(prompt["prompt"])
    text = codec.decode(token_ids, skip_special_tokens=False)
    if not RESULT.search(text):
        await asyncio.sleep(SECONDS_TO_FIRST_TOKEN)
    answer = answer_to(text)
    if params.structured_outputs is None:
        answer = REASONING + answer
    *tokens, last = codec.encode(answer, add_special_tokens=False)
    detokenizer = codec.detokenizer(skip_special_tokens=params.skip_special_tokens)
    for token in tokens:
        yield RequestOutput("", None, token_ids, [CompletionOutput(0, detokenizer.feed(token), [token])], False)
    text = detokenizer.feed(last) + detokenizer.finish()
    yield RequestOutput("", None, token_ids, [CompletionOutput(0, text, [last], finish_reason="stop")], True)


if __name__ == "__main__":
    AsyncLLM.generate = generate  # type: ignore[assignment, method-assign]
    settings = ServerSettings(port=0, answer_parser="hermes", served_model_name=["scripted"])
    serve(settings, {"model": str(save_model(Path(sys.argv[1]))), "dtype": "float32", "kv_cache_memory": "64MiB"})
