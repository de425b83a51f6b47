"""Rewrite links between files of the tree into links between pages of the site."""

import os
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREE_PAGES = {  # files outside `docs/` that are pages of the site, and where
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "recipes.md",
}
FOLDER_PAGES = {"docs/decisions": "decisions/README.md", "docs/measurements": "measurements/index.md"}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\(\s*(?P<target>[^)\s]+)\s*\)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#|//")


def site_markdown(markdown: str, uri: str, address: str) -> str:
    """Return the Markdown of the page at `uri` of the site, with its links rewritten.

    address: of the repository, for links to files that are no pages; empty: these links become text.
    """
    source = _source_of(uri)
    if source is None:
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        if EXTERNAL.match(link["target"]):
            return link[0]
        target, _, anchor = link["target"].partition("#")
        tree_path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / tree_path).exists():
            return link[0]  # code that looks like a link
        page = _page_of(tree_path)
        if page is not None:
            relative = posixpath.relpath(page, posixpath.dirname(uri) or ".")
            return f"{link['image']}[{link['text']}]({relative}{'#' * bool(anchor)}{anchor})"
        if address:
            kind = "tree" if (ROOT / tree_path).is_dir() else "blob"
            return f"[{link['text']}]({address}/{kind}/HEAD/{tree_path})"
        return f"`{link['text'].strip('`')}`"

    return LINK.sub(rewritten, markdown)


def _source_of(uri: str) -> str | None:
    """Return the file of the tree that a page shows; None for a generated one, whose links fit the site."""
    by_uri = {page: source for source, page in TREE_PAGES.items()}
    if uri in by_uri:
        return by_uri[uri]
    path = f"docs/{uri}"
    return path if (ROOT / path).is_file() else None


def _page_of(tree_path: str) -> str | None:
    """Return where a file of the tree is on the site; None if it is not there."""
    if tree_path in TREE_PAGES:
        return TREE_PAGES[tree_path]
    if tree_path in FOLDER_PAGES:
        return FOLDER_PAGES[tree_path]
    if not tree_path.startswith("docs/") or not (ROOT / tree_path).is_file():
        return None
    uri = tree_path.removeprefix("docs/")
    stem, suffix = os.path.splitext(uri)
    return f"{stem}.md" if suffix == ".ipynb" else uri
