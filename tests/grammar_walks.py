"""Random outputs of a grammar, without a model: each token is drawn from those that the grammar allows next."""

from __future__ import annotations

import numpy as np

from moeserve.api.tokenizer import TextCodec
from moeserve.structured_outputs import StructuredOutputsParams
from moeserve.worker.grammars import AllowedTokens, Grammars

# Tokens that soon lead to the end of a JSON text: the first one that is allowed is taken.
ENDING = ('"', "}", "]", ",", ":")
STEPS_BEFORE_ENDING = 12
MAX_STEPS = 300


def ids_of(allowed: AllowedTokens) -> list[int]:
    assert allowed.error is None, allowed.error
    return np.flatnonzero(np.unpackbits(allowed.bits, bitorder="little")).tolist()


def walk(codec: TextCodec, grammars: Grammars, params: StructuredOutputsParams, seed: int) -> str | None:
    """Return the text of a random output. None: it has not ended after `MAX_STEPS` tokens."""
    random, matcher, end_ids = np.random.default_rng(seed), grammars.matcher(params.for_engine()), codec.eos_token_ids
    ending = [ids[-1] for text in ENDING if len(ids := codec.encode(text))]
    output: list[int] = []
    while len(output) < MAX_STEPS:
        allowed = ids_of(matcher.allowed_tokens(output, end_ids))
        assert allowed, codec.decode(output)
        if end_ids[0] in allowed and (len(allowed) == 1 or random.random() < 0.3):
            return codec.decode(output, skip_special_tokens=False)
        token_id = int(random.choice([each for each in allowed if each not in end_ids]))
        if len(output) > STEPS_BEFORE_ENDING:
            token_id = next((each for each in ending if each in allowed), token_id)
        output.append(token_id)
    return None


# Languages in every notation. Each output must match the pattern by Python's `re`.
CHOICES = [
    'say "x"',
    "new\nline",
    "tab\t",
    "emoji 😀",
    "größe",
    "\0",
    "\\",
    "/",
    "a b",
    "",
    "a",
    "ab",
    "(.*)+[x]{3}",
    "${}",
]
PATTERNS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]",
    "names": r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,3}",
    "alternatives": r"(yes|no|maybe), (indeed|never)!?",
    "letters": r"[äöüß€😀]{2,5}",
    "slashes": r"(/[a-z]{1,4}){1,4}/?",
    "anchored": r"^ab?c$",
}
GRAMMARS = {
    "lark": ('start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,5}/', r"<[a-z]{1,5}(,[a-z]{1,5}){0,3}>"),
    "gbnf": ('root ::= "sum: " term ("+" term)?\nterm ::= [0-9] [0-9]', r"sum: [0-9][0-9](\+[0-9][0-9])?"),
    "json inside": ('start: "call " %json {"enum": [1, 2]} " end"', r"call (1|2) end"),
}
SCHEMAS: dict[str, dict[str, object]] = {
    "scalars": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["a", "b", None, 3.5, {"x": [1]}]},
            "ratio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "known": {"type": "boolean"},
        },
        "required": ["name", "age", "kind", "ratio", "known"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {name: {"const": name} for name in "abc"},
        "required": ["b"],
        "patternProperties": {"^x": {"type": "boolean"}},
        "additionalProperties": {"type": "null"},
    },
    "lists": {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
        "minItems": 1,
        "maxItems": 4,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "string", "pattern": "^[a-f]{2}$"}, {}], "items": False},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "null"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    },
    "formats": {"anyOf": [{"type": "string", "format": name} for name in ("date-time", "ipv4", "uuid")]},
    "all of": {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "string"}}}]},
}
