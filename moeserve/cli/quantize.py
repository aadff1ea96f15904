"""`moeserve quantize`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moeserve.cli.parser import Parser, add_hub


def add_arguments(command: Parser) -> None:
    command.add_argument("model", metavar="MODEL", help="checkpoint folder, or OWNER/NAME in a hub")
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to create")
    command.add_argument(
        "--text", type=Path, metavar="FILE", help="text like those of later requests (default: the model writes it)"
    )
    command.add_argument("--tokens", type=int, default=32_768, help="tokens of the text (default: 32768)")
    add_hub(command)


def run(options: argparse.Namespace) -> None:
    from moeserve.api.quantize import quantize

    quantize(
        options.model,
        options.out,
        text=options.text,
        num_tokens=options.tokens,
        revision=options.revision,
        download_dir=options.download_dir,
    )
    print(options.out)
