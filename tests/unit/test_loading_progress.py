"""Progress of loading that is no bar on a terminal is in the log."""

from __future__ import annotations

import logging

import pytest

from moeserve.progress import progress_bar


def lines_of(caplog: pytest.LogCaptureFixture, **options: float) -> list[str]:
    caplog.set_level(logging.INFO)
    with progress_bar("weights", total=4096, is_shown=True, **options) as progress:
        for _ in range(4):
            progress.update(1024)
    return [record.getMessage() for record in caplog.records]


def test_each_interval_has_a_line(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(caplog, log_interval_s=0.0)
    assert any(line.startswith("weights: 2.00kB of 4.00kB in ") for line in lines), lines
    assert lines[-1].startswith("weights: 4.00kB of 4.00kB in ")
    assert capsys.readouterr().err == ""


def test_a_short_load_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog) == []
