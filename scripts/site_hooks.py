"""What MkDocs does beside building the pages of docs/: see mkdocs.yml.

README.md is the front page, and docs/README.md the page with all pages. Pages link to files of the repository
outside of docs/, which the site does not contain; the site shows the text of such a link. The API reference
and llms.txt are made here, so that they cannot lag behind.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import titan_tree

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
MOVED = {"README.md": "index.md", "SECURITY.md": "security.md"}  # pages of the root folder, on the site
summaries: dict[str, str] = {}  # the title and the first paragraph of each page, by its address


def on_config(config: MkDocsConfig) -> None:
    """Links to the repository from which this one was cloned, if it is on the web."""
    command = ["git", "remote", "get-url", "origin"]
    remote = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if remote.startswith("https://"):
        config.repo_url, config.repo_name = remote.removesuffix(".git"), config.site_name


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages of the root folder, and the API reference, which has every public name of the package."""
    for name, page in MOVED.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/README.md", "](pages.md")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    overview = files.get_file_from_path("README.md")
    assert overview is not None
    files.remove(overview)
    files.append(File.generated(config, "pages.md", content=overview.content_string))
    shim = ROOT / "scripts" / "iframe_worker.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(shim)))
    names = [f"::: {module}.{name}" for name, module in sorted(titan_tree._MODULES.items())]
    head = "# API reference\n\nEvery name below is imported from `titan_tree`.\n\n"
    files.append(File.generated(config, "api.md", content=head + "\n\n".join(names) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page without links that leave docs/, and keeps its summary for llms.txt."""
    docs = Path(config.docs_dir)
    folder = (docs / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.parent == ROOT and target.name in MOVED:
            return f"[{link[1]}]({'../' * (link[2].count('../') - 1)}{MOVED[target.name]}{link[3] or ''})"
        return link[0] if target.is_relative_to(docs) else link[1]

    text = LINK.sub(replace, markdown)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [block for block in prose.split("\n\n") if re.match(r"\w|`", block)]
    summary = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(blocks[0].split())) if blocks else ""
    title = re.search(r"^# (.+)$", prose, re.MULTILINE)
    summaries[page.url] = f"[{title[1] if title else page.url}]({page.url}): {summary}"
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt, the list of all pages for programs that read text."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    lines += [f"- {summary}" for _, summary in sorted(summaries.items())]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
