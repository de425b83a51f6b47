"""The column "checked at" of docs/models.md: which families the tests compare with `transformers`, and in what.

`python -m tests.test_checked_families` writes it, with the installed version. Run that when the slow tests have passed.
"""

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from mmtrain.families import FAMILIES
from tests.data.chat_families import CHAT_FAMILIES
from tests.data.test_chat_judge import WITH_EXPERTS
from tests.families.test_video_processors import CLASSES, FRAMES_OF_CLASSES
from tests.flow.test_pretrained import OF_THEIR_OWN
from tests.flow.tiny_families import TINY_FAMILIES
from tests.weights.test_import_weights import MODELS
from tests.weights.test_qwen_vl import MODELS as QWEN_MODELS

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs/models.md"
HEADER = "| family | `architectures` in `config.json` | not yet | checked at |"
GRADIENT_TEST = "def test_logits_loss_and_gradients_equal_those_of_transformers("
OLDEST = Version("5.17")  # as pyproject.toml allows


def compared_families() -> Mapping[str, set[str]]:
    """Return by what is compared the families for which the tests do so, as docs/models.md explains the words."""
    with_files = {name for name in FAMILIES if _has_gradient_test(FOLDER / f"weights/test_{name}.py")}
    return {
        "gradients": {re.split(r"\W", name)[0] for name in (*MODELS, *QWEN_MODELS)} | with_files,
        "plans": {tiny.family.name for tiny in TINY_FAMILIES.values()} | OF_THEIR_OWN.keys(),
        "texts": {chat.family for chat in CHAT_FAMILIES.values()} | WITH_EXPERTS,
        "videos": {name for name in CLASSES if CLASSES[name] in {CLASSES[family] for family, _ in FRAMES_OF_CLASSES}},
    }


def _version_beside_torchvision() -> str:
    """Return the version of the second environment: these classes need torchvision, which the first one lacks."""
    pins = (FOLDER.parent / "constraints-b.txt").read_text(encoding="utf-8")
    return re.findall(r"^transformers==(\S+)", pins, flags=re.M)[0]


def _has_gradient_test(path: Path) -> bool:
    return path.exists() and GRADIENT_TEST in path.read_text(encoding="utf-8")


def column(page: str, version: str) -> dict[str, str]:
    """Return the column's cells by the row that they end, without that cell."""
    by_architecture = {name: family.name for family in FAMILIES.values() for name in family.architectures}
    compared = compared_families()
    cells = {}
    for row in _rows(page):
        families = {by_architecture[name] for name in re.findall(r"`(\w+)`", row) if name in by_architecture}
        assert families, f"no architecture of {row!r} is known"
        watching = {name for name in families if FAMILIES[name].has_processor}
        words = [word for word, names in compared.items() if word != "videos" and families <= names]
        cells[row] = f"{version}: {', '.join(words)}"
        if watching and watching <= compared["videos"]:
            cells[row] += f"; {_version_beside_torchvision()}: videos"
    return cells


def _rows(page: str) -> list[str]:
    """Return the rows of the table of families, without their last cells."""
    lines = page.splitlines()
    start = lines.index(HEADER) + 2
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    return [line.rsplit("|", 2)[0] + "|" for line in lines[start:end]]


def _stated(page: str) -> dict[str, str]:
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return {row: next(line for line in lines if line.startswith(row))[len(row) : -1].strip() for row in _rows(page)}


def test_the_column_says_what_the_tests_compare() -> None:
    page = PAGE.read_text(encoding="utf-8")
    stated = _stated(page)
    versions = {cell.partition(":")[0] for cell in stated.values()}
    assert len(versions) == 1
    [version] = versions
    assert stated == column(page, version), "if this is meant: python -m tests.test_checked_families"
    assert Version(version) >= OLDEST


def test_every_family_has_a_row_and_is_compared() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", "\n".join(_rows(page))))
    assert {name for name, family in FAMILIES.items() if not named & set(family.architectures)} == set()
    compared = compared_families()
    assert compared["gradients"] == compared["plans"] == set(FAMILIES)
    assert all(names <= set(FAMILIES) for names in compared.values())


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for row, cell in column(text, metadata.version("transformers")).items():
        text = re.sub(rf"^{re.escape(row)}.*$", lambda _, row=row, cell=cell: f"{row} {cell} |", text, flags=re.M)
    PAGE.write_text(text, encoding="utf-8")
