"""What scripts measure is printed, and with `--log` appended to the log."""

from pathlib import Path

import pytest

from scripts.measurements import Report, arguments, command, machine, start
from tests.test_benchmarks_page import test_every_entry_of_the_log_has_a_machine_and_a_command as check_entries


def test_each_run_with_log_appends_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = arguments("Measure.").parse_args(["--log"])
    for title in ("Speed", "Speed again"):
        report = start(title, options, tmp_path)
        report.targets()
        report.target("seconds", 0.25, 0.3)
        report.target("share", 0.85, 0.9, at_least=True)
    [file] = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8")
    check_entries(file)
    assert text.count("# Measurements of ") == 1
    assert text.count("\n## Speed") == 2
    assert text.endswith("| seconds | 0.25 | <= 0.3 | met |\n| share | 0.85 | >= 0.9 | missed |\n")
    assert capsys.readouterr().out.splitlines()[-1] == "| share | 0.85 | >= 0.9 | missed |"


def test_without_log_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("Speed", arguments(None).parse_args([]), tmp_path) == Report()
    assert list(tmp_path.iterdir()) == []
    assert machine() in capsys.readouterr().out


def test_a_logged_command_names_no_folder_of_this_machine() -> None:
    argv = ["/somewhere/scripts/bench_x.py", "--lengths", "/data/my lengths", "--log", "--only", "fill"]
    assert command(argv) == "python -m scripts.bench_x --lengths 'my lengths' --only fill"
