"""A plan in one picture: a card for all ranks that hold the same stages, in the order in which data flows."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmtrain.plan.artifact.plan import Plan, StagePlan
from mmtrain.report.drawing import Box, Drawing, Label, Line, Mark, Paint, unit_paint
from mmtrain.report.rank_groups import (
    HeldUnit,
    Slice,
    UnitEdge,
    layers_text,
    recompute_text,
    slices,
    spans,
    stage_ranks,
    unit_edges,
)

CARD, GAP, ROW = 216, 44, 4  # width of a card, room for arrows between two, cards side by side
_PAD, _STAGE, _TP_GROUP, _TAG = 10, 34, 19, 14  # in a card; heights of a stage, a TP group, a line of small print
_MOST_TP_GROUPS, _MOST_CARDS, _MOST_STAGES = 4, 16, 12
_ROOMY, _SHORT_STAGE = 3, 17  # stages of a unit on a card, up to which each has two lines; height of one that has one
_LEGEND = 20


def plan_picture(plan: Plan) -> Drawing:
    """Draw who holds which layers, which of them are recomputed, replicas, TP groups, and what passes between units."""
    units, all_cards, edges = tuple(plan.units), slices(plan), unit_edges(plan)
    cards = all_cards[:_MOST_CARDS]
    marks: list[Mark] = list(_legend(plan, len(all_cards)))
    top = _LEGEND * (len(units) + 1) + 8.0
    for begin in range(0, len(cards), ROW):
        row = cards[begin : begin + ROW]
        height = max(_card_height(card, edges) for card in row)
        for place, card in enumerate(row):
            marks += _card(card, plan, edges, place * (CARD + GAP), top, height)
        for place, (left, right) in enumerate(pairwise(row)):
            marks += _arrow(plan, left, right, edges, place * (CARD + GAP) + CARD, top)
        top += height + 16
    width = min(len(cards), ROW) * (CARD + GAP) - GAP + 2
    return Drawing(max(width, 560), top, _about(plan, all_cards, edges), tuple(marks), scales=False)


def _legend(plan: Plan, num_cards: int) -> Iterator[Mark]:
    units = tuple(plan.units)
    for line, (name, unit) in enumerate(plan.units.items()):
        chunks = f", {unit.vpp} chunks a rank" if unit.vpp > 1 else ""
        sliced = ", sequence parallel" if unit.sp else ""
        count = plan.schedule.num_microbatches[name]
        words = f"tp {unit.tp} x pp {unit.pp} x dp {unit.dp}{chunks}{sliced}; {count} microbatches a replica"
        yield Box(0, line * _LEGEND + 3, 12, 12, unit_paint(name, units))
        yield Label(18, line * _LEGEND + 13, f"{name}: {words}", paint="ink")
    note = "a bar has a field for each layer; outlined: recomputed in backward"
    if num_cards > _MOST_CARDS:
        note += f"; the first {_MOST_CARDS} of {num_cards} sets of ranks"
    yield Label(0, len(units) * _LEGEND + 13, note, size=11)


def _card_height(card: Slice, edges: Sequence[UnitEdge]) -> float:
    stages = sum(
        min(len(h.stages), _MOST_STAGES) * _stage_height(h) + (len(h.stages) > _MOST_STAGES) * _TAG for h in card.held
    )
    heights = sum(_TAG + _TP_GROUP * min(len(tp_groups), _MOST_TP_GROUPS) + 4 for _, tp_groups in _alike(card.held))
    return 26 + stages + len(_tags(card, edges)) * _TAG + heights + _PAD


def _card(card: Slice, plan: Plan, edges: Sequence[UnitEdge], left: float, top: float, height: float) -> Iterator[Mark]:
    units = tuple(plan.units)
    yield Box(left, top, CARD, height, "line", 0.45)
    yield Label(left + _PAD, top + 18, _ranks_text(card.ranks), paint="ink", bold=True)
    y = top + 26
    for held in card.held:
        for stage in held.stages[:_MOST_STAGES]:
            draw = _stage if len(held.stages) <= _ROOMY else _short_stage
            yield from draw(held.unit, stage, units, left + _PAD, y)
            y += _stage_height(held)
        if len(held.stages) > _MOST_STAGES:
            yield Label(left + _PAD, y + 10, f"and {len(held.stages) - _MOST_STAGES} more stages", size=10)
            y += _TAG
    for tag in _tags(card, edges):
        yield Label(left + _PAD, y + 10, tag, paint="ink", size=10.5)
        y += _TAG
    for names, tp_groups in _alike(card.held):
        yield from _draw_tp_groups(names, tp_groups, units, left + _PAD, y)
        y += _TAG + _TP_GROUP * min(len(tp_groups), _MOST_TP_GROUPS) + 4


def _stage_height(held: HeldUnit) -> int:
    return _STAGE if len(held.stages) <= _ROOMY else _SHORT_STAGE


def _stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    paint, width = unit_paint(unit, units), CARD - 2 * _PAD
    lo, hi = stage.layers
    yield Label(left, y + 14, f"{unit}.{stage.stage}", paint="ink", bold=True)
    yield Label(left + width, y + 14, f"layer{'s' * (hi - lo != 1)} {layers_text(stage)}", "end", size=11)
    yield from _layers(unit, stage, paint, left, y + 19, width)


def _short_stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    """One of many chunks, in one line."""
    width = CARD - 2 * _PAD
    words = 0.6 * width
    yield Label(left, y + 12, f"{unit}.{stage.stage}", paint="ink", size=11, bold=True)
    yield Label(left + words - 6, y + 12, layers_text(stage), "end", size=10)
    yield from _layers(unit, stage, unit_paint(unit, units), left + words, y + 3, width - words)


def _layers(unit: str, stage: StagePlan, paint: Paint, left: float, y: float, width: float) -> Iterator[Mark]:
    lo, hi = stage.layers
    for first, last, recomputed in _runs(stage, by_one=hi - lo <= width / 5):
        x, end = (left + width * (at - lo) / (hi - lo) for at in (first, last))
        words = f"{unit} layers {first} to {last - 1}: {'recomputed' if recomputed else 'kept'}"
        yield Box(x + 0.5, y, end - x - 1, 10, paint, words=words, outlined=recomputed)


def _runs(stage: StagePlan, by_one: bool) -> Iterator[tuple[int, int, bool]]:
    """Layers [lo, hi) that are treated alike, each by itself where there is room."""
    lo, hi = stage.layers
    redone = set(stage.recompute)
    first = lo
    for layer in range(lo, hi):
        is_last = layer + 1 == hi or by_one or (layer + 1 in redone) != (layer in redone)
        if is_last:
            yield first, layer + 1, layer in redone
            first = layer + 1


def _tags(card: Slice, edges: Sequence[UnitEdge]) -> list[str]:
    """What the card's ranks hand to another unit or get from it."""
    found = []
    for held in card.held:
        last, first = held.stages[-1].stage, held.stages[0].stage
        for edge in edges:
            if edge.src == held.unit and last == edge.last_stage:
                found.append(f"{held.unit}.{last} → {edge.dst}: {edge.how}")
            if edge.dst == held.unit and first == 0 and edge.how != "local":
                found.append(f"{held.unit}.0 ← {edge.src}: {edge.how}")
    return found


