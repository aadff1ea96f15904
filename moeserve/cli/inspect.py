"""`moeserve inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from moeserve.cli.parser import Parser, add_dtype, add_kv_cache_dtype, add_model, add_overrides, add_stages, files_of


def add_arguments(command: Parser) -> None:
    add_model(command)
    add_dtype(command, "number format that memory is counted for; auto: the checkpoint's")
    add_kv_cache_dtype(command)
    add_stages(command)
    add_overrides(command)
    command.add_argument("--json", action="store_true", help="print JSON, with bytes as numbers")


def run(options: argparse.Namespace) -> None:
    from moeserve.models import inspection

    files = files_of(options)
    found = inspection.inspect(
        files.describe(with_headers=True),
        None if options.dtype == "auto" else options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        num_stages=options.pipeline_parallel_size,
        pipeline_layers=options.pipeline_layers,
        hf_overrides=options.hf_overrides,
    )
    found = dataclasses.replace(found, model=options.model, is_here=files.are_here)
    print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else inspection.as_text(found))
