"""The wheel holds what its users need beside code, with the metadata that an index shows."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mmtrain import __version__
from mmtrain.recipe import load_recipe, recipe_fingerprint
from tests.cli.test_documented_commands import as_shown, shown_plan

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/somebody/mmtrain"
# Of https://www.apache.org/licenses/LICENSE-2.0.txt.
SHA256_OF_APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
SOURCES = ["mmtrain", "recipes", "docs/recipe.schema.json", "scripts/train.sbatch", "scripts/train_ray.py"]
FILES_OF_BUILD = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "MANIFEST.in"]


def build_wheel(folder: Path, address: str = "") -> Path:
    """Build a wheel from a copy of what the build may read, so that the tree stays as it is."""
    tree = folder / "tree"
    for name in (*SOURCES, *FILES_OF_BUILD):
        source, copy = ROOT / name, tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    env = {**os.environ, "MMTRAIN_REPOSITORY_URL": address, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, "--wheel-dir", str(folder), str(tree)], check=True, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_with_address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel_with_address"), f"{ADDRESS}/")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"mmtrain-{__version__}.dist-info/METADATA").decode()
    return Parser().parsestr(text)


def test_the_licence_is_apache_2_word_for_word() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == SHA256_OF_APACHE_2


def test_the_notice_names_every_file_that_is_shipped_beside_code() -> None:
    """Files are named one by one, by a pattern of the notice, or as files of a Python package."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    patterns = re.findall(r"(?:[\w.*-]+/)+[\w.*-]+\.(?:yaml|csv|json|sbatch)", notice)
    named = {path for pattern in patterns for path in ROOT.glob(pattern)}
    data = [path for kind in ("yaml", "csv", "json") for path in (ROOT / "mmtrain").rglob(f"*.{kind}")]
    recipes = [path for path in (ROOT / "recipes").rglob("*.*") if path.name != "README.md"]
    assert {*data, *recipes} <= named


def test_metadata_name_licence_authors_and_version(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == __version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert found["Author"] == "The mmtrain authors"
    assert len(found["Keywords"].split(",")) > 3


def test_the_wheel_holds_recipes_schema_job_file_and_cost_tables(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    recipes = {
        f"mmtrain/shipped/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("recipes/**/*") if path.is_file()
    }
    assert len(recipes) > 60
    tables = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("mmtrain/costs/tables/*.json")}
    assert recipes | tables <= names
    shipped = {name.removeprefix("mmtrain/shipped/") for name in names}
    assert {"recipe.schema.json", "train.sbatch", "train_ray.py"} <= shipped
    assert {"mmtrain/py.typed", "mmtrain/costs/published_errors.json"} <= names


def test_links_stay_relative_without_an_address(wheel: Path) -> None:
    found = metadata(wheel)
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert found.get_all("Project-URL") is None


def test_links_become_absolute_with_an_address(wheel_with_address: Path) -> None:
    found = metadata(wheel_with_address)
    description = str(found.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert f"{ADDRESS}/blob/v{__version__}/docs/planning.md" in targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"Source, {ADDRESS}" in found.get_all("Project-URL", [])
    changelog = f"{ADDRESS}/blob/v{__version__}/CHANGELOG.md"
    assert f"Changelog, {changelog}" in found.get_all("Project-URL", [])


def run_installed(packages: Path, here: Path, *arguments: str) -> str:
    """Run `mmtrain` of the folder `packages` and return what it prints; dependencies are those of this environment."""
    env = {**os.environ, "PYTHONPATH": str(packages), "COLUMNS": "120"}
    command = [sys.executable, "-m", "mmtrain", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=here, env=env).stdout


def test_an_installed_wheel_copies_recipes_that_load(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(packages), str(wheel)], check=True)
    here = tmp_path / "here"
    here.mkdir()
    listed = json.loads(run_installed(packages, here, "recipes", "--json"))
    assert all(Path(row["path"]).is_relative_to(packages) for row in listed["recipes"])
    assert Path(listed["job_file"]).is_relative_to(packages)
    assert len(listed["recipes"]) == len(list(ROOT.glob("recipes/**/*.yaml")))
    run_installed(packages, here, "recipes", "copy", "whatif/internvl_26b")
    run_installed(packages, here, "recipes", "copy", "demo")
    copy = here / "recipes" / "whatif" / "internvl_26b.yaml"
    assert recipe_fingerprint(load_recipe(copy).recipe) == recipe_fingerprint(
        load_recipe(ROOT / "recipes" / "whatif" / "internvl_26b.yaml").recipe
    )
    assert load_recipe(here / "recipes" / "demo.yaml").recipe.data.sources[0].path == here / "demo-data" / "train.json"
    schema = json.loads((here / "recipes" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert schema == json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))


def requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """Return what a wheel requires here, with one of its extras; what it requires of itself is named as mmtrain."""
    found = map(Requirement, metadata(wheel).get_all("Requires-Dist", []))
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


def with_dependencies(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return installed packages and all that these need, by name."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), "") for name in names]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name: importlib.metadata.distribution(name) for name, _ in seen}


def test_the_core_needs_neither_torch_nor_megatron(wheel: Path) -> None:
    core = {requirement.name for requirement in requirements(wheel)}
    assert {"numpy", "pydantic", "typer"} <= core
    assert core.isdisjoint({"torch", "megatron-core", "mmtrain"})
    assert {"torch", "megatron-core"} <= {requirement.name for requirement in requirements(wheel, "train")} - core
    [all_extras] = [each for each in requirements(wheel, "all") if each.name == "mmtrain"]
    named = {*metadata(wheel).get_all("Provides-Extra", [])}
    assert all_extras.extras == named - {"all", "dev", "docs", "trackio", "cuda", "flash-attn"}


@pytest.fixture(scope="module")
def bare_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires without extras, taken from the packages that are here."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    for distribution in with_dependencies(each.name for each in requirements(wheel)).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(distribution.locate_file(name))
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    return folder


def run_bare(environment: Path, here: Path, *arguments: str) -> str:
    """Run the command of an environment in the folder `here`, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(environment / "bin" / "mmtrain"), *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=here, env={**env, "COLUMNS": "110"}
    ).stdout


@pytest.mark.slow
def test_a_wheel_without_torch_prints_the_plan_of_the_readme(bare_environment: Path, tmp_path: Path) -> None:
    for package in ("torch", "megatron", "scipy"):
        absent = subprocess.run([bare_environment / "bin" / "python", "-c", f"import {package}"], capture_output=True)
        assert b"ModuleNotFoundError" in absent.stderr
    run_bare(bare_environment, tmp_path, "recipes", "copy", "whatif/internvl_26b")
    arguments, shown = shown_plan("README.md")
    printed = run_bare(bare_environment, tmp_path, *arguments)
    assert "replicated on 64 x h100-80g" in printed
    assert shown.startswith(as_shown(printed))


@pytest.mark.slow
def test_doctor_misses_nothing_of_the_core_there(bare_environment: Path, tmp_path: Path) -> None:
    report = json.loads(run_bare(bare_environment, tmp_path, "doctor", "--json"))
    assert not any("which mmtrain needs" in finding["what"] for finding in report["findings"])
    states = {state["command"]: state for state in report["commands"]}
    assert states["plan"]["is_ready"]
    assert states["train"]["needs"] == {"train": False}
