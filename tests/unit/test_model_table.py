"""The table of model families in `docs/models.md` is that of the families."""

from __future__ import annotations

from model_table import DOCUMENT, with_table


def test_the_document_has_the_table_of_today() -> None:
    document = DOCUMENT.read_text()
    assert document == with_table(document), "python tests/model_table.py writes the table"
