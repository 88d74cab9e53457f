"""A small sample of mutated lines. tests/support/mutated_lines.py checks any number of them."""

from tests.support.mutated_lines import check_lines


def test_mutated_lines_are_read_correctly_or_refused_in_one_line():
    outcomes = check_lines(400, seed=0)
    assert outcomes["read"] > 100
    assert outcomes["refused"] > 100
