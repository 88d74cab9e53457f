"""docs/recipes.md has what the cards say, and cards have all fields."""

from tests.docs.recipes_table import FIELDS, PAGE, TABLE, cards, recipes, table


def test_the_table_of_recipes_is_that_of_the_cards() -> None:
    for name, card in cards().items():
        assert " ".join(card) == FIELDS, name
        assert card["recipe"] in recipes(), name
    found = TABLE.search(PAGE.read_text())
    assert found
    assert found[0] == table(), "run python -m tests.docs.recipes_table"
