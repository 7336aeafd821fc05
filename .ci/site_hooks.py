"""What `make docs` adds to mkdocs: links to files outside docs/, and a check that nothing comes from elsewhere.

A linked file outside docs/ (a result, a picture, the benchmarks' README) is put into the site under `repository/`, so
that one link works in a checkout and in the site. A link to a file that does not exist is a warning, which fails a
strict build. A page that would load a script, a style, a font or a picture from another host fails it too.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
REMOTE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\bhref=\"(?:https?:)?//[^\"]*"
)
FOLDER = "repository"
# Shown as pages or pictures, or handed out as they are; anything else is copied as text.
AS_IT_IS = {".md", ".png", ".svg", ".csv", ".html"}

log = logging.getLogger("mkdocs.hooks.site")


def on_startup(**kwargs: Any) -> None:
    """Warnings and errors alone. Not mkdocs' own --quiet: it hides warnings from --strict, too."""
    logging.getLogger("mkdocs").setLevel(logging.WARNING)


def on_files(files: Files, *, config: Any) -> Files:
    """Every file outside docs/ that a page links to, and those that these link to in turn."""
    docs = Path(config.docs_dir)
    root = docs.parent
    waiting = [posixpath.normpath(f"{docs.name}/{file.src_uri}") for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in linked(page, (root / page).read_text()):
            if target.startswith(f"{docs.name}/") or target in seen or not (root / target).is_file():
                continue
            seen.add(target)
            files.append(added(target, root, config))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """Links that leave docs/, or come from a file that lies outside, as the site has them."""
    docs = Path(config.docs_dir).name
    source = page.file.src_uri
    here = source.removeprefix(f"{FOLDER}/") if source.startswith(f"{FOLDER}/") else f"{docs}/{source}"

    def in_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[1]))
        where = target.removeprefix(f"{docs}/") if target.startswith(f"{docs}/") else site_path(target)
        return posixpath.relpath(where, posixpath.dirname(source) or ".") + (found[2] or "")

    return outside_code(markdown, lambda text: LINK.sub(in_site, text))


def on_post_build(*, config: Any) -> None:
    """The site is whole: it opens without a network."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        found = REMOTE.search(path.read_text())
        if found:
            log.warning("%s loads from another host: %s", path.relative_to(config.site_dir), found[0])


def linked(page: str, text: str) -> list[str]:
    """What a page links to, as paths from the root of the repository."""
    found: list[str] = []
    outside_code(text, lambda part: found.extend(match[1] for match in LINK.finditer(part)) or part)
    return [posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in found]


def outside_code(text: str, change: Any) -> str:
    """`change` on all but fenced blocks."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def site_path(target: str) -> str:
    """Where a file outside docs/ stands in the site: a program as text, which every browser shows."""
    suffix = posixpath.splitext(target)[1]
    return f"{FOLDER}/{target}" + ("" if suffix in AS_IT_IS else ".txt")


def added(target: str, root: Path, config: Any) -> File:
    """A file of the repository as one of the site, beside the navigation."""
    path = str(root / target)
    return File.generated(config, site_path(target), abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV)
