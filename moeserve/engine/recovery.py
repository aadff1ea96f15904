"""`Recovery`: failed ranks are replaced, and all others keep their processes and weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from moeserve.config.engine_config import EngineConfig
from moeserve.controls import WeightState
from moeserve.engine.generation import Generation
from moeserve.engine.hang_watch import Finding
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.leaving_out import without_others
from moeserve.engine.protocol import Recover, ReplicaFaulted
from moeserve.errors import EngineError, MoeserveError
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.failures import FailureReport, as_error, root_cause
from moeserve.processes.supervision import SECONDS_TO_COLLECT, end_all, wait_for_messages

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# Seconds for ranks to leave their step, and for new ranks to start. Ranks that take longer are replaced too.
SECONDS_TO_LEAVE = 10.0
SECONDS_BETWEEN_LOOKS = 0.05


class Recovery:
    """The recovery of a generation that serves.

    Each recovery begins an epoch, in which messages of earlier epochs are dropped.

    1. Replicas in which a rank has failed, or has left its step because another rank failed, send `ReplicaFaulted`.
    2. Failed engine processes are started again. All other engine processes receive `Recover`: they kill their failed
       ranks, start new ranks, and let all other ranks close their connections, so that every rank leaves its step.
    3. All ranks meet at a new store. New ranks load the model meanwhile.
    4. Each replica sends `Ready` without requests, and the engine sends all requests again with their tokens.

    A failure during 2 to 4 begins again at 2: the store is closed, so ranks that wait there fail.
    """

    def __init__(self, generation: Generation) -> None:
        self.is_prepared = False  # `prepare` has succeeded, and `run` was not called
        self._generation = generation
        self._finding: Finding | None = None

    def collect_failures(self) -> list[FailureReport]:
        """Return the failures that are known shortly after the first failure."""
        generation, deadline = self._generation, time.monotonic() + SECONDS_TO_COLLECT
        group = generation.group
        if not generation.faults:
            return group.collect_failures()
        while True:
            reports = [*(report for member in group.members for report in member.failures()), *generation.faults]
            left_s = deadline - time.monotonic()
            if left_s <= 0 or any(not report.is_consequence for report in reports):
                return reports
            wait_for_messages(group.members, left_s)
            for index, replica in enumerate(group.replicas):  # tokens that were not received are computed again
                for message in replica.receive():
                    if isinstance(message, ReplicaFaulted):
                        generation.note_fault(index, message)

    def prepare(self, finding: Finding | None, weights: WeightState) -> bool:
        """Return True if failed ranks can be replaced. If replacement is impossible although `on_failure` requires it,
        log why.

        Args:
            finding: processes to replace although they run; None: there are none.
            weights: the weights with which the engine serves.
        """
        generation = self._generation
        if not generation.config.recovers_in_place:
            return False
        reason = reason_to_restart(generation.config, generation.group, has_own_weights=weights != WeightState())
        if reason:
            logger.warning("all ranks are started again, because %s", reason)
            return False
        self._finding, self.is_prepared = finding, True
        return True

    def run(self, is_cancelled: Callable[[], bool]) -> bool:
        """Replace the failed processes. Return False if that is not possible; then no process is left."""
        if not self.is_prepared:
            return False
        self.is_prepared = False
        began_s = time.monotonic()
        try:
            with interrupts_allowed():
                self._replace_until_ready(is_cancelled)
        except (MoeserveError, OSError) as error:
            logger.warning("all ranks are started again, because failed ones could not be replaced: %s", error)
            self._generation.end()
            return False
        except BaseException:
            self._generation.end()
            raise
        seconds = time.monotonic() - began_s
        logger.info("failed ranks were replaced in %.1f s; the others have kept their weights", seconds)
        return True

    def _replace_until_ready(self, is_cancelled: Callable[[], bool]) -> None:
        """Replace failed processes, and processes that fail meanwhile, until all replicas can serve.

        With on_failure="shrink", or if processes cannot be replaced, replicas that have lost ranks are left out
        instead.

        Raises:
            EngineError: too many processes fail, or the wait was cancelled.
            MoeserveError: a rank cannot load the weights that it needs.
        """
        finding, num_attempts = self._finding, 0
        leaves_out = self._generation.config.failure.on_failure == "shrink"
        while True:
            try:
                self._begin(() if finding is None else finding.guilty, leaves_out=leaves_out)
            except (EngineError, OSError) as error:  # the system starts no process, or no replica can be left out
                if leaves_out:
                    raise
                finding, cause, num_attempts = None, str(error), MAX_ATTEMPTS
            else:
                finding, report = self._wait(is_cancelled)
                if report is None:
                    return
                cause, failure = str(report), as_error(report, "while failed ranks were replaced")
                num_attempts = MAX_ATTEMPTS if isinstance(failure, ValueError) else num_attempts + 1
                if num_attempts == MAX_ATTEMPTS and leaves_out:
                    raise failure
            if num_attempts < MAX_ATTEMPTS:
                logger.warning("further ranks are replaced: %s", cause)
            else:  # another attempt would fail in the same way
                logger.warning("failed ranks cannot be replaced: %s", cause)
                leaves_out, num_attempts = True, 0

    def _wait(self, is_cancelled: Callable[[], bool]) -> tuple[Finding | None, FailureReport | None]:
        """Wait until all replicas can serve. If they cannot, return the hung processes, if any, and the failure.

        Raises:
            EngineError: the wait was cancelled, or loading takes too long.
        """
        generation = self._generation
        while not generation.take_ready():
            finding = self._find_hung()
            if finding or generation.faults or generation.group.has_failed:
                reports = [finding.report] if finding else generation.group.collect_failures() + generation.faults
                return finding, root_cause(reports)
            if is_cancelled():
                raise EngineError("the engine was shut down while it recovered")
            wait_for_messages(generation.group.members, SECONDS_BETWEEN_LOOKS)
        return None, None

    def _begin(self, guilty: Sequence[int], *, leaves_out: bool) -> None:
        """Begin an epoch in which new processes replace processes that have ended or are `guilty`.

        Args:
            leaves_out: begin the epoch without the replicas that have lost processes.

        Raises:
            EngineError: a process cannot be started, or the other replicas cannot serve alone.
        """
        generation, group, config = self._generation, self._generation.group, self._generation.config
        assert group.starter is not None
        num_own, num_ranks = config.parallel.ranks_per_replica, config.parallel.num_ranks
        lost_ranks = [[rank for rank in guilty if rank // num_own == index] for index in range(len(group.replicas))]
        ended = {
            index for index, replica in enumerate(group.replicas) if replica.failures() or num_ranks + index in guilty
        }
        survivors = list(range(len(group.replicas)))
        if leaves_out:
            lost = ended | generation.lost | {index for index, ranks in enumerate(lost_ranks) if ranks}
            survivors = [index for index in survivors if index not in lost]
            config = without_others(config, survivors)
            left_out = [group.replicas[index] for index in sorted(lost)]
            logger.warning(
                "%s left out: %d replica(s) serve on", ", ".join(each.name for each in left_out), len(survivors)
            )
            end_all(left_out)
            group.replicas[:] = [group.replicas[index] for index in survivors]
            generation.config, generation.lost, ended = config, set(), set()
            generation.router = generation.router.restarted(survivors)
            lost_ranks = [[] for _ in survivors]
        generation.epoch += 1
        group.starter.begin_epoch(config, survivors)
        if group.watch is not None:
            group.watch = group.starter.watch()
        sizes = (generation.num_blocks, generation.chunk_size)
        for index, replica in enumerate(group.replicas):
            if index in ended:
                generation.lost.add(index)
                end_all([replica])  # before its place is used again
                group.replicas[index] = group.starter.start(index, generation.epoch, *sizes)
            else:
                start = group.starter.message(index, generation.epoch, *sizes)
                replica.send(Recover(start, lost_ranks[index]))
                if lost_ranks[index]:
                    generation.lost.add(index)
        generation.begin_to_load()

    def _find_hung(self) -> Finding | None:
        watch, generation = self._generation.group.watch, self._generation
        if watch is None:
            return None
        is_late = time.monotonic() - generation.began_s >= SECONDS_TO_LEAVE
        return (watch.late_ranks(generation.epoch) if is_late else None) or watch.look()


def reason_to_restart(config: EngineConfig, group: WorkerGroup, *, has_own_weights: bool) -> str:
    """Return why all ranks must be started again after a failure; empty: failed ranks can be replaced.

    Args:
        has_own_weights: a trainer has updated the weights, so new ranks would have other weights.
    """
    reasons = {
        "Ray runs its ranks": group.starter is None,
        "a host was lost": group.starter is not None and group.starter.has_lost_host,
        "its ranks compute on GPUs": config.compute.device != "cpu",
        "the weights were updated, and a new rank would load the checkpoint": has_own_weights,
        "experts may have moved (rebalance='auto')": config.experts.rebalance == "auto",
        "it has a store behind the KV cache, or exchanges blocks with other engines": bool(
            config.store.kv_folder or config.store.kv_host_memory or config.store.kv_transfer_address
        ),
        "transformers runs the model": config.weights.model_impl == "transformers",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
