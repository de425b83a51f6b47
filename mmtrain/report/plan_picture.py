"""A plan in one picture: a card for all ranks that hold the same stages, in the order in which data flows."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmtrain.plan.artifact.plan import Plan, StagePlan
from mmtrain.report.drawing import Box, Color, Drawing, Label, Mark, Polyline, unit_color
from mmtrain.report.rank_groups import (
    HeldUnit,
    RankGroup,
    UnitEdge,
    layers_text,
    ranges_text,
    rank_groups,
    recompute_text,
    stage_ranks,
    unit_edges,
)

# Sizes are in pixels of the page.
CARD_WIDTH_PX = 216
CARD_GAP_PX = 44  # room for an arrow between two cards
CARDS_PER_ROW = 4
_PADDING = 10  # inside a card
_STAGE_HEIGHT = 34  # two lines
_SHORT_STAGE_HEIGHT = 17  # one line
_MAX_TALL_STAGES = 3  # a unit with more stages on a card gets one line a stage
_REPLICA_HEIGHT = 19
_TEXT_HEIGHT = 14  # a line of small print
_LEGEND_HEIGHT = 20
_MAX_CARDS = 16
_MAX_STAGES = 12  # of a unit on a card
_MAX_REPLICAS = 4  # of a unit on a card


def plan_drawing(plan: Plan) -> Drawing:
    """Draw who holds which layers, which of them are recomputed, replicas, TP groups, and what passes between units."""
    units, all_cards, edges = tuple(plan.units), rank_groups(plan), unit_edges(plan)
    cards = all_cards[:_MAX_CARDS]
    marks: list[Mark] = list(_legend(plan, len(all_cards)))
    top = _LEGEND_HEIGHT * (len(units) + 1) + 8.0
    for begin in range(0, len(cards), CARDS_PER_ROW):
        row = cards[begin : begin + CARDS_PER_ROW]
        height = max(_card_height(card, edges) for card in row)
        for place, card in enumerate(row):
            marks += _card(card, plan, edges, place * (CARD_WIDTH_PX + CARD_GAP_PX), top, height)
        for place, (left, right) in enumerate(pairwise(row)):
            marks += _arrow(plan, left, right, edges, place * (CARD_WIDTH_PX + CARD_GAP_PX) + CARD_WIDTH_PX, top)
        top += height + 16
    width = min(len(cards), CARDS_PER_ROW) * (CARD_WIDTH_PX + CARD_GAP_PX) - CARD_GAP_PX + 2
    return Drawing(max(width, 560), top, _describe(plan, all_cards, edges), tuple(marks), full_width=False)


def _legend(plan: Plan, num_cards: int) -> Iterator[Mark]:
    units = tuple(plan.units)
    for line, (name, unit) in enumerate(plan.units.items()):
        chunks = f", {unit.vpp} chunks a rank" if unit.vpp > 1 else ""
        sliced = ", sequence parallel" if unit.sp else ""
        count = plan.schedule.num_microbatches[name]
        words = f"tp {unit.tp} x pp {unit.pp} x dp {unit.dp}{chunks}{sliced}; {count} microbatches a replica"
        yield Box(0, line * _LEGEND_HEIGHT + 3, 12, 12, unit_color(name, units))
        yield Label(18, line * _LEGEND_HEIGHT + 13, f"{name}: {words}", color="ink")
    note = "a bar has a field for each layer; outlined: recomputed in backward"
    if num_cards > _MAX_CARDS:
        note += f"; the first {_MAX_CARDS} of {num_cards} sets of ranks"
    yield Label(0, len(units) * _LEGEND_HEIGHT + 13, note, size=11)


def _card_height(card: RankGroup, edges: Sequence[UnitEdge]) -> float:
    stages = sum(
        min(len(h.stages), _MAX_STAGES) * _stage_height(h) + (len(h.stages) > _MAX_STAGES) * _TEXT_HEIGHT
        for h in card.units
    )
    heights = sum(
        _TEXT_HEIGHT + _REPLICA_HEIGHT * min(len(tp_groups), _MAX_REPLICAS) + 4
        for _, tp_groups in _units_by_tp_groups(card.units)
    )
    return 26 + stages + len(_edge_notes(card, edges)) * _TEXT_HEIGHT + heights + _PADDING


def _card(
    card: RankGroup, plan: Plan, edges: Sequence[UnitEdge], left: float, top: float, height: float
) -> Iterator[Mark]:
    units = tuple(plan.units)
    yield Box(left, top, CARD_WIDTH_PX, height, "line", 0.45)
    yield Label(left + _PADDING, top + 18, _ranks_text(card.ranks), color="ink", bold=True)
    y = top + 26
    for held in card.units:
        for stage in held.stages[:_MAX_STAGES]:
            draw = _stage if len(held.stages) <= _MAX_TALL_STAGES else _short_stage
            yield from draw(held.unit, stage, units, left + _PADDING, y)
            y += _stage_height(held)
        if len(held.stages) > _MAX_STAGES:
            yield Label(left + _PADDING, y + 10, f"and {len(held.stages) - _MAX_STAGES} more stages", size=10)
            y += _TEXT_HEIGHT
    for tag in _edge_notes(card, edges):
        yield Label(left + _PADDING, y + 10, tag, color="ink", size=10.5)
        y += _TEXT_HEIGHT
    for names, tp_groups in _units_by_tp_groups(card.units):
        yield from _draw_tp_groups(names, tp_groups, units, left + _PADDING, y)
        y += _TEXT_HEIGHT + _REPLICA_HEIGHT * min(len(tp_groups), _MAX_REPLICAS) + 4


def _stage_height(held: HeldUnit) -> int:
    return _STAGE_HEIGHT if len(held.stages) <= _MAX_TALL_STAGES else _SHORT_STAGE_HEIGHT


def _stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    paint, width = unit_color(unit, units), CARD_WIDTH_PX - 2 * _PADDING
    lo, hi = stage.layers
    yield Label(left, y + 14, f"{unit}.{stage.stage}", color="ink", bold=True)
    yield Label(left + width, y + 14, f"layer{'s' * (hi - lo != 1)} {layers_text(stage)}", "end", size=11)
    yield from _layers(unit, stage, paint, left, y + 19, width)


def _short_stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    """One of many chunks, in one line."""
    width = CARD_WIDTH_PX - 2 * _PADDING
    words = 0.6 * width
    yield Label(left, y + 12, f"{unit}.{stage.stage}", color="ink", size=11, bold=True)
    yield Label(left + words - 6, y + 12, layers_text(stage), "end", size=10)
    yield from _layers(unit, stage, unit_color(unit, units), left + words, y + 3, width - words)


def _layers(unit: str, stage: StagePlan, paint: Color, left: float, y: float, width: float) -> Iterator[Mark]:
    lo, hi = stage.layers
    for first, last, recomputed in _runs(stage, by_one=hi - lo <= width / 5):
        x, end = (left + width * (at - lo) / (hi - lo) for at in (first, last))
        words = f"{unit} layers {first} to {last - 1}: {'recomputed' if recomputed else 'kept'}"
        yield Box(x + 0.5, y, end - x - 1, 10, paint, tooltip=words, outlined=recomputed)


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


def _edge_notes(card: RankGroup, edges: Sequence[UnitEdge]) -> list[str]:
    """What the card's ranks hand to another unit or get from it."""
    found = []
    for held in card.units:
        last, first = held.stages[-1].stage, held.stages[0].stage
        for edge in edges:
            if edge.src == held.unit and last == edge.last_stage:
                found.append(f"{held.unit}.{last} → {edge.dst}: {edge.transport}")
            if edge.dst == held.unit and first == 0 and edge.transport != "local":
                found.append(f"{held.unit}.0 ← {edge.src}: {edge.transport}")
    return found


