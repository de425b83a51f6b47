"""One self-contained HTML page about a plan or a run. The page loads nothing from elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mmtrain.balance.grouping.summary import GroupingScore
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program.ir.program import ranges_text
from mmtrain.report.comparison import comparison_cells, comparison_head
from mmtrain.report.drawing import DARK_COLORS, LIGHT_COLORS, UNIT_COLORS, Color, svg, unit_color
from mmtrain.report.expert_loads import ExpertLoads
from mmtrain.report.idle_time import IDLE_MEANINGS, IDLE_NAMES
from mmtrain.report.logged_totals import PHASE_HEAD, PHASE_TITLE, SOURCE_HEAD, phase_rows, sum_sources
from mmtrain.report.plain_text import exact_time_text, memory_text, seconds_text, time_spread_text
from mmtrain.report.plan_picture import plan_drawing
from mmtrain.report.rank_groups import layers_text, recompute_text, stage_ranks
from mmtrain.report.recorded_spread import recorded_spread
from mmtrain.report.report_contents import (
    ReportContents,
    drawn_steps,
    idle_shares,
    key_figures,
    rank_changes,
    run_costs,
)
from mmtrain.report.report_tables import MIN_FULL_BAR_SHARE, balance_rows, critical_path_cells, figure_text, memory_rows
from mmtrain.report.stage_spread import STAGE_SPREAD_HEAD, STAGE_SPREAD_NOTE, STAGE_SPREAD_TITLE, stage_spreads
from mmtrain.report.timeline_picture import curve_drawing, timeline_drawing

MAX_UNFOLDED_ROWS = 16  # a longer table of stages is folded
_COLOR_CLASSES = "".join(f".{color}{{fill:var(--{color});color:var(--{color})}}" for color in LIGHT_COLORS)


def html_page(*contents: ReportContents) -> str:
    """Write the page about a plan or a run; of several, the stages of a run, one below the other."""
    name = contents[0].name if len(contents) == 1 else ", ".join(of_stage.name for of_stage in contents)
    return page_html(name, "".join(map(_report_html, contents)), has_title=False)


def page_html(name: str, body: str, *, has_title: bool = True) -> str:
    """Write a page around its body, with the name as title unless the body brings its own."""
    title = f"<h1>{escape(name)}</h1>" if has_title else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head>"
        f"<body><main>{title}{body}</main></body></html>\n"
    )


def _report_html(contents: ReportContents) -> str:
    plan = contents.plan
    name = escape(contents.name)
    summary = (
        f"{plan.placement} on {plan.world_size} ranks of {escape(plan.hardware)}, schedule {plan.schedule.kind}, "
        f"costs {escape(plan.predicted.cost_source)}; plan {plan.sha256[:12]}"
    )
    sections = {
        "Plan": plan_html(plan),
        "Timeline of one step": timelines_html(contents),
        "Critical path": _critical_path(contents),
        "Idle time": _idle_time(contents),
        "Peak memory of each rank": _memory(contents),
        "Time per step, predicted and measured" if contents.trace else "Predicted time per step": comparison_html(
            contents
        ),
        STAGE_SPREAD_TITLE: _stage_spreads(contents),
        PHASE_TITLE: _phases(contents),
        "Load balance by grouping method": _balance(contents.grouping_scores, contents.grouping_method),
        "Training": training_html(contents.metrics),
        "Alternatives": alternatives_html(plan),
    }
    body = "".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections.items() if html)
    return f"<h1>{name}</h1><p>{summary}</p>{key_figures_html(contents)}{_costs(contents)}{body}"


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], wrap_last: bool = False) -> str:
    """Write a table of text; `wrap_last` lets the last column wrap."""
    head_cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    css_class = ' class="wordy"' if wrap_last else ""
    return (
        f'<div class="scroll"><table{css_class}><thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _bar_table(head: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], bar_columns: Sequence[str] = ()) -> str:
    """Write a table whose rows (cells, bar) end in a bar; a colored square marks the columns that the bars show."""
    head_cells = ""
    for cell in head:
        key = f'<b class="key {cell}" aria-hidden="true">■</b> ' if cell in bar_columns else ""
        head_cells += f'<th scope="col">{key}{escape(cell)}</th>'
    head_cells += "<td></td>"
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f"{bar}</tr>" for cells, bar in rows)
    return (
        f'<div class="scroll"><table class="bars"><thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _bar(*shares: tuple[float, str], limit: float | None = None) -> str:
    """Write a cell with one bar below the other, each (share of the full width, CSS class)."""
    bars = "".join(f'<i class="{css_class}" style="width:{_percent(share)}"></i>' for share, css_class in shares)
    return f'<td class="bar"><div aria-hidden="true">{bars}{_limit_line(limit)}</div></td>'


def _stacked_bar(parts: Sequence[tuple[float, str]], limit: float) -> str:
    """Write a cell with one bar made of parts side by side, each (share of the full width, color)."""
    bars = "".join(f'<u class="{color}" style="width:{_percent(share)}"></u>' for share, color in parts)
    return f'<td class="bar"><div aria-hidden="true" class="parts">{bars}{_limit_line(limit)}</div></td>'


def _limit_line(limit: float | None) -> str:
    return "" if limit is None else f'<s style="left:{_percent(limit)}"></s>'


def _percent(share: float) -> str:
    return f"{100 * min(share, 1):.2f}%"


def key_figures_html(contents: ReportContents) -> str:
    """Write a card for each key figure, predicted and measured."""
    cards = []
    for figure in key_figures(contents):
        is_measured = figure.measured is not None
        value = escape(figure_text(figure, measured=is_measured))
        note = ""
        if not is_measured:
            note = "<span>predicted</span>"
        elif figure.predicted is not None:
            note = f"<span>predicted {escape(figure_text(figure, measured=False))}</span>"
        meaning = escape(figure.meaning)
        cards.append(
            f'<div><dt title="{meaning}">{escape(figure.what)}</dt><dd><b>{value}</b>{note}'
            f"<small>{meaning}</small></dd></div>"
        )
    return f'<dl class="figures">{"".join(cards)}</dl>'


def _costs(contents: ReportContents) -> str:
    return "".join(f"<p>Cost, {what}: {escape(cost.to_text())}.</p>" for what, cost in run_costs(contents).items())


def plan_html(plan: Plan) -> str:
    """Draw which ranks hold which layers, with a table below the picture."""
    rows = []
    for name, unit in plan.units.items():
        for stage in unit.stages:
            ranks = ranges_text(tuple(sorted(stage_ranks(unit, stage.stage))))
            rows.append((f"{name}.{stage.stage}", layers_text(stage), recompute_text(stage), ranks))
    table = table_html(("stage", "layers", "recomputed", "ranks"), rows)
    return svg(plan_drawing(plan)) + f"<details><summary>As a table</summary>{table}</details>"


def timelines_html(contents: ReportContents) -> str:
    """Draw the first simulated step, and the same step as it was measured; empty without simulated steps."""
    steps, ranks = drawn_steps(contents)
    if not steps:
        return ""
    units = tuple(contents.plan.units)
    legend = "".join(f'<b class="{unit_color(unit, units)}">■</b> {escape(unit)} ' for unit in units)
    html = (
        f"<p>{legend}Forwards are opaque, backwards pale; numbers are microbatches. The thin row below each rank is "
        "communication. Gray boxes are spans too short to be drawn apart. The critical path of the simulated step is "
        "underlined: if an underlined computation takes longer, so does the step.</p>"
    )
    if len(ranks) < contents.plan.world_size:
        html += (
            f"<p>{len(ranks)} of {contents.plan.world_size} ranks are shown: one per TP group, of the replica group "
            "with most of the critical path. The other ranks of a TP group do the same work on their slices, the other "
            "replica groups on other samples.</p>"
        )
    longest_us = max(step.length_us for step in steps)
    for step in steps:
        html += f"<h3>{step.name}: {exact_time_text(step.length_us / 1e6)}</h3>"
        html += svg(timeline_drawing(step, units, ranks, longest_us))
    return html


def _critical_path(contents: ReportContents) -> str:
    rows = critical_path_cells(contents)
    if not rows:
        return ""
    largest = max(share for _, share in rows)
    lines = [(cells, _bar((share / largest, "whole"))) for cells, share in rows]
    note = "<p>The chain of work that decides the length of the simulated step; its times add up to the step.</p>"
    return _bar_table(("work", "time", "share"), lines) + note


def _idle_time(contents: ReportContents) -> str:
    predicted, measured = idle_shares(contents)
    largest = max(*predicted.values(), *(measured or {}).values(), MIN_FULL_BAR_SHARE)
    rows = []
    for kind, share in predicted.items():
        cells = [f"{IDLE_NAMES[kind]} ({kind})", f"{share:.1%}"]
        bars = [(share / largest, "predicted")]
        if measured is not None:
            cells.append(f"{measured[kind]:.1%}" if kind in measured else "-")
            bars.append((measured.get(kind, 0.0) / largest, "measured"))
        rows.append((cells, _bar(*bars)))
    totals = [f"{sum(shares.values()):.1%}" for shares in (predicted, measured) if shares is not None]
    rows.append((["all", *totals], "<td></td>"))
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in IDLE_MEANINGS.items())
    head = ("kind", "predicted") if measured is None else ("kind", "predicted", "measured")
    return _bar_table(head, rows, head[1:]) + f"<p>Shares of all rank-seconds of the step. {escape(meanings)}.</p>"


def _memory(contents: ReportContents) -> str:
    rows = memory_rows(contents)
    if not rows:
        return ""
    limit_gib = contents.memory_limit_gib
    full_gib = max(limit_gib, *(row.gib for row in rows))
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
    # Kinds beyond the colors are what no margin is added to: communicators and inputs.
    color_of = dict.fromkeys(kinds, "soft") | dict(zip(kinds[:-1], UNIT_COLORS, strict=False))
    lines = []
    for row in rows:
        if row.kinds:
            parts = [(gib / full_gib, color_of[kind]) for kind, gib in row.kinds.items()]
            bar = _stacked_bar(parts, limit_gib / full_gib)
        else:
            bar = _bar((row.gib / full_gib, "whole"), limit=limit_gib / full_gib)
        lines.append(((row.what, memory_text(row.gib), f"{row.gib / limit_gib:.1%}", row.largest_part), bar))
    html = _bar_table(("ranks", "peak", "of limit", "largest part"), lines)
    if kinds:
        legend = "".join(f'<b class="{color}">■</b> {escape(kind)} ' for kind, color in color_of.items())
        html += f"<p>{legend}</p>"
    html += f"<p>The red line is the limit, {limit_gib:.4g} GiB.</p>"
    if kinds:
        details = [(row.what, *(f"{row.kinds.get(kind, 0.0):.4g}" for kind in kinds)) for row in rows if row.kinds]
        html += f"<details><summary>By kind, in GiB</summary>{table_html(('ranks', *kinds), details)}</details>"
    return html


def _phases(contents: ReportContents) -> str:
    rows = phase_rows(contents.plan, contents.metrics)
    if not rows:
        return ""
    note = (
        "Sharded ranks wait for each other in every layer, so each mini-batch of a phase takes as long as on its "
        "fullest rank; tokens of the fullest ranks are summed over mini-batches. Before balancing, samples are where "
        "the stream has them, and images and clips with their samples."
    )
    return table_html(PHASE_HEAD, rows) + f"<p>{note}</p>"


def comparison_html(contents: ReportContents) -> str:
    """Write the seconds of every stage, predicted and measured; empty where nothing was simulated."""
    if not contents.comparison:
        return ""
    is_measured = contents.trace is not None
    head = ("stage", *comparison_head(is_measured))
    means = "Means over the recorded steps. " if is_measured else ""
    note = f"<p>{means}The time of a stage is the sum over its microbatches, replicas and ranks.</p>"
    rows = [comparison_cells(row, is_measured) for row in contents.comparison]
    if len(rows) <= MAX_UNFOLDED_ROWS:
        return table_html(head, rows) + note
    summary = f"All {len(rows) - 1} stages and directions"
    details = f"<details><summary>{summary}</summary>{table_html(head, rows)}</details>"
    return table_html(head, rows[-1:]) + details + note  # the last row is the step


def _stage_spreads(contents: ReportContents) -> str:
    rows = [spread.cells() for spread in stage_spreads(contents.trace, contents.simulated)]
    if not rows:
        return ""
    spread = recorded_spread(contents.trace, contents.simulated, contents.plan)
    recorded = f" Recorded {time_spread_text(spread.ranks, spread.layers)}." if spread is not None else ""
    return f"{table_html(STAGE_SPREAD_HEAD, rows)}<p>{escape(STAGE_SPREAD_NOTE + recorded)}</p>"


def _balance(scores: Sequence[GroupingScore], chosen: str) -> str:
    if not scores:
        return ""
    head, rows, note = balance_rows(scores, chosen)
    largest_dist = [max(score.dist_ratio.values()) for score in scores]
    full = max(*largest_dist, 1e-9)
    lines = []
    for score, cells, dist in zip(scores, rows, largest_dist, strict=True):
        css_class = "measured" if score.method == chosen else "predicted"  # opaque for the recipe's method
        lines.append((cells, _bar((dist / full, css_class))))
    bar_note = " Bars show the largest dist of a unit; the opaque bar is this recipe." if max(largest_dist) else ""
    return _bar_table(head, lines) + f"<p>{escape(note)}{bar_note}</p>"


def training_html(metrics: Sequence[Mapping[str, Any]] | None) -> str:
    """Draw the curves of a run, and what each source gave it; empty for a plan that was not run."""
    if metrics is None:
        return ""
    if not metrics:
        return "<p>No step was logged.</p>"
    changes = "".join(f"<p>{escape(sentence)}.</p>" for sentence in rank_changes(metrics))
    if loads := ExpertLoads.of_logged(metrics):
        changes += f"<p>{escape(' '.join(loads.sentences()))}</p>"
    rows = [source.cells() for source in sum_sources(metrics)]
    sources = table_html(SOURCE_HEAD, rows) if rows else ""
    return f'<div class="curves">{"".join(_curves(metrics))}</div>{changes}{sources}'


def _curves(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for key, title, unit in (
        ("loss", "Loss", "nats per token"),
        ("val_loss", "Held-out loss", "nats per token"),
        ("tokens_per_s", "Throughput", "LLM tokens/s"),
        ("mfu", "MFU", "share of peak FLOP/s"),
    ):
        points = [(step["step"], step.get(key)) for step in metrics if key in step]
        if not points:
            continue
        last = points[-1][1]
        last_text = "not finite" if last is None else f"{last:.4g}"
        drawing = curve_drawing(points, title, unit)
        picture = "<p>Fewer than two finite values.</p>" if drawing is None else svg(drawing)
        yield f"<div><h3>{title}, {unit}: last {last_text}</h3>{picture}</div>"


def alternatives_html(plan: Plan) -> str:
    """Write why each alternative was not chosen; empty without any."""
    if not plan.alternatives:
        return ""
    rows = [
        (
            other.summary,
            "-" if other.step_time_s is None else seconds_text(other.step_time_s),
            "-" if other.peak_memory_gib is None else memory_text(other.peak_memory_gib),
            other.reason,
        )
        for other in plan.alternatives
    ]
    return table_html(("plan", "step", "memory", "why not chosen"), rows, wrap_last=True)


def _css_variables(colors: Mapping[Color, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


# Of the parts of a page, which notebooks show as well (`notebook_html`).
PART_STYLE: str = f"""
h3{{font-size:14px;margin:18px 0 6px;font-weight:600}}p{{color:var(--soft);margin:6px 0;overflow-wrap:anywhere}}
summary{{color:var(--soft);cursor:pointer;margin:8px 0}}
.draw,.scroll{{overflow-x:auto;max-width:100%}}.draw:focus-visible{{outline:2px solid var(--u0)}}
svg{{display:block;width:100%;min-width:720px;font:12px system-ui,sans-serif}}svg[style]{{min-width:0;max-width:none}}
{_COLOR_CLASSES}
.path{{fill:none}}{"".join(f".{p}.path{{stroke:var(--{p})}}.{p}.edge{{stroke:var(--{p})}}" for p in LIGHT_COLORS)}
.curves{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 20px}}
.curves .draw svg{{min-width:0}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:8px;margin:16px 0}}
.figures div{{border:1px solid var(--line);border-radius:6px;padding:8px 12px}}
dt{{color:var(--soft);font-size:13px}}dd{{margin:0}}dd b{{font-size:20px;font-weight:600;display:block}}
dd span{{font-size:13px;display:block}}dd small{{color:var(--soft);font-size:11.5px;line-height:1.35;display:block;
margin-top:4px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
td,th{{padding:4px 16px 4px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}}
td:first-child,th:first-child,.wordy td:last-child,.wordy th:last-child{{text-align:left}}
th{{color:var(--soft);font-weight:500}}.wordy td{{vertical-align:top}}
.wordy td:first-child{{white-space:normal;min-width:150px}}.wordy td:last-child{{white-space:normal;min-width:220px}}
.bars{{width:100%}}.bars .bar{{width:70%;padding-right:6px}}.bar div{{position:relative;padding:2px 0}}
.bar i{{display:block;height:7px;min-width:1px;margin:1px 0;background:var(--u0)}}
.bar i.predicted,.key.predicted{{opacity:.4}}.key{{color:var(--u0)}}
.bar .parts{{display:flex}}.bar u{{display:block;height:12px;background:currentColor}}
.bar s{{position:absolute;top:-2px;bottom:-2px;border-right:2px solid var(--limit)}}
"""
STYLE = f"""
:root{{color-scheme:light dark;{_css_variables(LIGHT_COLORS)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_css_variables(DARK_COLORS)}}}}}
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);margin:0;
print-color-adjust:exact;-webkit-print-color-adjust:exact}}
main{{max-width:1032px;margin:0 auto;padding:16px}}
h1{{font-size:24px;margin:8px 0;overflow-wrap:anywhere}}h2{{font-size:18px;margin:36px 0 8px}}
section{{break-inside:avoid-page}}
{PART_STYLE}@media(max-width:600px){{main{{padding:12px}}td,th{{padding-right:9px;font-size:13px}}
.figures{{grid-template-columns:1fr 1fr}}.bars .bar{{width:40%;min-width:90px}}
.wordy,.wordy thead,.wordy tbody{{display:block}}.wordy td,.wordy th{{border:0}}
.wordy tr{{display:grid;grid-template-columns:1fr auto auto;border-bottom:1px solid var(--line)}}
.wordy tr :last-child{{grid-column:1/-1}}}}
"""
