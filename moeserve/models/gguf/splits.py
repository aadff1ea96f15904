"""Splits of text into words, by the name in `tokenizer.ggml.pre`, for the byte-level vocabularies of GGUF files.

Converters write a name instead of the patterns of a split. The patterns here come from the tokenizers with which the
models were published. Some splits apply several patterns in turn. The names are those of llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from moeserve.models.checkpoint.tiktoken_file import MOONSHOT_SPLIT


@dataclass(frozen=True)
class Split:
    """The normalisation and splitting of text before a byte-level vocabulary merges tokens."""

    patterns: tuple[str, ...]  # applied one after the other
    ignore_merges: bool = False  # a word in the vocabulary is one token, even if merges would split it
    adds_bos: bool = False  # default if the file does not say it
    normalizer: normalizers.Normalizer | None = None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the splits, followed by the conversion of bytes to characters."""
        # These vocabularies have separate tokens for words after a space, so no space is put before the first word.
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"  # punctuation and spaces
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# OpenAI's split cl100k_base, which Llama 3 uses, and variants with single digits.
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}"
_QWEN35 = (  # combining marks belong to words
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# OpenAI's split o200k_base divides words between lower and upper case; Mistral's Tekken likewise, without contractions.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS_BY_CASE = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_OTHERS_BY_CASE = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = "|".join([*(f"{word}{_CONTRACTION}?" for word in _WORDS_BY_CASE), r"\p{N}{1,3}", _OTHERS_BY_CASE])
_TEKKEN = "|".join([*_WORDS_BY_CASE, r"\p{N}", _OTHERS_BY_CASE])
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _CJK,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
# The split for files from before converters wrote names.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

SPLITS = {
    name: split
    for names, split in (
        ("llama-bpe llama-v3 llama3 lfm2 pixtral falcon3 falcon-h1", Split((_CL100K,), True, adds_bos=True)),
        ("glm4 chatglm-bpe dbrx smaug-bpe", Split((_CL100K,))),
        ("qwen2", Split((_QWEN2,), normalizer=normalizers.NFC())),
        ("qwen35", Split((_QWEN35,), normalizer=normalizers.NFC())),
        ("stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 solar-open", Split((_QWEN2,))),
        ("gpt-4o llama4 kanana2 minimax-m2", Split((_O200K,))),
        ("tekken", Split((_TEKKEN,), True, adds_bos=True)),
        ("deepseek-v3 hunyuan-dense joyai-llm", Split(_DEEPSEEK_V3, adds_bos=True)),
        ("deepseek-llm", Split(_DEEPSEEK_LLM, adds_bos=True)),
        ("deepseek-coder", Split(_DEEPSEEK_CODER, adds_bos=True)),
        ("kimi-k2", Split((MOONSHOT_SPLIT,))),
        ("bailingmoe bailingmoe2 llada-moe", Split((_BAILING,))),
        ("seed-coder", Split((_SEED,))),
        ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat", Split((_GPT2,))),
        ("command-r", Split((r"\p{N}", _GPT2), normalizer=normalizers.NFC())),
        ("smollm refact starcoder codeshell exaone minerva-7b", Split((r"\p{N}", _GPT2))),
        ("default", Split(_DEFAULT)),
    )
    for name in names.split()
}
