"""The site of the documentation: its generated pages are complete, and its links lead somewhere."""

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import mmtrain
from mmtrain import errors
from mmtrain.cli.app import app
from mmtrain.recipe import editor_schema
from scripts.docs_site.hook import generated_pages
from scripts.docs_site.links import site_markdown
from scripts.docs_site.reference import commands_page, docstring_markdown, errors_page, python_page, settings_page

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/somebody/mmtrain"


def fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and description of every setting of every section."""
    for model in (schema, *schema["$defs"].values()):
        for name, field in model.get("properties", {}).items():
            yield name, field.get("description", "")


def test_the_reference_has_every_setting() -> None:
    page = settings_page()
    for name, description in fields(editor_schema()):
        assert f"`{name}`" in page or re.search(rf"^## `[\w.]*\b{name}(?:\.N|\.NAME)?`$", page, re.MULTILINE), name
        if f"| `{name}` |" in page:
            assert " ".join(description.split()).replace("|", "\\|") in page
    assert "| `steps` |" in page
    for anchor in re.findall(r"\]\(#([^)]+)\)", page):
        headings = [re.sub(r"[^\w-]", "", title.lower()) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
        assert anchor in headings


def test_the_reference_has_every_command_and_option() -> None:
    page = commands_page()

    def walk(command: Any, name: str) -> None:
        section = page.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
        assert section, name
        for parameter in command.params:
            assert parameter.opts[0] in section or (parameter.metavar or "") in section, (name, parameter.name)
        for inner_name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {inner_name}")

    walk(get_command(app), "mmtrain")


def test_the_reference_has_every_error_with_its_exit_code() -> None:
    page = errors_page()
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.MmtrainError):
            assert re.search(rf"^\| `{name}` \| `\w+` \| {error.exit_code} \| \w", page, re.MULTILINE), name


def test_the_reference_has_every_function_with_all_arguments() -> None:
    page = python_page()
    for name in mmtrain.__all__:
        value = getattr(mmtrain, name)
        if name.startswith("_"):
            continue
        section = page.partition(f"\n## `mm.{name}`\n")[2].partition("\n## ")[0]
        assert section, name
        if inspect.isfunction(value):
            for argument in inspect.signature(value).parameters:
                assert f"* `{argument}`: " in section, f"mm.{name} documents {argument}"
            assert f"\nmm.{name}(" in section


def test_docstrings_become_lists() -> None:
    def documented() -> None:
        """Do a thing.

        Args:
            first: what it
                is.
            second: another.

        Raises:
            UserError: it cannot.
        """

    assert docstring_markdown(documented) == (
        "Do a thing.\n\n**Arguments**\n\n* `first`: what it is.\n* `second`: another.\n\n"
        "**Raises**\n\n* `UserError`: it cannot."
    )


@pytest.mark.parametrize(
    ("uri", "link", "without_address", "with_address"),
    [
        ("index.md", "[p](docs/planning.md#baselines)", "[p](planning.md#baselines)", None),
        ("running.md", "[r](../README.md)", "[r](index.md)", None),
        ("decisions/README.md", "[a](../architecture.md)", "[a](../architecture.md)", None),
        ("python.md", "[n](notebooks/planning_a_cluster.ipynb)", "[n](notebooks/planning_a_cluster.md)", None),
        ("index.md", "[m](docs/measurements)", "[m](measurements/index.md)", None),
        ("running.md", "[s](../scripts/train.sbatch)", "`s`", f"[s]({ADDRESS}/blob/HEAD/scripts/train.sbatch)"),
        ("recipes.md", "[w](whatif)", "`w`", f"[w]({ADDRESS}/tree/HEAD/recipes/whatif)"),
        ("planning.md", "![plan](plan_example.png)", "![plan](plan_example.png)", None),
        ("planning.md", "[o](https://example.org/x)", "[o](https://example.org/x)", None),
        ("planning.md", "    rows[0](1)", "    rows[0](1)", None),
    ],
)
def test_links_of_the_tree_become_links_of_the_site(
    uri: str, link: str, without_address: str, with_address: str | None
) -> None:
    assert site_markdown(link, uri, "") == without_address
    assert site_markdown(link, uri, ADDRESS) == (with_address or without_address)


def test_the_map_for_language_models_names_every_page_of_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    titles = re.findall(r"^      - ([^:]+): \S+\.md$", navigation, re.MULTILINE)
    assert len(titles) > 20
    llms = generated_pages()["llms.txt"]
    assert llms.startswith("# mmtrain\n\n> ")
    assert re.findall(r"^- \[([^]]+)\]\(\S+/\)", llms, re.MULTILINE) == titles


def build(tree: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere_and_a_broken_link_is_an_error(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "NOTICE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    for name in ("docs", "scripts", "recipes", "mmtrain", "tests"):
        (tree / name).symlink_to(ROOT / name) if name != "docs" else shutil.copytree(ROOT / name, tree / name)
    done = build(tree, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/reference/settings/index.html").read_text(encoding="utf-8")
    assert "train.optimizer" in page
    loaded = r'(?:<script[^>]*src|<link[^>]*rel="stylesheet"[^>]*href|<img[^>]*src)="(?:https?:)?//[^"]*'
    for html in (tmp_path / "site").rglob("*.html"):
        assert re.findall(loaded, html.read_text(encoding="utf-8")) == [], html
    with (tree / "docs/planning.md").open("a", encoding="utf-8") as file:
        file.write("\n[nowhere](nowhere.md) and [no heading](running.md#none)\n")
    broken = build(tree, tmp_path / "broken")
    assert broken.returncode != 0
    assert "nowhere.md" in broken.stderr
    assert "#none" in broken.stderr
