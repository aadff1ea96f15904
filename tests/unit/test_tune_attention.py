"""The tuner of attention without a GPU: the time of each library, and the file that it writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from moeserve.bench.gpu import tune_attention
from moeserve.ops.libraries.attention_times import OWN, load_times


class Timer:
    """A timer for calls that return their own time."""

    def seconds(self, call: Callable[[], Any]) -> float:
        return float(call())


def refuse() -> float:
    raise RuntimeError("no kernel for this step")


def test_library_counts_only_with_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    def calls(chunks: Any) -> dict[str, Callable[[], float]]:
        rows = chunks[0][0]
        return {OWN: lambda: 2.0 * rows, "a 1": lambda: 1.0 * rows, "b 1": (lambda: 0.5) if rows == 1 else refuse}

    timer: Any = Timer()
    measured = tune_attention.measure(calls, [[(1, 20)], [(4, 20)]], timer)
    assert measured == {OWN: pytest.approx(4.0), "a 1": pytest.approx(2.0)}
    assert "no kernel for this step" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no kernel"):  # a failure of our own kernel is raised
        tune_attention.measure(lambda chunks: {OWN: refuse}, [[(1, 20)]], timer)


def test_written_times_are_those_that_auto_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "No GPU 9000")
    monkeypatch.setattr(tune_attention, "ColdTimer", Timer)
    monkeypatch.setattr(tune_attention, "gpu_source", lambda seed: None)
    monkeypatch.setattr(
        tune_attention, "attention_calls", lambda *args, **options: {OWN: lambda: 2e-6, "a 1": lambda: 1e-6}
    )
    path = tmp_path / "times.json"
    arguments = ["--heads", "32", "--kv-heads", "8", "--head-size", "128", "--window", "64", "--out", str(path)]
    assert tune_attention.main(arguments) == 0
    key = "bfloat16 32 heads and 8 of keys x 128, blocks of 16, window 64"
    times = load_times(path)
    assert list(times) == [key]
    assert times[key]["decode"] == times[key]["chunks"] == {"a 1": pytest.approx(1e-6), OWN: pytest.approx(2e-6)}
    assert 'decode: a 1 1.0 us, triton 2.0 us; "auto" chooses a 1' in capsys.readouterr().out


def test_without_a_gpu_it_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_attention.main(["--heads", "4", "--kv-heads", "2", "--head-size", "64"]) == 1
    assert "torch.cuda.is_available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "5", "--kv-heads", "2", "--head-size", "64"], "--heads 5"),
        (["--heads", "0", "--kv-heads", "2", "--head-size", "64"], "--heads: 0"),
    ],
)
def test_impossible_heads_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune_attention.parse(arguments)
    assert words in capsys.readouterr().err
