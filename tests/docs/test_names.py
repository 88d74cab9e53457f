"""The files and classes that the pages name exist."""

from __future__ import annotations

import re

from tests.support.markdown import FENCE
from tests.support.page_runner import PAGES, ROOT

FILE = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|sh|yaml)\b")
FOLDER = re.compile(r"(?<![\w./-])(?:[\w-]+/)+(?=[\s`])")  # checked where pages draw the tree of files
CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)[`(.]")
ELSEWHERE = {  # names of other projects
    *("DatasetDict", "GraceTime", "ModelSpec", "ReadWriteMany", "StatefulDataLoader"),
    "script.py",
}


def test_files_and_classes_that_pages_name_exist() -> None:
    folders = ("titan_tree", "benchmarks", "tests", "examples", "scripts", "train_configs", "docs")
    paths = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts
    ]
    known = "\n".join(f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths) + "\n"
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in paths if path.suffix == ".py")))
    missing = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        names = set(FILE.findall(text))
        if page.name in ("README.md", "design.md"):
            names |= set(FOLDER.findall(text)) - {"checkpoints/", "hf/"}  # a run writes these
        names = {name for name in names if f"/{name}" not in known}
        names |= {name for name in CLASS.findall(text) if name not in words}
        if page.parent.name != "log":  # a log describes the code of its day
            missing += [f"{page.relative_to(ROOT)}: {name}" for name in sorted(names - ELSEWHERE)]
    assert not missing, "\n".join(missing)
