"""Starts the processes of a replica's worker ranks. Brings no torch, so that they start before it is imported here."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.config.environment import environment_of_rank
from moeserve.machine import usable_cores
from moeserve.processes import Child
from moeserve.worker.protocol import RankStart, rank_name


def start_workers(driver: RankStart) -> list[Child[Any]]:
    """One process for each rank of the driver's replica but the driver's own. They send nothing but last words."""
    config = driver.config
    environment = environment_of_rank(config, usable_cores())
    return [
        Child(
            "moeserve.worker",
            rank_name(config, rank),
            msgspec.structs.replace(driver, rank=rank),
            None,
            environment=environment,
        )
        for rank in range(driver.rank + 1, driver.rank + config.tensor_parallel_size)
    ]
