"""tau-bench: result files, one JSON array of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.readers.containers import first_rows, load_document
from titan_tree.data.readers.openai_chat import converted_messages
from titan_tree.data.readers.row_reader import expect, warn_once
from titan_tree.errors import UserError, errors_at, shorten

NO_TOOLS = "the file has no schemas of the tools; the samples are rendered without them"


class TauBenchReader(Reader):
    """Reads [{"task_id", "trial"?, "reward", "traj": [messages], "info"}]; the trials of a task form a group.

    ``info`` describes the task and its score, and is left out. The tools' schemas are not in the file.
    """

    def recognizes(self, source: Source) -> bool:
        return any("task_id" in row and ("traj" in row or "info" in row) for row in first_rows(source))

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        document = load_document(source)
        with errors_at(source.path):
            results = expect(document, list, "document", "a list of results")
        warn_once(source.path, NO_TOOLS)
        yield from by_task(
            [(f"{source.path}:[{index}]", result, _record) for index, result in enumerate(results)]
        )


def by_task(
    results: Iterable[tuple[Place, object, Callable[[Record], Record]]],
) -> Iterator[tuple[Place, Record]]:
    """Yields the record of each (place, result, conversion), results of one task next to each other."""
    tasks: dict[str, list[tuple[Place, Record, Callable[[Record], Record]]]] = {}
    for place, item, convert in results:
        with errors_at(place):
            result = expect(item, dict, "result", "an object with task_id")
            task = result.get("task_id")
            if isinstance(task, bool) or not isinstance(task, str | int):
                raise UserError(f"task_id: expected a string or an integer, got {shorten(task)}")
        tasks.setdefault(str(task), []).append((place, result, convert))
    for task, members in tasks.items():
        for place, result, convert in members:
            with errors_at(place):
                trial = {} if result.get("trial") is None else {"id": f"trial{result['trial']}"}
                record = {"group_id": task, **trial, **convert(result)}
            yield place, record


def _record(result: Record) -> Record:
    messages = expect(result.get("traj"), list, "traj", "a list of messages")
    return {"reward": result.get("reward"), "messages": converted_messages(messages, "traj")}
