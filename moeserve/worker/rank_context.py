"""`RankContext`: the constants of a rank's steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from moeserve.config.settings import LogprobsMode
from moeserve.distributed.mesh import Mesh
from moeserve.kv.rules import CacheRules
from moeserve.step_inputs import GroupTable, StateRows, StepInputs
from moeserve.worker.overlap import OverlapLimits


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The constants of a rank's steps."""

    mesh: Mesh
    tp_rank: int  # tp rank in its replica
    max_blocks: int  # maximum number of blocks of one request
    device: torch.device
    overlap: OverlapLimits = OverlapLimits()
    rules: CacheRules = CacheRules()  # rules of the model's cache groups
    logprobs_mode: LogprobsMode = "raw_logprobs"

    def with_all_groups(self, step: StepInputs) -> StepInputs:
        """Add tables and state rows of the other cache groups, which write nothing, to a step of the first group.

        Tables are as large as those of the first group.
        """
        num_tokens, (num_chunks, max_blocks) = len(step.token_ids), step.block_table.shape
        return dataclasses.replace(
            step,
            other_tables=tuple(
                GroupTable.none(num_tokens, num_chunks, max_blocks, self.device) for _ in self.rules.tables[1:]
            ),
            states=StateRows.none(num_chunks, self.device) if self.rules.rows else None,
        )
