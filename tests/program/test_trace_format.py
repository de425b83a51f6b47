"""The trace validator rejects what viewers would drop or misread."""

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.program import build_program, chrome_trace, simulate
from tests.program.graphs import Unit, chain
from tests.program.timings import Seconds
from tests.program.trace_format import require_trace

SHELL = "trace_processor_shell"

Trace = dict[str, Any]


@pytest.fixture(scope="module")
def trace() -> Trace:
    graph = chain(Unit("vision"), Unit("llm", 2), n=2)
    return chrome_trace(simulate(build_program(graph), Seconds(vision=1.0, llm=1.0)), "ab")


def spans(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "M"]


def test_a_simulated_step_passes(trace: Trace) -> None:
    require_trace(trace)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: spans(t)[0].update(dur=math.nan),
        lambda t: spans(t)[0].update(dur=math.inf),
        lambda t: spans(t)[0].update(dur=-1.0),
        lambda t: spans(t)[0].pop("dur"),
        lambda t: spans(t)[0].update(ts=-1e-3),
        lambda t: spans(t)[0].update(ts="0"),
        lambda t: spans(t)[0].update(pid="rank 0"),
        lambda t: spans(t)[0].update(pid=7),  # never named
        lambda t: spans(t)[0].update(tid=2),
        lambda t: spans(t)[0].update(ph="B"),
        lambda t: spans(t)[0].update(name=""),
        lambda t: spans(t)[0]["args"].pop("chunk"),
        lambda t: spans(t)[0]["args"].update(kind="forward"),
        lambda t: spans(t)[0]["args"].update(microbatch="0"),
        lambda t: spans(t)[0].update(dur=10 * spans(t)[0]["dur"]),  # into what follows on the track
        lambda t: names(t)[0].update(ts=0),
        lambda t: t["traceEvents"].append(names(t)[0]),
        lambda t: t.update(displayTimeUnit="us"),
        lambda t: t["otherData"].update(simulated="yes"),
        lambda t: t["otherData"].update(steps=(1, 2)),  # no JSON as it is
    ],
)
def test_what_viewers_would_misread_is_rejected(trace: Trace, spoil: Callable[[Trace], object]) -> None:
    spoiled = copy.deepcopy(trace)
    spoil(spoiled)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        require_trace(spoiled)


@pytest.mark.skipif(shutil.which(SHELL) is None, reason=f"no {SHELL} on PATH (it comes with Perfetto's releases)")
def test_perfetto_reads_every_span(trace: Trace, tmp_path: Path) -> None:
    """Run only where the binary is on PATH: the `perfetto` package would download it, and tests use no network."""
    perfetto = pytest.importorskip("perfetto.trace_processor")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    config = perfetto.TraceProcessorConfig(bin_path=shutil.which(SHELL))
    with perfetto.TraceProcessor(trace=str(path), config=config) as processor:
        [count] = processor.query("select count(*) as num from slice")
        [lost] = processor.query("select ifnull(sum(value), 0) as num from stats where severity = 'error'")
    assert (count.num, lost.num) == (len(spans(trace)), 0)
