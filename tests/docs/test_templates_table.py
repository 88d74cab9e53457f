"""docs/templates.md has the table that the generator makes of the published templates."""

import pytest

from tests.docs.templates_table import PAGE, TABLE, published_templates, table


def test_the_table_of_templates_is_current() -> None:
    if published_templates() is None:
        pytest.skip("needs trl")
    found = TABLE.search(PAGE.read_text())
    assert found
    assert found[0] == table(), "run python -m tests.docs.templates_table"
