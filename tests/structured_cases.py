"""A random model with a tokenizer, and requests with structured outputs whose results are easy to check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from moeserve import LLM, SamplingParams, StructuredOutputsParams
from moeserve.bench.checkpoints import small_mixtral_config
from moeserve.outputs import CompletionOutput

VOCABULARY = 384  # rows of the model's head, some of them without a token
MAX_TOKENS = 160
# Each has a bounded number of bytes, so that any model comes to the end.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None, {"x": [1]}]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PATTERN = "[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,3}"
CHOICES = ["yes", "no", "perhaps", "größe"]
GRAMMAR = 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,5}/'
STRUCTURED: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=PATTERN),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
}
PROMPTS = ["The house", "Größe: ", "one two three four five six seven eight nine ten " * 2, "x"]


def write_model(folder: Path) -> str:
    """Write a checkpoint with random weights and a byte-level tokenizer, and return its folder."""
    config = small_mixtral_config(hidden_size=64, expert_size=32, num_layers=2, num_experts=4, vocab_size=VOCABULARY)
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": 0.2}))
    torch.manual_seed(0)
    config_object = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config_object, dtype=torch.float32).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 20, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the house of the three words is the largest of the ten houses"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return str(folder)


def small_llm(folder: str, **settings: Any) -> LLM:
    """Return an engine with the model, in float32: its results are the same in every layout."""
    return LLM(folder, **{"dtype": "float32", "max_model_len": 256, "num_threads": 1} | settings)


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Return prompts and parameters: each notation greedily and sampled, and requests without any between them."""
    prompts, params = [], []
    for index, structured_outputs in enumerate([None, *STRUCTURED.values()] * 3):
        prompts.append(PROMPTS[index % len(PROMPTS)])
        params.append(
            SamplingParams(
                temperature=(0.0, 0.8, 1.5)[index % 3],
                seed=index,
                max_tokens=30 if structured_outputs is None else MAX_TOKENS,
                repetition_penalty=1.2 if index % 4 == 1 else 1.0,
                logprobs=2 if index % 2 else None,
                structured_outputs=structured_outputs,
            )
        )
    return prompts, params


def result(output: CompletionOutput) -> tuple[Any, ...]:
    """Return all that must not depend on what runs beside a request."""
    return output.text, output.token_ids, output.logprobs, output.finish_reason, output.stop_reason


def check(output: CompletionOutput, structured_outputs: StructuredOutputsParams | None) -> None:
    """Assert that an output is complete and belongs to its language, by libraries other than the engine's."""
    if structured_outputs is None:
        return
    assert output.finish_reason == "stop", output
    if structured_outputs.json is not None:
        jsonschema.validate(json.loads(output.text), SCHEMA)
    elif structured_outputs.choice is not None:
        assert output.text in CHOICES
    else:
        pattern = PATTERN if structured_outputs.regex is not None else "<[a-z]{1,5}(,[a-z]{1,5}){0,3}>"
        assert re.fullmatch(pattern, output.text), output.text
