"""Comparison of a model's greedy tokens and their log-probabilities with those of transformers."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.api.llm import LLM
from moeserve.errors import CheckpointError, SettingsError, missing_extra, shown
from moeserve.inputs import TokensPrompt
from moeserve.models.checkpoint.model_files import find_model
from moeserve.outputs import RequestOutput
from moeserve.sampling_params import SamplingParams

# Short prompts of several kinds, and a long prompt for windows, chunks and scaled rotary embeddings.
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "Question: What is 17 + 25?\nAnswer:",
    '{"name": "Anna", "age": 31, "languages": [',
    "SELECT name, count(*) FROM orders",
    "The opposite of hot is",
    ", ".join(map(str, range(1, 250))),
)
NUM_TOKENS = 16
SHOWN_CHARACTERS = 60  # number of characters shown of a prompt
# Settings with which moeserve computes another function than the checkpoint's.
REFUSED_SETTINGS = ("quantization", "hf_overrides", "load_format", "model_impl")


@dataclass(frozen=True)
class Limits:
    """The maximum differences between moeserve and transformers that rounding explains."""

    mean: float  # maximum mean difference of the tokens' log-probabilities, in nats
    single: float  # maximum difference of one token's log-probability, in nats
    share_same: float  # minimum share of tokens that are the most likely tokens in both programs


# In 16 bits, each program rounds its sums in another order, and a token whose router scores are close may then go to
# another expert.
LIMITS = {
    "float32": Limits(mean=3e-4, single=3e-3, share_same=1.0),
    "bfloat16": Limits(mean=0.1, single=3.0, share_same=0.9),
    "float16": Limits(mean=0.1, single=3.0, share_same=0.9),
}


@dataclass(frozen=True)
class TokenComparison:
    """A token that moeserve generated, and what transformers computes after the same tokens."""

    token: int
    logprob: float
    logprob_in_transformers: float  # log-probability of moeserve's token
    best_in_transformers: int  # the most likely token
    best_logprob_in_transformers: float

    @property
    def difference(self) -> float:
        """Difference between the log-probabilities that moeserve and transformers compute for moeserve's token."""
        return abs(self.logprob - self.logprob_in_transformers)

    def is_same(self, limits: Limits) -> bool:
        """Return True if transformers finds no other token more likely by more than rounding explains."""
        lead = self.best_logprob_in_transformers - self.logprob_in_transformers
        return self.token == self.best_in_transformers or lead <= limits.mean


@dataclass(frozen=True)
class PromptComparison:
    """One prompt, and its continuations as texts: moeserve's, and transformers' most likely token at each position."""

    prompt: str
    text: str
    text_of_transformers: str
    tokens: list[TokenComparison]


@dataclass(frozen=True)
class Verification:
    """The comparison of a model with transformers."""

    model: str
    reference: str
    dtype: str
    prompts: list[PromptComparison]

    @property
    def tokens(self) -> list[TokenComparison]:
        return [token for prompt in self.prompts for token in prompt.tokens]

    @property
    def num_same(self) -> int:
        return sum(token.is_same(LIMITS[self.dtype]) for token in self.tokens)

    @property
    def mean_difference(self) -> float:
        return sum(token.difference for token in self.tokens) / len(self.tokens)

    @property
    def largest_difference(self) -> float:
        return max(token.difference for token in self.tokens)

    @property
    def agrees(self) -> bool:
        """True if rounding explains all differences."""
        limits = LIMITS[self.dtype]
        is_near = self.mean_difference <= limits.mean and self.largest_difference <= limits.single
        return is_near and self.num_same >= limits.share_same * len(self.tokens)


