"""Documents that are made from code are those of today's code."""

from __future__ import annotations

import api_page
import model_table
import pytest
import settings_table


@pytest.mark.slow
def test_the_tables_of_models() -> None:
    document = model_table.DOCUMENT.read_text()
    assert document == model_table.with_tables(document), "python tests/model_table.py writes the tables"


def test_the_settings() -> None:
    assert settings_table.DOCUMENT.read_text() == settings_table.document(), (
        "python tests/settings_table.py writes them"
    )


def test_the_python_api() -> None:
    assert api_page.DOCUMENT.read_text() == api_page.document(), "python tests/api_page.py writes it"
