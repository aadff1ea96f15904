"""A tiny random model with a tokenizer and a chat template, for tests that need many requests and no sense."""

from __future__ import annotations

import json
from pathlib import Path

from reference_models import SHAPES, Shape, make_reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}"
    "{{ message['tool_calls'] | tojson if message['tool_calls'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}{% if begins_reasoning %}<think>{% endif %}"
)


def save_tiny_model(folder: Path, max_position_embeddings: int = 4096) -> Path:
    """Save a checkpoint whose vocabulary is all bytes, three special tokens, and the marks of reasoning."""
    make_reference(
        folder,
        Shape(
            "Mixtral",
            SHAPES["mixtral"].settings | dict(vocab_size=264, max_position_embeddings=max_position_embeddings),
            seed=5,
        ),
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])  # not special, as in published tokenizers
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
