"""One self-contained page about a plan or a run: its numbers are those of the artefacts, and it loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mmtrain.balance.summary import GroupingScore
from mmtrain.plan.artifact.plan import Plan
from mmtrain.report.drawing import UNIT_COLORS, svg, unit_color
from mmtrain.report.html_style import STYLE
from mmtrain.report.plain_text import memory_text, seconds_text
from mmtrain.report.plan_picture import plan_drawing
from mmtrain.report.rank_groups import layers_text, ranges_text, recompute_text, stage_ranks
from mmtrain.report.report_contents import IDLE_MEANINGS, ReportContents, drawn_steps, idle_shares, key_figures
from mmtrain.report.report_tables import balance_rows, figure_text, memory_rows, path_cells, row_cells
from mmtrain.report.timeline_picture import curve_drawing, timeline_drawing

MAX_UNFOLDED_ROWS = 16  # of stages; a table of more is folded


def html_page(contents: ReportContents) -> str:
    """Return the page."""
    plan, name = contents.plan, escape(contents.name)
    about = (
        f"{plan.placement} on {plan.world_size} ranks of {escape(plan.hardware)}, schedule {plan.schedule.kind}, "
        f"costs {escape(plan.predicted.cost_source)}; plan {plan.sha256[:12]}"
    )
    sections = {
        "Plan": _plan(plan),
        "Timeline of one step": _timelines(contents),
        "Critical path": _path(contents),
        "Idle time": _idle(contents),
        "Peak memory of each rank": _memory(contents),
        "Predicted and measured" if contents.trace else "Seconds a step, predicted": _rows(contents),
        "Balance of the data": _balance(contents.grouping_scores, contents.grouping_method),
        "Training": _training(contents.metrics),
        "Alternatives, and why they lost": _alternatives(plan),
    }
    body = "".join(f"<section><h2>{title}</h2>{drawn}</section>" for title, drawn in sections.items() if drawn)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{name}</h1><p>{about}</p>{_figures(contents)}{body}</main></body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], wordy: bool = False) -> str:
    """A table of text; `wordy` lets the last column wrap."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="wordy"' if wordy else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figures(contents: ReportContents) -> str:
    cards = []
    for figure in key_figures(contents):
        both = figure.measured is not None
        large, small = figure_text(figure, measured=both), ""
        if both and figure.predicted is not None:
            small = f"<span>predicted {escape(figure_text(figure, measured=False))}</span>"
        elif not both:
            small = "<span>predicted</span>"
        cards.append(
            f'<div><dt title="{escape(figure.meaning)}">{escape(figure.what)}</dt><dd><b>{escape(large)}</b>{small}'
            f"<small>{escape(figure.meaning)}</small></dd></div>"
        )
    return f'<dl class="figures">{"".join(cards)}</dl>'


def _plan(plan: Plan) -> str:
    rows = [
        (
            f"{name}.{stage.stage}",
            layers_text(stage),
            recompute_text(stage),
            ranges_text(tuple(sorted(stage_ranks(unit, stage.stage)))),
        )
        for name, unit in plan.units.items()
        for stage in unit.stages
    ]
    table = _table(("stage", "layers", "recomputed", "ranks"), rows)
    return svg(plan_drawing(plan)) + f"<details><summary>The same as a table</summary>{table}</details>"


def _timelines(contents: ReportContents) -> str:
    drawn, ranks = drawn_steps(contents)
    if not drawn:
        return ""
    units = tuple(contents.plan.units)
    legend = "".join(f'<b class="{unit_color(unit, units)}">■</b> {escape(unit)} ' for unit in units)
    words = (
        f"<p>{legend}forward full, backward pale, with the number of the microbatch. The thin row below each rank is "
        "communication; grey boxes among computations are spans too short to be drawn apart. Underlined in the "
        "simulated step: its critical path, where whatever takes longer makes the step longer.</p>"
    )
    if len(ranks) < contents.plan.world_size:
        words += (
            f"<p>{len(ranks)} of {contents.plan.world_size} ranks: one of each TP group of the replica group that the "
            "step waits for most. The others of a TP group do the same on their share, other groups on other "
            "samples.</p>"
        )
    longest = max(step.length_us for step in drawn)
    for step in drawn:
        words += f"<h3>{step.name}: {step.length_us / 1e3:.4g} ms</h3>"
        words += svg(timeline_drawing(step, units, ranks, longest))
    return words


def _bar(*shares: tuple[float, str], limit: float | None = None) -> str:
    """Bars under each other, each a share of the whole width; the cell's numbers stand beside them."""
    drawn = "".join(f'<i class="{kind}" style="width:{100 * min(share, 1):.2f}%"></i>' for share, kind in shares)
    line = "" if limit is None else f'<s style="left:{100 * min(limit, 1):.2f}%"></s>'
    return f'<td class="bar"><div aria-hidden="true">{drawn}{line}</div></td>'


def _bar_table(head: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], keys: Sequence[str] = ()) -> str:
    """A table whose rows end in bars; columns in `keys` say which of them is theirs."""
    key = '<b class="key {}" aria-hidden="true">■</b> '
    names = (f"{key.format(cell) if cell in keys else ''}{escape(cell)}" for cell in head)
    top = "".join(f'<th scope="col">{name}</th>' for name in names) + "<td></td>"
    lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f"{bar}</tr>" for cells, bar in rows)
    return f'<div class="scroll"><table class="bars"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _path(contents: ReportContents) -> str:
    rows = path_cells(contents)
    if not rows:
        return ""
    full = max(share for _, share in rows)
    note = "<p>What the simulated step waits for, one after another; the seconds add up to it.</p>"
    lines = [(cells, _bar((share / full, "whole"))) for cells, share in rows]
    return _bar_table(("work", "seconds", "share"), lines) + note