def verify(
    settings: Mapping[str, Any],
    *,
    reference: str | None = None,
    num_tokens: int = NUM_TOKENS,
    show_progress: bool = True,
) -> Verification:
    """Compare a model's greedy tokens with those of transformers, for `PROMPTS` or for random tokens.

    moeserve generates the tokens. transformers then computes their log-probabilities in one pass for each prompt. Both
    programs choose the same tokens if and only if each token of moeserve is, in transformers, the most likely token
    after the tokens before it. The models are loaded one after the other.

    Args:
        settings: arguments of `LLM`; the default dtype is float32.
        reference: checkpoint for transformers, a folder or OWNER/NAME in a hub; None: the model itself.
        num_tokens: tokens to generate for each prompt.

    Raises:
        SettingsError: a setting changes what is computed, or transformers is not installed.
        CheckpointError: transformers cannot load the model.
    """
    for name in REFUSED_SETTINGS:
        if settings.get(name) is not None:
            raise SettingsError(
                f"{name}={shown(settings[name])} would change what moeserve computes, so there is nothing to compare; "
                "leave it out"
            )
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise missing_extra("`moeserve verify` needs transformers", "transformers", error) from None
    folder = None if reference is None else find_model(reference).fetch(shows_progress=show_progress)
    with LLM(**{"dtype": "float32", **settings}, show_progress=show_progress) as llm:
        weights, codec = llm.config.weights, llm.codec
        outputs = _generate(llm, num_tokens)
    del llm
    gc.collect()  # free the engine's weights before transformers loads the weights
    folder = folder or Path(weights.model_path)
    prompts = []
    for output, logprobs_LV in zip(outputs, _logprobs(folder, weights.dtype, outputs), strict=True):
        completion = output.outputs[0]
        best_L = logprobs_LV.argmax(-1).tolist()
        tokens = [
            TokenComparison(
                token,
                (completion.logprobs or [])[position][token].logprob,
                float(logprobs_LV[position, token]),
                best,
                float(logprobs_LV[position, best]),
            )
            for position, (token, best) in enumerate(zip(completion.token_ids, best_L, strict=True))
        ]
        prompt, text, text_of_transformers = (
            str(ids) if codec is None else codec.decode(ids, skip_special_tokens=False)
            for ids in (output.prompt_token_ids, completion.token_ids, best_L)
        )
        prompts.append(PromptComparison(prompt, text, text_of_transformers, tokens))
    return Verification(weights.model_path, str(folder), weights.dtype, prompts)


def _generate(llm: LLM, num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    longest = llm.config.schedule.max_model_len - num_tokens
    if llm.codec is not None:
        return llm.generate(PROMPTS, dataclasses.replace(params, truncate_prompt_tokens=longest), use_tqdm=False)
    dice, num_ids = random.Random(0), llm.config.texts.vocab_size
    lengths = [min(longest, length) for length in (*range(2, 20, 2), 300)]
    prompts = [TokensPrompt(prompt_token_ids=dice.choices(range(num_ids), k=length)) for length in lengths]
    return llm.generate(prompts, params, use_tqdm=False)


def load_in_transformers(folder: Path, dtype: str) -> Any:
    """Return transformers' model of a checkpoint, which computes with plain torch.

    Raises:
        Exception: transformers cannot load the checkpoint; reading configs and weights can raise any exception.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    # The faster forms of experts refuse some widths.
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    return kind.from_pretrained(folder, config=config, dtype=getattr(torch, dtype), **plain).eval()


@torch.inference_mode()
def _logprobs(folder: Path, dtype: str, outputs: Sequence[RequestOutput]) -> Iterator[Tensor]:
    """Yield transformers' log-probabilities [generated tokens, vocabulary] for each output.

    Raises:
        CheckpointError: transformers cannot load or run the model.
    """
    try:
        model = load_in_transformers(folder, dtype)
        for output in outputs:
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            logits_LV = model(torch.tensor([ids]), use_cache=False).logits[0]
            yield logits_LV[len(output.prompt_token_ids) - 1 : -1].float().log_softmax(-1)
    except Exception as error:  # any type: reading configs and weights can raise any exception
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"transformers cannot run {folder} ({type(error).__name__}: {first_line}); name the "
            "checkpoint from which it was made, in a form that transformers reads, as the reference"
        ) from error


def as_text(found: Verification) -> str:
    """Return the comparison as a text, with both continuations of each prompt below each other."""
    limits, lines = LIMITS[found.dtype], []
    for number, prompt in enumerate(found.prompts, start=1):
        num_same = sum(token.is_same(limits) for token in prompt.tokens)
        largest = max(token.difference for token in prompt.tokens)
        shown_prompt = (
            prompt.prompt if len(prompt.prompt) <= SHOWN_CHARACTERS else "…" + prompt.prompt[-SHOWN_CHARACTERS:]
        )
        lines += [
            f"{number:2}  {shown_prompt!r}",
            f"    moeserve      {prompt.text!r}",
            f"    transformers  {prompt.text_of_transformers!r}",
            f"    {num_same} of {len(prompt.tokens)} tokens agree, log-probabilities within {largest:.2g}",
        ]
    verdict = "agree" if found.agrees else "DIFFER"
    lines += [
        "",
        f"They {verdict} in {found.dtype}: {found.num_same} of {len(found.tokens)} tokens; "
        f"log-probabilities differ by {found.mean_difference:.2g} on average (rounding explains {limits.mean}), "
        f"and by {found.largest_difference:.2g} at most (rounding explains {limits.single})",
    ]
    return "\n".join(lines)
