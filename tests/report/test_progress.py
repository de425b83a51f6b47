"""Progress is printed as lines without a terminal, and as a panel that fits on a terminal."""

import io
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mmtrain.report import TimeSplit, open_progress
from mmtrain.report.live_display import LineProgress, LiveProgress, sparkline
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.step_text import ProgressClock, clock_text
from tests.report.conftest import Clock, metrics


class Screen(io.StringIO):
    """A terminal, as far as programs can tell."""

    def isatty(self) -> bool:
        return True


def terminal(width: int) -> Console:
    return Console(file=Screen(), force_terminal=True, width=width, height=30, _environ={"TERM": "xterm-256color"})


def test_plain_lines() -> None:
    file = io.StringIO()
    clock = Clock()
    with open_progress(Console(file=file, width=60), "demo", 400, first_step=120, clock=clock) as progress:
        clock.now = 0.5
        progress.step(metrics(120))
        clock.now = 1.0
        progress.step(metrics(121, val_loss=1.3, val_exact=0.4))
        progress.note("saved [bold]runs/demo/checkpoints/step-00000121 " + 60 * "x")
    assert file.getvalue().splitlines() == [
        "step  120/400  loss 1.2393  lr 3.0e-04  gnorm 0.81  tok/s 12.3k  mfu 3.1%  left 2:20  "
        "| compute 71% wait 20% comm 5% data 4%",
        "step  121/400  loss 1.2273  val 1.3000  exact 40.0%  lr 3.0e-04  gnorm 0.81  tok/s 12.3k  mfu 3.1%  "
        "left 2:20  | compute 71% wait 20% comm 5% data 4%",
        "saved [bold]runs/demo/checkpoints/step-00000121 " + 60 * "x",
    ]


@pytest.mark.parametrize(("term", "kind"), [("xterm", LiveProgress), ("dumb", LineProgress)])
def test_the_display_suits_the_console(term: str, kind: type) -> None:
    console = Console(file=Screen(), force_terminal=True, _environ={"TERM": term})
    assert isinstance(open_progress(console, "demo", 10), kind)
    in_a_log = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})  # as FORCE_COLOR has it
    assert isinstance(open_progress(in_a_log, "demo", 10), LineProgress)
    assert isinstance(open_progress(Console(file=io.StringIO()), "demo", 10), LineProgress)


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_fits_and_shows_every_figure(width: int) -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=width, record=True)
    panel = LiveProgress(console, "demo", ProgressClock(400, 1, clock))
    console.print(panel)
    before = console.export_text()
    assert "waiting for the first step" in before
    for step in range(1, 121):
        clock.now += 0.5
        panel.step(metrics(step, **({"val_loss": 1.3, "val_exact": 0.4} if step == 100 else {})))
    console.print(panel)
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) == 6
    text = "\n".join(lines)
    for figure in (
        *(
            "demo",
            "step 120/400",
            "30%",
            "1:00 elapsed, 2:20 left",
            "loss 1.2393",
            "val 1.3000",
            "exact 40.0%",
            "lr 3.0e-04",
        ),
        *("grad norm 0.81", "12.3k tok/s", "44 samples/s", "MFU 3.1%", "1.5 GiB"),
        *("compute 71%", "wait 20%", "comm 5%", "data 4%", "█▇", "▁"),
    ):
        assert figure in text


@pytest.mark.parametrize("width", [20, 80, 120])
def test_the_live_display_runs_to_its_end_on_a_terminal(width: int) -> None:
    console = terminal(width)
    clock = Clock()
    with open_progress(console, "demo", 3, clock=clock) as progress:
        assert isinstance(progress, LiveProgress)
        for step in (1, 2, 3):
            clock.now += 1
            progress.step(metrics(step, loss=math.nan if step == 2 else 1.0))
        progress.note("saved [step 3]")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "saved [step 3]" in written
    assert width == 20 or "step 3/3" in written


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80)
    panel = LiveProgress(console, "demo", ProgressClock(10, 1, Clock()))
    panel.step(metrics(1))
    panel.step(metrics(2))
    console.print(panel)
    console.file.flush()
    assert "loss 3.9553  @_" in raw.getvalue().decode("ascii")


def test_the_remaining_time_decreases_between_steps() -> None:
    clock = Clock()
    progress_clock = ProgressClock(num_steps=10, first_step=5, clock=clock)
    assert progress_clock.remaining_s is None
    clock.now = 4
    progress_clock.finish_step(6)
    assert (progress_clock.elapsed_s, progress_clock.remaining_s) == (4, 8)
    clock.now = 7
    assert (progress_clock.elapsed_s, progress_clock.remaining_s) == (7, 5)
    clock.now = 99
    assert progress_clock.remaining_s == 0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32)), st.integers(1, 50))
def test_a_sparkline_is_never_too_wide_and_keeps_order(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    finite = [value for value in values if math.isfinite(value)]
    assert len(line) == min(width, len(finite))
    if len(finite) <= width:
        pairs = sorted(zip(finite, line, strict=True))
        assert all(low[1] <= high[1] for low, high in pairwise(pairs))


def test_a_sparkline_of_equal_values_is_flat() -> None:
    assert sparkline([2.0, 2.0], 60) == "▁▁"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (950, "950"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (12345, "12.3k"),
        (99999, "100k"),
        (999_999, "1.00M"),
        (4.5e6, "4.50M"),
        (2e12, "2.00T"),
    ],
)
def test_compact_number(number: float, text: str) -> None:
    assert compact_number(number) == text


@given(st.floats(1e-3, 1e14))
def test_compact_numbers_are_short_and_close(number: float) -> None:
    text = compact_number(number)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMGT")) * factor == pytest.approx(number, rel=6e-3)
    assert number < 1 or len(text) <= 5


def test_clock_text() -> None:
    assert [clock_text(seconds) for seconds in (None, 0, 59.6, 98.4, 7325, math.inf)] == [
        *("-:--", "0:00", "1:00", "1:38", "2:02:05", "-:--")
    ]


def test_shares_without_measurements_are_zero() -> None:
    assert set(TimeSplit(0, 0, 0, 0).shares().values()) == {0.0}
    assert sum(TimeSplit(0.3, 0.1, 0.2, 0.1).shares().values()) == pytest.approx(1)