def _alike(held: Sequence[HeldUnit]) -> list[tuple[list[str], tuple[tuple[int, tuple[int, ...]], ...]]]:
    """Units with the same TP groups together."""
    found: dict[tuple[tuple[int, tuple[int, ...]], ...], list[str]] = {}
    for unit in held:
        found.setdefault(unit.tp_groups, []).append(unit.unit)
    return [(names, tp_groups) for tp_groups, names in found.items()]


def _draw_tp_groups(
    names: Sequence[str],
    tp_groups: Sequence[tuple[int, tuple[int, ...]]],
    units: tuple[str, ...],
    left: float,
    y: float,
) -> Iterator[Mark]:
    tp = len(tp_groups[0][1])
    what = "one rank each" if tp == 1 else f"TP groups of {tp} ranks"
    replicas = f"{len(tp_groups)} replica{'s' * (len(tp_groups) > 1)}"
    yield Label(left, y + 10, f"{', '.join(names)}: {replicas}, {what}", size=10)
    y += _TAG
    indent, width = 58, CARD - 2 * _PAD - 58
    shown = tp_groups if len(tp_groups) <= _MOST_TP_GROUPS else tp_groups[: _MOST_TP_GROUPS - 1]
    for replica, ranks in shown:
        yield Label(left, y + 12, f"replica {replica}", size=10)
        cell = width / tp
        for place, rank in enumerate(ranks):
            words = f"rank {rank}: replica {replica}, place {place} of its TP group"
            paint: Paint = unit_paint(names[0], units) if len(names) == 1 else "soft"
            yield Box(left + indent + place * cell + 0.5, y + 1, cell - 1, _TP_GROUP - 4, paint, 0.3, words)
        fits = cell > 7 * len(str(ranks[-1]))
        texts = [(i, str(rank)) for i, rank in enumerate(ranks)] if fits else [((tp - 1) / 2, spans(ranks))]
        for at, text in texts:
            yield Label(left + indent + (at + 0.5) * cell, y + 12, text, "middle", paint="ink", size=10)
        y += _TP_GROUP
    if len(shown) < len(tp_groups):
        yield Label(left, y + 11, f"and {len(tp_groups) - len(shown)} more replicas like these", size=10)


def _arrow(plan: Plan, left: Slice, right: Slice, edges: Sequence[UnitEdge], x: float, top: float) -> Iterator[Mark]:
    """An arrow between neighbours where data flows from one to the other; with its name where it changes units."""
    words = None
    for held in left.held:
        after = held.stages[0].stage + 1
        if any(h.unit == held.unit and h.stages[0].stage == after for h in right.held):
            words = ""
        for edge in edges:
            enters = any(h.unit == edge.dst and h.stages[0].stage == 0 for h in right.held)
            if edge.src == held.unit and edge.last_stage == held.stages[-1].stage and enters and edge.how != "local":
                words = edge.how
    if words is None:
        return
    yield Line(((x + 3, top + 50), (x + GAP - 3, top + 50)), "ink", 1.5, arrow=True)
    for line, word in enumerate(words.split()):
        yield Label(x + GAP / 2, top + 64 + 12 * line, word, "middle", size=10)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    text = spans(ranks)
    if len(text) > 26:
        text = f"{spans(ranks[:1])} … {ranks[-1]}, {len(ranks)} in all"
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _about(plan: Plan, cards: Sequence[Slice], edges: Sequence[UnitEdge]) -> str:
    """The picture in words."""
    stages = [
        f"{name}.{stage.stage}, layers {layers_text(stage)}, recomputed {recompute_text(stage)}, on ranks "
        f"{spans(tuple(sorted(stage_ranks(unit, stage.stage))))}"
        for name, unit in plan.units.items()
        for stage in unit.stages
    ]
    joined = "; ".join(f"{edge.src} feeds {edge.dst} ({edge.how})" for edge in edges)
    return f"{plan.placement} plan, {len(cards)} sets of ranks. " + ". ".join([*stages, joined]) + "."
