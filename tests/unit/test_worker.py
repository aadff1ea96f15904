"""One rank without others: what it does in each round, with and without a step."""

from __future__ import annotations

import pytest
from reference_models import Reference

from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.models.registry import read_facts
from moeserve.protocol import CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, Round, make_row
from moeserve.worker.worker import Worker


def round_of(number: int, plan: StepPlan | None) -> Round:
    intent = Intent(num_tokens=plan.num_tokens if plan else 0, is_decode_only=False)
    return Round(row=make_row(intent, number=number, replica=0), plan=plan)


def test_every_round_begins_a_step_of_the_groups(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the rank, in a thread, a process or an actor: else records of transports would grow for ever."""
    begun: list[int] = []
    settings = dict(dtype="float32", kv_cache_memory="1MiB", max_model_len=32, num_threads=1)
    config = resolve(parse_settings(settings), read_facts(plain.folder), MachineFacts(num_cores=1))
    monkeypatch.setattr(Groups, "begin_step", lambda groups, step: begun.append(step))
    worker = Worker(config, groups_of_one_rank(), show_progress=False)
    registration = Registration(
        slot=0,
        token_ids=[5, 6],
        num_prompt_tokens=2,
        cache=CacheStart([[0]]),
        params=RequestParams(temperature=0.0),
        seed=0,
        end_token_ids=[],
    )
    plan = StepPlan(step=1, slots=[0], starts=[0], lengths=[2], registrations=[registration])
    results = [worker.execute(round_of(number, plan if number == 1 else None)) for number in range(3)]
    assert begun == [0, 1, 2]
    assert [result.agreement.is_idle for result in results] == [True, False, True]
    result = results[1].result
    assert result is not None
    assert [token_id for chunk in result.chunks for token_id in chunk.token_ids] == plain.greedy([5, 6], 1)
