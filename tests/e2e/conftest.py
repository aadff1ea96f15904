"""Random tiny Mixtral checkpoints, and what transformers makes of them in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

SHAPES = {
    "plain": dict(num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2),
    # 5 experts top-3, 6 heads with 2 key-value heads, tied embeddings, heads of 20 values where 48 / 6 would be 8
    "odd": dict(
        num_local_experts=5,
        num_experts_per_tok=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        hidden_size=48,
        intermediate_size=37,
        vocab_size=131,
        tie_word_embeddings=True,
    ),
    "window": dict(
        num_local_experts=3,
        num_experts_per_tok=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=36,
        sliding_window=11,
        num_hidden_layers=3,
    ),
    "llama3-rotary": dict(
        num_local_experts=2,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
}


class Reference:
    """A checkpoint on disk and the transformers model that wrote it."""

    def __init__(self, folder: Path, model: MixtralForCausalLM) -> None:
        self.folder = folder
        self.model = model
        self.vocab_size: int = model.config.vocab_size

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What transformers' own greedy search appends to a prompt."""
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, vocab_size] float32"""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, self.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def make_reference(folder: Path, *, seed: int = 0, **shape: object) -> Reference:
    """A random checkpoint whose logits are far enough apart for greedy search to be well defined."""
    torch.manual_seed(seed)
    settings: dict = dict(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=512,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = MixtralForCausalLM(MixtralConfig(**(settings | shape))).eval()
    model.config._experts_implementation = "eager"  # transformers' faster one refuses odd widths
    model.save_pretrained(folder)
    return Reference(folder, model)


@pytest.fixture(scope="session")
def default_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, in which the default model is made once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESERVE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", params=list(SHAPES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Each shape in turn."""
    return make_reference(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One ordinary shape, for what does not depend on shapes."""
    return make_reference(tmp_path_factory.mktemp("plain"), **SHAPES["plain"])
