"""docs/templates.md has the table that the generator makes of the published templates."""

from tests.docs.templates_table import PAGE, TABLE, table


def test_the_table_of_templates_is_current() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found
    assert found[0] == table(), "run python -m tests.docs.templates_table"
