"""The timeout of a step does not end an update of weights, which has that of loading."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from moeserve.controls import Control, FinishUpdate
from moeserve.engine.driver import Driver, StepTimeoutError
from moeserve.protocol import AddRequest, ReplicaMessage, Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Round, RoundResult
from moeserve.scheduling.replica import Replica
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig

ADD = AddRequest(Request(request_id="a", prompt_token_ids=[1], params=RequestParams(max_tokens=1), seed=1))


class Stuck:
    """An executor whose ranks never answer."""

    name = "rank 0"
    loaded: tuple[()] = ()

    def submit(self, work: Round) -> Future[RoundResult]:
        return Future()

    def progress(self) -> None:
        pass


@pytest.mark.parametrize(
    ("message", "is_late"), [(ADD, True), (Control(1, FinishUpdate(version="new", salt=b"new")), False)]
)
def test_a_round_that_may_load_weights_has_the_timeout_of_loading(message: ReplicaMessage, is_late: bool) -> None:
    config = SchedulerConfig(
        num_blocks=4,
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=4,
        max_model_len=16,
        enable_prefix_caching=True,
    )
    executor: Any = Stuck()
    driver = Driver(Replica(Scheduler(config, b"salt")), executor, lambda _: None, 0.0, 1e9)
    driver.handle(driver.events([message]), lambda _: None)
    assert driver.has_rounds
    assert driver.is_late == is_late
    if is_late:
        with pytest.raises(StepTimeoutError):
            driver.handle(driver.events([]), lambda _: None)
