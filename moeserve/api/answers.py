"""The parser of a model's answers, and the sampling parameters that this parser needs."""

from __future__ import annotations

from pathlib import Path

from moeserve.api.tokenizer import TextCodec
from moeserve.models.config_values import read_json
from moeserve.parsers.families import ParserFamily, find_parser
from moeserve.sampling_params import SamplingParams


def find_family(name: str | None, model_path: str, chat_template: str | None) -> ParserFamily:
    """Return the parsers of answers with this name; without a name, the parsers of the checkpoint's family.

    Raises:
        SettingsError: no parser has this name.
    """
    model_type = str(read_json(Path(model_path) / "config.json").get("model_type", ""))
    return find_parser(name, model_type=model_type, chat_template=chat_template)


def readable_params(params: SamplingParams, family: ParserFamily, codec: TextCodec) -> SamplingParams:
    """Return a copy of parameters that keeps special tokens and has stop tokens as the parser of answers needs them."""
    params = params.copy()
    params.skip_special_tokens = params.skip_special_tokens and not family.keeps_special_tokens
    known = [codec.id_of_token(token) for token in family.stop_tokens]
    params.stop_token_ids = [*params.stop_token_ids, *(token_id for token_id in known if token_id is not None)]
    return params
