"""Totals -> what the terminal and the page say in plain English."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_tree.errors import count
from titan_tree.xray.rendering import KINDS

REPEATED = {  # what each kind of message is called if it is repeated
    "system": "system prompts",
    "tools": "tool schemas",
    "user": "messages of the user",
    "assistant": "earlier answers",
    "thought": "earlier thoughts",
    "tool": "results of tools",
    "other": "other text",
    "image": "images",
}
HISTORY = ("user", "assistant", "thought", "tool", "image")
MOST_REASONS = 4
LEAST_RATIO = 1.05  # smaller ones would be shown as 1.0


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
        unit: what is counted, "token" or "byte".
        lacks_prompts: whether the files are sessions, which leave out system prompts and tool schemas.
    """
    n_tree = totals["n_tree"]
    calls = (
        f"Token trees compute {count(n_tree, unit)} for {count(totals['calls'], 'model call')} in "
        f"{count(totals['groups'], 'group')}: "
        f"{_compared(n_tree, totals['n_calls'], 'every call as a sample of its own')}, and "
        f"{_compared(n_tree, totals['n_leaf'], 'one row per leaf path')}."
    )
    total = sum(repeats)
    if not total:
        return [calls, "Nothing repeats.", _reasons(reasons, totals["points"], unit)]
    shares: dict[str, Any] = {kind: n / total for kind, n in zip(KINDS, repeats, strict=True)}
    history = ", ".join(
        f"{REPEATED[kind]} {shares[kind]:.0%}"
        for kind in sorted(HISTORY, key=lambda kind: -shares[kind])
        if shares[kind]
    )
    if lacks_prompts and not shares["system"] + shares["tools"]:
        repeated = f"What the calls repeat is history: {history}. The files leave out what comes before it."
        return [calls, repeated, _reasons(reasons, totals["points"], unit)]
    share = f"{sum(shares[kind] for kind in HISTORY):.0%}"
    prompts = f"{shares['system']:.0%} is the system prompt, {shares['tools']:.0%} tool schemas, and {share}"
    if shares["other"] and not shares["system"] + shares["tools"]:  # which other text may be
        prompts = f"{share} is"
    repeated = f"Of what the calls repeat, {prompts} history" + (f" ({history})" if history else "")
    repeated += f"; {shares['other']:.0%} is of an unknown kind." if shares["other"] else "."
    return [calls, repeated, _reasons(reasons, totals["points"], unit)]


def encodings(totals: Mapping[str, int]) -> list[str]:
    """Returns how many times less images are encoded; nothing without images."""
    images, others = totals["images"], totals["path_images"]
    compared = _compared(images, others, "every sample by itself")
    return [f"Trees encode {count(images, 'image')}: {compared}."] if images else []


def _reasons(reasons: Sequence[tuple[str, int, int]], points: int, unit: str) -> str:
    if not reasons:
        return "No branches diverge."
    shown = [f"{reason} ({number:,})" for reason, number, _ in reasons[:MOST_REASONS]]
    if more := sum(number for _, number, _ in reasons[MOST_REASONS:]):
        shown.append(f"other reasons ({more:,})")
    diverging = sum(size for _, _, size in reasons)
    return (
        f"Branches diverge at {count(points, 'point')}, and hold {count(diverging, unit)} from there on: "
        f"{', '.join(shown)}."
    )


def _compared(n_tree: int, other: int, what: str) -> str:
    """Returns "2.5 times less than ...". ``other`` is less than ``n_tree`` if tokens follow the last call."""
    if other / max(n_tree, 1) >= LEAST_RATIO:
        return f"{ratio(other, n_tree)} less than {what} ({other:,})"
    than = "as many as" if other == n_tree else "about as many as" if other > n_tree else "more than"
    return f"{than} {what} ({other:,})"


def ratio(one: float, other: float) -> str:
    """Returns "2.5 times"."""
    return f"{one / max(other, 1):.1f} times"
