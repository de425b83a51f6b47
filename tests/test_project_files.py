"""Changelog, workflows and hooks agree with the tree."""

import re
from pathlib import Path

import yaml

from mmtrain import __version__

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    """Return what the steps of a workflow run."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_the_changelog_has_this_version_below_what_is_unreleased() -> None:
    headings = re.findall(r"^## (\S+)", CHANGELOG, re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]


def test_the_changelog_uses_the_headings_of_keep_a_changelog() -> None:
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_workflows_run_what_this_tree_has() -> None:
    run = [command for workflow in WORKFLOWS for command in commands(workflow)]
    assert ".ci/run" in run
    assert "python -m twine check --strict dist/*" in run
    for command in run:
        if command.startswith(".ci/"):
            assert (ROOT / command).is_file()
        if module := re.search(r"-m (scripts\.\w+)", command):
            assert (ROOT / module[1].replace(".", "/")).with_suffix(".py").is_file()


def test_the_weekly_workflow_is_scheduled() -> None:
    newest = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8"))
    (schedule,) = newest[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])


def test_hooks_run_the_tools_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff-format", "ruff", "mypy"}
    check = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].split()[0].removeprefix(".venv/bin/") in check


def test_no_address_is_made_up() -> None:
    """Until the repository has an address, none stands anywhere but in the variable of the build."""
    for page in (ROOT / "SECURITY.md", ROOT / "NOTICE", *(ROOT / ".github").rglob("*.*")):
        assert re.findall(r"https?://\S+|\S+@\S+\.\S+", page.read_text(encoding="utf-8")) == [], page
