"""One self-contained page about a plan or a run: its numbers are those of the artefacts, and it loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mmtrain.balance.summary import Score
from mmtrain.plan.plan import Plan
from mmtrain.program import Timeline, chrome_trace
from mmtrain.report.comparison import Row, Trace
from mmtrain.report.html_svg import bars, curve, timeline

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2630;--soft:#5c6670;--ground:#fff;--line:#d9dee3;
--u0:#2b6cb0;--u1:#c05621;--u2:#2f855a;--u3:#805ad5;--u4:#b7791f;--u5:#b83280}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ee;--soft:#9aa6b2;--ground:#12171c;--line:#33404c;
--u0:#63a4e8;--u1:#ed8b4f;--u2:#5cbb8a;--u3:#a98bf0;--u4:#e0b04e;--u5:#e874b4}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:1000px;margin:0 auto;
padding:16px}h1{font-size:24px;overflow-wrap:anywhere}h2{font-size:17px;margin:32px 0 8px}p{color:var(--soft)}
.draw,.scroll{overflow-x:auto}svg{width:100%;min-width:640px;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:4px 16px 4px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{color:var(--soft);font-weight:500}
@media(max-width:600px){td,th{padding-right:9px;font-size:13px}}
.u0{fill:var(--u0);color:var(--u0)}.u1{fill:var(--u1);color:var(--u1)}.u2{fill:var(--u2);color:var(--u2)}
.u3{fill:var(--u3);color:var(--u3)}.u4{fill:var(--u4);color:var(--u4)}.u5{fill:var(--u5);color:var(--u5)}
.back{fill-opacity:.55}.comm{fill:var(--soft)}.merged{fill:var(--soft);fill-opacity:.5}.grid{stroke:var(--line)}
.line{stroke:var(--u0);stroke-width:2;fill:none}.limit{stroke:#d33;stroke-width:2}
"""


@dataclass(frozen=True)
class Contents:
    """What a page is drawn from. `simulated` is of the trace's steps where there is a trace."""

    name: str
    plan: Plan
    simulated: Sequence[Timeline]
    rows: Sequence[Row]
    memory_limit_gib: float
    scores: Sequence[Score] = ()
    chosen: str = ""  # the recipe's way of grouping
    trace: Trace | None = None
    metrics: Sequence[Mapping[str, Any]] | None = None  # None for a plan that was not run


def page(contents: Contents) -> str:
    """Return the page."""
    plan, name = contents.plan, escape(contents.name)
    about = (
        f"{plan.placement} on {plan.world_size} ranks of {escape(plan.hardware)}, schedule {plan.schedule.kind}, "
        f"costs {escape(plan.predicted.cost_source)}; plan {plan.sha256[:12]}"
    )
    sections = {
        "Plan": _plan(plan),
        "Timeline of one step": _timelines(contents),
        "Idle time, simulated": _bubbles(contents.simulated[0]),
        "Peak memory of each rank, predicted": _memory(plan, contents.memory_limit_gib),
        "Seconds a step": _rows(contents.rows),
        "Balance of the data": _balance(contents.scores, contents.chosen),
        "Training": _training(contents.metrics),
    }
    body = "".join(f"<section><h2>{title}</h2>{drawn}</section>" for title, drawn in sections.items() if drawn)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{name}</h1><p>{about}</p>{body}</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _plan(plan: Plan) -> str:
    rows = []
    for name, unit in plan.units.items():
        mesh = f"tp {unit.tp}, dp {unit.dp}, pp {unit.pp}" + (", sp" if unit.sp else "")
        for stage in unit.stages:
            # ranks are tp fastest, then dp, then pp
            size, place = unit.tp * unit.dp, stage.stage % unit.pp
            ranks = unit.ranks[place * size : (place + 1) * size]
            lo, hi = stage.layers
            rows.append(
                (
                    f"{name}.{stage.stage}",
                    mesh,
                    ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""),
                    f"{lo} to {hi - 1}",
                    ", ".join(map(str, stage.recompute)) or "none",
                    str(plan.schedule.num_microbatches[name]),
                )
            )
    return _table(("stage", "mesh", "ranks", "layers", "recomputed", "microbatches"), rows)


def _timelines(contents: Contents) -> str:
    units = list(contents.plan.units)
    legend = "".join(f'<b class="u{i % 6}">■</b> {escape(unit)} ' for i, unit in enumerate(units))
    first = contents.simulated[0]
    events = chrome_trace(first, "")["traceEvents"]
    drawn = f"<p>{legend}(backward lighter); grey: communication, and spans too short to be drawn apart.</p>"
    drawn += f"<p>Simulated: {first.step_time_s * 1e3:.2f} ms</p>"
    drawn += timeline(events, 0.0, first.step_time_s * 1e6, units)
    if contents.trace is not None:
        step = contents.trace.content["otherData"]["steps"][0]
        drawn += f"<p>Measured, step {step['step']}: {step['dur'] / 1e3:.2f} ms</p>"
        drawn += timeline(contents.trace.content["traceEvents"], step["ts"], step["dur"], units)
    return drawn


def _bubbles(step: Timeline) -> str:
    shares = {str(kind): 100 * share for kind, share in step.bubble_shares().items()}
    return bars(shares, max(*shares.values(), 1.0), "%")


def _memory(plan: Plan, limit_gib: float) -> str:
    peaks = {f"rank {ranks}": gib for ranks, gib in plan.predicted.peak_memory_gib.items()}
    return bars(peaks, max(limit_gib, *peaks.values()), "GiB", limit_gib) + f"<p>Red: limit, {limit_gib:.4g} GiB.</p>"


def _rows(rows: Sequence[Row]) -> str:
    cells = [
        (
            row.what,
            f"{row.predicted_s * 1e3:.2f} ms",
            "-" if row.measured_s is None else f"{row.measured_s * 1e3:.2f} ms",
            "-" if row.error is None else f"{row.error:+.1%}",
        )
        for row in rows
    ]
    return _table(("", "predicted", "measured", "error"), cells)


def _balance(scores: Sequence[Score], chosen: str) -> str:
    if not scores:
        return ""
    units = list(scores[0].dist_ratio)
    rows = [
        (
            f"{score.method} (this recipe)" if score.method == chosen else score.method,
            f"{score.fill:.3f}",
            *(f"{score.dist_ratio[unit]:.4f}" for unit in units),
            f"{score.max_over_mean:.4f}",
        )
        for score in scores
    ]
    note = "<p>dist: share of a step that a unit's replicas wait for the most loaded one.</p>"
    return _table(("grouping", "fill", *(f"dist {unit}" for unit in units), "max/mean"), rows) + note


def _training(metrics: Sequence[Mapping[str, Any]] | None) -> str:
    if metrics is None:
        return ""
    if not metrics:
        return "<p>No step was logged.</p>"
    return "".join(
        f"<p>{words}, last {_number(metrics[-1].get(key))}</p>"
        + curve([(m["step"], m.get(key)) for m in metrics], unit)
        for key, words, unit in (("loss", "Loss", "nats a token"), ("tokens_per_s", "Throughput", "LLM tokens/s"))
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
