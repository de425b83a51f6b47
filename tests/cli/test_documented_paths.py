"""Every file that the documentation names exists, and every link leads to a file and a heading that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])
SOURCE_FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|sbatch)\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MADE_BY_USERS = {"recipes/mine.yaml"}
LOG = ROOT / "docs" / "measurements"  # names the files of its days


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != LOG], ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    """Modules may be named from the root of the repository or from the package."""
    names = set(SOURCE_FILE.findall(page.read_text(encoding="utf-8"))) - MADE_BY_USERS
    missing = [name for name in names if not (ROOT / name).exists() and not (ROOT / "mmtrain" / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_the_documentation_names_files_and_links() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(set(SOURCE_FILE.findall(text))) > 40
    assert len(LINK.findall(text)) > 10
