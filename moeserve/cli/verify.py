"""`moeserve verify`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from moeserve.cli.parser import Parser, add_engine_flags, engine_settings, reader
from moeserve.config.settings import PositiveInt

DIFFERS = 3  # exit status if the model's results are not those of transformers


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve verify [MODEL] [flags]"
    command.add_argument(
        "--reference",
        metavar="MODEL",
        help="checkpoint for transformers, if it cannot read MODEL: the one from which a GGUF file was made",
    )
    command.add_argument(
        "--tokens", type=reader(PositiveInt), default=16, help="tokens to generate for each prompt (default: 16)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(command)


def run(options: argparse.Namespace) -> int:
    from moeserve.api import verification  # imports torch

    found = verification.verify(engine_settings(options), reference=options.reference, num_tokens=options.tokens)
    shown = dataclasses.asdict(found) | {"agrees": found.agrees}
    print(json.dumps(shown, indent=2) if options.json else verification.as_text(found))
    return 0 if found.agrees else DIFFERS