def _idle(contents: ReportContents) -> str:
    predicted, measured = idle_shares(contents)
    full = max(*predicted.values(), *(measured or {}).values(), 0.01)
    rows = []
    for kind, share in predicted.items():
        cells, bars = [kind, f"{share:.1%}"], [(share / full, "predicted")]
        if measured is not None:
            cells.append(f"{measured[kind]:.1%}")
            bars.append((measured[kind] / full, "measured"))
        rows.append((cells, _bar(*bars)))
    total = [f"{sum(shares.values()):.1%}" for shares in (predicted, measured) if shares is not None]
    rows.append((["all", *total], "<td></td>"))
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in IDLE_MEANINGS.items())
    head = ("kind", "predicted", *(("measured",) if measured is not None else ()))
    return _bar_table(head, rows, head[1:]) + f"<p>Shares of all rank-seconds of the step. {escape(meanings)}.</p>"


def _memory(contents: ReportContents) -> str:
    limit, rows = contents.memory_limit_gib, memory_rows(contents)
    if not rows:
        return ""
    full = max(limit, *(row.gib for row in rows))
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
    paints = dict(zip(kinds, (*UNIT_COLORS[: len(kinds) - 1], "soft"), strict=True)) if kinds else {}
    lines = []
    for row in rows:
        parts = [(gib / full, paints[kind]) for kind, gib in row.kinds.items()]
        bar = _parts(parts, limit / full) if parts else _bar((row.gib / full, "whole"), limit=limit / full)
        lines.append(((row.what, memory_text(row.gib), f"{row.gib / limit:.1%}", row.most), bar))
    legend = "".join(f'<b class="{paint}">■</b> {escape(kind)} ' for kind, paint in paints.items())
    note = f"{f'<p>{legend}</p>' if legend else ''}<p>The red line is the limit, {limit:.4g} GiB.</p>"
    detail = [(row.what, *(f"{row.kinds.get(kind, 0.0):.4g}" for kind in kinds)) for row in rows if row.kinds]
    table = f"<details><summary>By kind, in GiB</summary>{_table(('ranks', *kinds), detail)}</details>" if kinds else ""
    return _bar_table(("ranks", "peak", "of limit", "most of it"), lines) + note + table


def _parts(parts: Sequence[tuple[float, str]], limit: float) -> str:
    """One bar of parts side by side."""
    drawn = "".join(f'<u class="{paint}" style="width:{100 * share:.2f}%"></u>' for share, paint in parts)
    line = f'<s style="left:{100 * min(limit, 1):.2f}%"></s>'
    return f'<td class="bar"><div aria-hidden="true" class="parts">{drawn}{line}</div></td>'


def _rows(contents: ReportContents) -> str:
    if not contents.comparison:
        return ""
    measured = contents.trace is not None
    head = ("", "predicted", *(("measured", "error") if measured else ()))
    over = "Means over the recorded steps; of" if measured else "Of"
    note = f"<p>{over} a stage summed over its microbatches, replicas and ranks.</p>"
    cells = [row_cells(row, measured) for row in contents.comparison]
    if len(cells) <= MAX_UNFOLDED_ROWS:
        return _table(head, cells) + note
    hidden = (
        f"<details><summary>Each of {len(cells) - 1} stages and directions</summary>{_table(head, cells)}</details>"
    )
    return _table(head, cells[-1:]) + hidden + note  # the last one is the step


def _balance(scores: Sequence[GroupingScore], chosen: str) -> str:
    if not scores:
        return ""
    head, rows, note = balance_rows(scores, chosen)
    waits = [max(score.dist_ratio.values()) for score in scores]
    full = max(*waits, 1e-9)
    bars = (
        _bar((wait / full, "measured" if score.method == chosen else "predicted"))
        for score, wait in zip(scores, waits, strict=True)
    )
    bar_note = " The bar is dist of the unit that waits longest; full colour: this recipe." if max(waits) else ""
    return _bar_table(head, list(zip(rows, bars, strict=True))) + f"<p>{escape(note)}{bar_note}</p>"


def _training(metrics: Sequence[Mapping[str, Any]] | None) -> str:
    if metrics is None:
        return ""
    if not metrics:
        return "<p>No step was logged.</p>"
    drawn = ""
    for key, words, unit in (
        ("loss", "Loss", "nats a token"),
        ("val_loss", "Held-out loss", "nats a token"),
        ("tokens_per_s", "Throughput", "LLM tokens a second"),
        ("mfu", "MFU", "share of the peak"),
    ):
        points = [(m["step"], m.get(key)) for m in metrics if key in m]
        if not points:
            continue
        picture, last = curve_drawing(points, words, unit), points[-1][1]
        drawn += f"<div><h3>{words}, {unit}: last {'not finite' if last is None else f'{last:.4g}'}</h3>"
        drawn += ("<p>Fewer than two finite values.</p>" if picture is None else svg(picture)) + "</div>"
    return f'<div class="curves">{drawn}</div>'


def _alternatives(plan: Plan) -> str:
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
    return _table(("plan", "step", "memory", "why it lost"), rows, wordy=True)
