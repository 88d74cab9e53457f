"""Totals -> what the terminal and the page say in plain English."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_tree.xray.rendering import KINDS

REPEATED = {  # what each kind of message is called if it is repeated
    "system": "system prompts",
    "tools": "tool schemas",
    "user": "messages of the user",
    "assistant": "earlier answers",
    "thought": "earlier thoughts",
    "tool": "results of tools",
    "other": "other text",
}
HISTORY = ("user", "assistant", "thought", "tool")
MOST_REASONS = 4


def sentences(
    totals: Mapping[str, int],
    repeats: Sequence[int],
    reasons: Sequence[tuple[str, int, int]],
    unit: str,
    lacks_prompts: bool = False,
) -> list[str]:
    """Returns how many times less a tree computes, what repeats, and why branches diverge.

    Args:
        totals: ``totals`` of the payload.
        repeats: tokens that are computed again, per kind.
        reasons: (reason, branch points, tokens of the branches), most frequent first.
        unit: what is counted, "tokens" or "bytes".
        lacks_prompts: whether the files are sessions, which leave out system prompts and tool schemas.
    """
    n_tree = totals["n_tree"]
    calls = (
        f"Token trees compute {n_tree:,} {unit} for {count(totals['calls'], 'model call')} in "
        f"{count(totals['groups'], 'group')}: {ratio(totals['n_calls'], n_tree)} less than every call as a "
        f"sample of its own ({totals['n_calls']:,}), and {ratio(totals['n_leaf'], n_tree)} less than one row "
        f"per leaf path ({totals['n_leaf']:,})."
    )
    total = sum(repeats)
    if not total:
        return [calls, "Nothing repeats.", _reasons(reasons, unit)]
    shares: dict[str, Any] = {kind: n / total for kind, n in zip(KINDS, repeats, strict=True)}
    history = ", ".join(
        f"{REPEATED[kind]} {shares[kind]:.0%}" for kind in sorted(HISTORY, key=lambda kind: -shares[kind])
    )
    if lacks_prompts and not shares["system"] + shares["tools"]:
        repeated = f"What the calls repeat is history: {history}. The files leave out what comes before it."
        return [calls, repeated, _reasons(reasons, unit)]
    repeated = (
        f"Of what the calls repeat, {shares['system']:.0%} is the system prompt, {shares['tools']:.0%} tool "
        f"schemas, and {sum(shares[kind] for kind in HISTORY):.0%} history ({history})"
    )
    repeated += f"; {shares['other']:.0%} is of an unknown kind." if shares["other"] else "."
    return [calls, repeated, _reasons(reasons, unit)]


def _reasons(reasons: Sequence[tuple[str, int, int]], unit: str) -> str:
    if not reasons:
        return "No branches diverge."
    points = sum(number for _, number, _ in reasons)
    shown = [f"{reason} ({number:,})" for reason, number, _ in reasons[:MOST_REASONS]]
    if more := sum(number for _, number, _ in reasons[MOST_REASONS:]):
        shown.append(f"other reasons ({more:,})")
    diverging = sum(size for _, _, size in reasons)
    return (
        f"Branches diverge at {count(points, 'point')}, and hold {diverging:,} {unit} from there on: "
        f"{', '.join(shown)}."
    )


def ratio(one: float, other: float) -> str:
    """Returns "2.5 times"."""
    return f"{one / max(other, 1):.1f} times"


def count(number: int, noun: str) -> str:
    """Returns "1 call" or "2 calls"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
