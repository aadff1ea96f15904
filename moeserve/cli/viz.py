"""`moeserve viz`: shows recorded expert loads as a table or a picture, and forecasts them for another placement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.cli.parser import Parser, reader
from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.eplb import eplb, rank_loads
from moeserve.telemetry.expert_load import LoadWindow, read_windows, summed
from moeserve.telemetry.load_table import as_text


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
    print(show(options.loads, png_path=options.png, num_redundant=options.num_redundant_experts))


def show(path: Path, *, png_path: Path | None = None, num_redundant: int | None = None) -> str:
    """Return a file's records as a table, or save them as a picture and return its path.

    Args:
        path: file written by `write_window`.
        png_path: file to write the picture to; None: no picture.
        num_redundant: also show the rank loads under a placement made from these loads, with this many redundant
            experts; None: not shown.

    Raises:
        SettingsError: a file cannot be read or written, matplotlib is missing, or the number of slots is impossible.
    """
    from moeserve.telemetry.load_image import load_figure

    windows = read_windows(path)
    planned = None if num_redundant is None else plan(summed(windows), num_redundant)
    if png_path is None:
        return as_text(windows, planned)
    try:
        load_figure(windows, planned).savefig(png_path, format="png", dpi=120)
    except OSError as error:
        raise SettingsError(f"cannot write {png_path}: {error.strerror}") from None
    return str(png_path)


def plan(total: LoadWindow, num_redundant: int) -> tuple[tuple[float, ...], ...]:
    """Return the tokens of each rank, [layer][rank], that a placement made from these loads would give."""
    num_slots = total.num_experts + num_redundant
    return tuple(rank_loads(loads, eplb(loads, total.num_ranks, num_slots)) for loads in total.tokens_of_expert)
