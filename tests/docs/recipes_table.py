"""Writes into docs/recipes.md what the cards in docs/data/cards/ say of runs of the recipes.

python -m tests.docs.recipes_table
"""

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, CARDS = ROOT / "docs" / "recipes.md", ROOT / "docs" / "data" / "cards"
TABLE = re.compile(r"(?<=<!-- cards: begin -->\n).*(?=<!-- cards: end -->)", re.DOTALL)
FIELDS = "recipe command commit date hardware versions speed result unchecked log"
HEAD = "| recipe, card | run | speed | loss or reward | not checked |\n|---|---|---|---|---|\n"
RECIPES = ("train_configs/*.toml", "examples/*.toml", "examples/*_loop.py", "examples/distill.py")


def cards() -> dict[str, dict[str, Any]]:
    """Returns the fields of each card, by the name of its file."""
    return {file.name: tomllib.loads(file.read_text()) for file in sorted(CARDS.glob("*.toml"))}


def recipes() -> set[str]:
    """Returns the files that train a model."""
    files = [file for pattern in RECIPES for file in ROOT.glob(pattern)]
    return {str(file.relative_to(ROOT)) for file in files} - {"train_configs/serve.toml"}


def table() -> str:
    """Returns a row for each card, and the names of recipes without one."""
    rows = []
    for name, card in cards().items():
        run = ", ".join(filter(None, (str(card["date"]), card["hardware"], card["commit"])))
        run = f"[{run}](log/{card['log']})" if card["log"] else run
        cells = [f"[{card['recipe']}](data/cards/{name})", run]
        rows.append("| " + " | ".join([*cells, card["speed"], card["result"], card["unchecked"]]) + " |\n")
    missing = sorted(recipes() - {card["recipe"] for card in cards().values()})
    without = textwrap.fill(f"Without a card: {', '.join(missing)}.", 120, break_on_hyphens=False)
    return f"{HEAD}{''.join(rows)}\n{without}\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
    print(f"wrote {PAGE}")
