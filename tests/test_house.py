"""The size of the house may only fall.

A change that adds a concept deletes one, or says why not: raise a limit here only together with a dated page
in docs/decisions/ that gives the reason. If a count falls, lower its limit.
``python -m tests.support.house`` prints all counts.
"""

from tests.docs.dense_step import LIST, PAGE, table
from tests.support.house import circles, counts, traced_step

LIMITS = {
    "files": 351,
    "lines": 63_274,
    "files of the core": 239,
    "lines of the core": 45_498,
    "classes": 473,
    "rooms": 19,
    "arrows between rooms": 105,
    "arrows with types": 114,
    "files in circles": 0,
    "files reached from the trainer": 164,
    "lines reached from the trainer": 31_799,
    "Any": 398,
    "words of documentation": 55_988,
    "lines of tests": 60_378,
    "files acting in a dense step": 86,
    "classes acting in a dense step": 75,
}


def test_no_count_of_the_house_has_grown() -> None:
    found = counts()
    assert found.keys() == LIMITS.keys()
    grown = {name: (number, LIMITS[name]) for name, number in found.items() if number > LIMITS[name]}
    assert not grown, "count, limit: delete a concept, or raise the limit with a page in docs/decisions/"


def test_no_files_import_each_other_not_even_for_types() -> None:
    assert circles(types=True) == []


def test_architecture_lists_what_acts_in_a_dense_step() -> None:
    found = LIST.search(PAGE.read_text())
    assert found
    assert found[0] == table(traced_step()), "run python -m tests.docs.dense_step"
