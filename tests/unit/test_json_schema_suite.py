"""The JSON-Schema-Test-Suite: a schema is refused by name, or enforced in full."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import json_schema_suite
import jsonschema
import pytest
from grammar_walks import walk
from test_text import byte_level_tokenizer, save

from moeserve.api.tokenizer import TextCodec
from moeserve.errors import RequestError
from moeserve.structured_outputs import StructuredOutputsParams
from moeserve.worker.grammars import Grammars

NUM_SCHEMAS, LEAST_ACCEPTED = 368, 160  # llguidance 1.9.1 accepts 164
LEAST_VALID_ACCEPTED = 0.9  # instances with another order of properties than the schema's are not generated
SEEDS = range(3)


def test_accepted_schemas_are_enforced_in_full(tmp_path: Path) -> None:
    """No instance that the suite calls invalid can be generated, and every random output is valid."""
    if not json_schema_suite.FOLDER.is_dir():
        pytest.skip("the suite is not here; get it with `make schema-suite`")
    folder = save(byte_level_tokenizer(), tmp_path)
    codec = TextCodec.load(folder)
    assert codec is not None
    grammars, counts = Grammars(folder, codec.num_tokens), Counter[str]()
    for group in json_schema_suite.groups():
        counts["schemas"] += 1
        name = f"{group.file}: {group.description}"
        params = StructuredOutputsParams(json=json.dumps(group.schema))
        try:
            grammars.check(params.for_engine())
        except RequestError:
            continue
        counts["accepted"] += 1
        for test in group.tests:
            output = codec.encode(json.dumps(test["data"], ensure_ascii=False))
            allowed = grammars.matcher(params.for_engine()).allowed_tokens(output, codec.eos_token_ids)
            eos = codec.eos_token_ids[0]
            is_possible = allowed.error is None and bool(allowed.bits[eos // 8] >> eos % 8 & 1)
            assert test["valid"] or not is_possible, f"{name}: {test['description']}"
            if test["valid"]:
                counts["possible" if is_possible else "not possible"] += 1
        validator = jsonschema.Draft202012Validator(group.schema)
        for seed in SEEDS:
            text = walk(codec, grammars, params, seed)
            counts["ended" if text is not None else "endless"] += 1
            if text is not None:
                validator.validate(json.loads(text))
    assert counts["schemas"] == NUM_SCHEMAS
    assert counts["accepted"] >= LEAST_ACCEPTED, counts
    assert counts["ended"] > 0.95 * counts["accepted"] * len(SEEDS), counts
    assert counts["possible"] > LEAST_VALID_ACCEPTED * (counts["possible"] + counts["not possible"]), counts
