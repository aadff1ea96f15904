"""The weight mapping: a table of checkpoint tensor names and their destinations in one rank's model.

Each network yields its own rows of the table. The destination None marks a tensor that only other ranks need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moeserve.layers.rows import At, Destination, Row, some_rows, whole
from moeserve.models.checkpoint.loading import Destinations
from moeserve.models.decoder import Decoder

# Tensors that only the first or the last pipeline stage needs.
OF_ENDS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
OTHERS_OF_LAST = ["model.norm.", "lm_head."]  # prefixes of the last stage's other tensors


def destinations(model: Decoder, norm_offset: float, stored: Mapping[str, tuple[int, ...]]) -> Destinations:
    """Return the destinations of a checkpoint's tensors.

    Args:
        norm_offset: added to the stored weights of norms.
        stored: shapes of all tensors, by their translated names.
    """
    into: dict[str, list[Destination]] = {}
    ignored: set[str] = set()
    for name, place in _rows_of(model, norm_offset, stored):
        if place is None:
            ignored.add(name)
        else:
            into.setdefault(name, []).append(place)
    # Skip layers of other pipeline stages, and MTP modules that are not used for speculative decoding. From MTP modules
    # that are used, skip the copies of the embedding and the head.
    config, num_used = model.config, len(model.draft_modules)
    num_modules = max(1, config.num_skipped_layers, 0 if config.draft is None else len(config.draft.layers))
    skipped = [f"model.layers.{number}." for number in range(config.num_decoder_layers) if number not in model.stage]
    skipped += [f"draft.{number}." + "copy." * (number < num_used) for number in range(num_modules)]
    ignored |= OF_ENDS - into.keys()
    if model.last is None:
        skipped += OTHERS_OF_LAST

    def is_ignored(name: str) -> bool:
        return name in ignored or name.startswith(tuple(skipped))

    return Destinations(into, is_ignored, tuple(model.rotaries.frequencies))


def _rows_of(model: Decoder, norm_offset: float, stored: Mapping[str, tuple[int, ...]]) -> Iterator[Row]:
    at = At("model", stored, norm_offset)
    embedding, head, vocab_size = model.embedding, model.head, model.config.vocab_size

    def num_tokens(name: str) -> int:
        return vocab_size if model.config.num_stored_tokens is None else stored[name][0]

    if embedding is not None:
        name = at("embed_tokens.weight")
        yield name, some_rows(embedding.weight, embedding.share, num_tokens(name))
    if model.last is not None:
        yield from model.last.rows(at, "norm", "")
    for log_factors_F in model.rotaries.learned_factors:
        yield at("rotary_emb.alpha"), whole(log_factors_F)
    if head is not None and not head.weights.is_borrowed:
        name = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
        yield name, some_rows(head.weight, head.share, num_tokens(name), head.weights)
    if head is not None and head.bias is not None:
        yield "lm_head.bias", some_rows(head.bias, head.share, vocab_size)
    for number, module in enumerate(model.draft_modules):
        yield from module.rows(At(f"draft.{number}", stored, norm_offset))
    for block in model.blocks:
        prefix = f"model.layers.{block.layer}" if block.module is None else f"draft.{block.module}.layer"
        yield from block.rows(At(prefix, stored, norm_offset))
