"""`moeserve upcycle`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moeserve.cli.parser import Parser, add_dtype, add_hub


def add_arguments(command: Parser) -> None:
    command.add_argument(
        "dense", metavar="DENSE", help="a GGUF file, a folder with safetensors, or OWNER/NAME in a hub"
    )
    command.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    command.add_argument("--experts", type=int, default=4, help="experts of each layer (default: 4)")
    command.add_argument("--top-k", type=int, help="experts per token (default: 2; in split mode, all of them)")
    command.add_argument(
        "--mode",
        choices=["replicate", "split"],
        default="replicate",
        help="replicate: each expert is a copy of the dense network, behind a random router; "
        "split: the neurons of the network are divided among the experts, all of which are used (default: replicate)",
    )
    add_dtype(command, "number format to write; auto: the dense checkpoint's, float32 for GGUF")
    add_hub(command)
    command.add_argument("--seed", type=int, default=0, help="seed of the random router (default: 0)")


def run(options: argparse.Namespace) -> None:
    from moeserve.models.checkpoint.upcycle import upcycle

    upcycle(
        options.dense,
        options.out,
        num_experts=options.experts,
        top_k=options.top_k,
        mode=options.mode,
        dtype=options.dtype,
        seed=options.seed,
        revision=options.revision,
        download_dir=options.download_dir,
    )
    print(options.out)
