"""What mkdocs asks for while it builds the site: pages that are generated, and links that fit the site.

The pages in `docs/` are written for readers of the tree, with relative links to it. On the site, links to other files
of the tree lead to the repository where its address is known (MMTRAIN_REPOSITORY_URL), and are plain text elsewhere.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from scripts.docs_site.links import TREE_PAGES, site_markdown  # noqa: E402
from scripts.docs_site.llms import llms_text  # noqa: E402
from scripts.docs_site.notebook_pages import notebook_markdown  # noqa: E402
from scripts.docs_site.reference import REFERENCE_PAGES  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

TREE_ADDRESS = os.environ.get("MMTRAIN_REPOSITORY_URL", "").rstrip("/")


def on_files(files: "Files", *, config: "MkDocsConfig") -> "Files":
    """Add the pages outside `docs/`, the reference, the notebooks as pages, and llms.txt."""
    from mkdocs.structure.files import File

    for uri, content in generated_pages().items():
        files.append(File.generated(config, uri, content=content))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        notebook = files.get_file_from_path(f"notebooks/{path.name}")
        if notebook is not None:
            files.remove(notebook)
    return files


def generated_pages() -> dict[str, str]:
    """Return the content of every page that is no file of `docs/`, by its place on the site."""
    pages = {uri: (ROOT / source).read_text(encoding="utf-8") for source, uri in TREE_PAGES.items()}
    pages |= {f"reference/{name}.md": make() for name, make in REFERENCE_PAGES.items()}
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook_markdown(path)
    days = sorted(path.stem for path in (ROOT / "docs" / "measurements").glob("*.md"))
    listed = "\n".join(f"* [{day}]({day}.md)" for day in reversed(days))
    pages["measurements/index.md"] = f"# Measurements\n\nThe log of measurements, by day.\n\n{listed}\n"
    pages["llms.txt"] = llms_text()
    return pages


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Rewrite the links of a page."""
    return site_markdown(markdown, page.file.src_uri, TREE_ADDRESS)
