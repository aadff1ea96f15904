"""How long a thread keeps the interpreter lock while the thread of an engine on a GPU waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.api.async_llm import SWITCH_SECONDS, AsyncLLM
from moeserve.api.startup import TextParts
from moeserve.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _default_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def start_and_end(device: str) -> None:
    engine = SimpleNamespace(
        config=SimpleNamespace(compute=SimpleNamespace(device=device)), refusal="", cancel_restart=lambda: None
    )
    session: Any = SimpleNamespace(engine=engine, poll=list, has_work=False, wake=lambda: None, shutdown=lambda: None)
    AsyncLLM.of_session(cast(Any, session), TextParts(None, SamplingParams(), [])).shutdown()


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.005), ("cuda", SWITCH_SECONDS)])
def test_an_engine_on_a_gpu_soon_gets_the_lock(device: str, seconds: float) -> None:
    start_and_end(device)
    assert sys.getswitchinterval() == pytest.approx(seconds, rel=0.05)


def test_a_shorter_interval_stays() -> None:
    sys.setswitchinterval(0.0001)
    start_and_end("cuda")
    assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.05)