def _units_by_tp_groups(held: Sequence[HeldUnit]) -> list[tuple[list[str], tuple[tuple[int, tuple[int, ...]], ...]]]:
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
    y += _TEXT_HEIGHT
    indent, width = 58, CARD_WIDTH_PX - 2 * _PADDING - 58
    shown = tp_groups if len(tp_groups) <= _MAX_REPLICAS else tp_groups[: _MAX_REPLICAS - 1]
    for replica, ranks in shown:
        yield Label(left, y + 12, f"replica {replica}", size=10)
        cell = width / tp
        for place, rank in enumerate(ranks):
            words = f"rank {rank}: replica {replica}, place {place} of its TP group"
            paint: Color = unit_color(names[0], units) if len(names) == 1 else "soft"
            yield Box(left + indent + place * cell + 0.5, y + 1, cell - 1, _REPLICA_HEIGHT - 4, paint, 0.3, words)
        fits = cell > 7 * len(str(ranks[-1]))
        texts = [(i, str(rank)) for i, rank in enumerate(ranks)] if fits else [((tp - 1) / 2, ranges_text(ranks))]
        for at, text in texts:
            yield Label(left + indent + (at + 0.5) * cell, y + 12, text, "middle", color="ink", size=10)
        y += _REPLICA_HEIGHT
    if len(shown) < len(tp_groups):
        yield Label(left, y + 11, f"and {len(tp_groups) - len(shown)} more replicas like these", size=10)


def _arrow(
    plan: Plan, left: RankGroup, right: RankGroup, edges: Sequence[UnitEdge], x: float, top: float
) -> Iterator[Mark]:
    """An arrow between neighbours where data flows from one to the other; with its name where it changes units."""
    words = None
    for held in left.units:
        after = held.stages[0].stage + 1
        if any(h.unit == held.unit and h.stages[0].stage == after for h in right.units):
            words = ""
        for edge in edges:
            enters = any(h.unit == edge.dst and h.stages[0].stage == 0 for h in right.units)
            if (
                edge.src == held.unit
                and edge.last_stage == held.stages[-1].stage
                and enters
                and edge.transport != "local"
            ):
                words = edge.transport
    if words is None:
        return
    yield Polyline(((x + 3, top + 50), (x + CARD_GAP_PX - 3, top + 50)), "ink", 1.5, arrow=True)
    for line, word in enumerate(words.split()):
        yield Label(x + CARD_GAP_PX / 2, top + 64 + 12 * line, word, "middle", size=10)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    text = ranges_text(ranks)
    if len(text) > 26:
        text = f"{ranges_text(ranks[:1])} … {ranks[-1]}, {len(ranks)} in all"
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _describe(plan: Plan, cards: Sequence[RankGroup], edges: Sequence[UnitEdge]) -> str:
    """The picture in words."""
    stages = [
        f"{name}.{stage.stage}, layers {layers_text(stage)}, recomputed {recompute_text(stage)}, on ranks "
        f"{ranges_text(tuple(sorted(stage_ranks(unit, stage.stage))))}"
        for name, unit in plan.units.items()
        for stage in unit.stages
    ]
    joined = "; ".join(f"{edge.src} feeds {edge.dst} ({edge.transport})" for edge in edges)
    return f"{plan.placement} plan, {len(cards)} sets of ranks. " + ". ".join([*stages, joined]) + "."
