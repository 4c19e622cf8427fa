"""Called by mkdocs, which makes a site of this folder: README, changelog and reports of measured runs are pages too."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    for pattern in ("README.md", "CHANGELOG.md", "results/**/*.md", "results/**/*.png"):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between the repository's files as links between pages: those of ``docs/`` stand at the top of the site."""
    uri = PurePosixPath(page.file.src_uri)
    folder = Path(str(page.file.abs_src_path)).relative_to(ROOT).parent

    def moved(link: re.Match[str]) -> str:
        target = normpath((folder / link[1]).as_posix()).removeprefix("docs/")
        return f"]({relpath(target, uri.parent)}"

    return re.sub(r"\]\((?!https?:|#)([^)#]+)", moved, markdown)
