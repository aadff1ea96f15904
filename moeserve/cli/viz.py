"""`moeserve viz`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.cli.parser import Parser, reader


def add_arguments(command: Parser) -> None:
    command.add_argument("loads", type=Path, metavar="LOADS", help="file that was written as expert_load_file")
    command.add_argument(
        "--png", type=Path, metavar="FILE", help="write a picture of experts and ranks by layer, and of ranks over time"
    )
    command.add_argument(
        "--num-redundant-experts",
        type=reader(Annotated[int, msgspec.Meta(ge=0, le=2**20)]),
        metavar="EXPERTS",
        help="also show the balance of ranks under a placement made from these loads, with this many redundant experts "
        "in each layer",
    )


def run(options: argparse.Namespace) -> None:
    from moeserve.planner import views

    num_redundant = options.num_redundant_experts
    print(views.show(options.loads, png_path=options.png, num_redundant=num_redundant))
