"""Write llms.txt: a short map of the documentation for language models (https://llmstxt.org)."""

import re
from pathlib import Path

import yaml

from scripts.docs_site.links import TREE_PAGES

ROOT = Path(__file__).parents[2]


def llms_text() -> str:
    """Return a title, a summary, and for each section of the site its pages with their first sentences."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_PlainLoader)
    lines = ["# mmtrain", "", f"> {config['site_description']}", ""]
    lines.append("AGENTS.md in the tree says how to work on the code. Pages of the site, as Markdown in `docs/`:")
    for section in config["nav"]:
        ((title, pages),) = section.items()
        entries = pages if isinstance(pages, list) else [{title: pages}]
        lines += ["", f"## {title}", ""]
        for entry in entries:
            ((name, uri),) = entry.items()
            lines.append(f"- [{name}]({_address(uri)}){_first_sentence(uri)}")
    return "\n".join(lines) + "\n"


def _address(uri: str) -> str:
    """Return where a page is, relative to the site."""
    folder = re.sub(r"(^|/)(index|README)$", "", uri.removesuffix(".md"))
    return f"{folder}/" if folder else "./"


def _first_sentence(uri: str) -> str:
    """Return the first sentence of a page behind a colon; empty for a generated page."""
    sources = {page: source for source, page in TREE_PAGES.items()}
    path = ROOT / sources.get(uri, f"docs/{uri}")
    if not path.is_file():
        return ""
    _, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    paragraph = " ".join(body.partition("\n\n")[0].split())
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    return f": {re.split(r'(?<=[.!?]) ', text)[0]}"


class _PlainLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that its tags stand for."""


_PlainLoader.add_multi_constructor("", lambda loader, suffix, node: None)
