"""Draw a plan: one card for each group of ranks that hold the same stages, in the order of the data flow."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmtrain.planning.artifact.plan import Plan, StagePlan
from mmtrain.program.ir.program import ranges_text
from mmtrain.report.drawing import Box, Color, Drawing, Label, Mark, Polyline, unit_color
from mmtrain.report.rank_groups import (
    RankGroup,
    ReplicaRanks,
    UnitEdge,
    UnitStages,
    activation_notes,
    layers_text,
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
_MAX_TALL_STAGES = 3  # a unit with more stages on a card gets one line per stage
_REPLICA_HEIGHT = 19
_REPLICA_LABEL_WIDTH = 58
_TEXT_HEIGHT = 14  # a line of small print
_LEGEND_HEIGHT = 20
_MAX_CARDS = 16
_MAX_STAGES = 12  # of a unit on a card
_MAX_REPLICAS = 4  # of a unit on a card
_MAX_RANKS_TEXT = 26  # characters that fit into a card's title


def plan_drawing(plan: Plan) -> Drawing:
    """Draw which ranks hold which layers, which layers are recomputed, the replicas, and the edges between units."""
    cards = rank_groups(plan)
    edges = unit_edges(plan)
    drawn_cards = cards[:_MAX_CARDS]
    notes = _notes(plan, len(cards))
    marks: list[Mark] = list(_legend(plan, notes))
    top = _LEGEND_HEIGHT * (len(plan.units) + len(notes)) + 8.0
    pitch = CARD_WIDTH_PX + CARD_GAP_PX
    for row_start in range(0, len(drawn_cards), CARDS_PER_ROW):
        row = drawn_cards[row_start : row_start + CARDS_PER_ROW]
        height = max(_card_height(card, edges) for card in row)
        for column, card in enumerate(row):
            marks += _card(card, plan, edges, column * pitch, top, height)
        for column, (left, right) in enumerate(pairwise(row)):
            marks += _arrow(left, right, edges, column * pitch + CARD_WIDTH_PX, top)
        top += height + 16
    width = min(len(drawn_cards), CARDS_PER_ROW) * pitch - CARD_GAP_PX + 2
    return Drawing(max(width, 560), top, _describe(plan, cards, edges), tuple(marks), full_width=False)


def _notes(plan: Plan, num_cards: int) -> list[str]:
    """Write what the picture leaves unsaid, one line each."""
    note = "Each bar shows a stage's layers; outlined layers are recomputed in the backward pass"
    if num_cards > _MAX_CARDS:
        note += f"; the first {_MAX_CARDS} of {num_cards} groups of ranks"
    note += "."
    return [note, *activation_notes(plan)]


def _legend(plan: Plan, notes: Sequence[str]) -> Iterator[Mark]:
    units = tuple(plan.units)
    for line, (name, unit) in enumerate(plan.units.items()):
        context_parallel = f"cp {unit.cp} x " if unit.cp > 1 else ""
        virtual_stages = f", vpp {unit.vpp}" if unit.vpp > 1 else ""
        sequence_parallel = ", sequence parallel" if unit.sp else ""
        if unit.tp_chunks > 1:
            sequence_parallel += f", tp communication in {unit.tp_chunks} chunks"
        num_microbatches = plan.schedule.num_microbatches[name]
        text = (
            f"{name}: tp {unit.tp} x {context_parallel}pp {unit.pp} x dp {unit.dp}{virtual_stages}{sequence_parallel}; "
            f"{num_microbatches} microbatch{'es' * (num_microbatches != 1)} per replica"
        )
        yield Box(0, line * _LEGEND_HEIGHT + 3, 12, 12, unit_color(name, units))
        yield Label(18, line * _LEGEND_HEIGHT + 13, text, color="ink")
    for line, note in enumerate(notes, start=len(units)):
        yield Label(0, line * _LEGEND_HEIGHT + 13, note, size=11)


def _card_height(card: RankGroup, edges: Sequence[UnitEdge]) -> float:
    height = 26.0 + len(_edge_notes(card, edges)) * _TEXT_HEIGHT + _PADDING
    for held in card.units:
        height += min(len(held.stages), _MAX_STAGES) * _stage_height(held)
        if len(held.stages) > _MAX_STAGES:
            height += _TEXT_HEIGHT
    return height + sum(_replicas_height(replicas) for _, replicas in _units_by_replicas(card.units))


def _replicas_height(replicas: Sequence[ReplicaRanks]) -> float:
    return _TEXT_HEIGHT + _REPLICA_HEIGHT * min(len(replicas), _MAX_REPLICAS) + 4


def _card(
    card: RankGroup, plan: Plan, edges: Sequence[UnitEdge], left: float, top: float, height: float
) -> Iterator[Mark]:
    units = tuple(plan.units)
    yield Box(left, top, CARD_WIDTH_PX, height, "line", 0.45)
    left += _PADDING
    yield Label(left, top + 18, _ranks_text(card.ranks), color="ink", bold=True)
    y = top + 26
    for held in card.units:
        draw_stage = _stage if len(held.stages) <= _MAX_TALL_STAGES else _short_stage
        for stage in held.stages[:_MAX_STAGES]:
            yield from draw_stage(held.unit, stage, units, left, y)
            y += _stage_height(held)
        if len(held.stages) > _MAX_STAGES:
            yield Label(left, y + 10, f"and {len(held.stages) - _MAX_STAGES} more stages", size=10)
            y += _TEXT_HEIGHT
    for note in _edge_notes(card, edges):
        yield Label(left, y + 10, note, color="ink", size=10.5)
        y += _TEXT_HEIGHT
    for names, replicas in _units_by_replicas(card.units):
        yield from _replicas(names, replicas, units, left, y)
        y += _replicas_height(replicas)


def _stage_height(held: UnitStages) -> int:
    return _STAGE_HEIGHT if len(held.stages) <= _MAX_TALL_STAGES else _SHORT_STAGE_HEIGHT


def _stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    """Draw a stage on two lines: its name and layers, and a bar."""
    width = CARD_WIDTH_PX - 2 * _PADDING
    lo, hi = stage.layers
    yield Label(left, y + 14, f"{unit}.{stage.stage}", color="ink", bold=True)
    yield Label(left + width, y + 14, f"layer{'s' * (hi - lo != 1)} {layers_text(stage)}", "end", size=11)
    yield from _layers(unit, stage, unit_color(unit, units), left, y + 19, width)


def _short_stage(unit: str, stage: StagePlan, units: tuple[str, ...], left: float, y: float) -> Iterator[Mark]:
    """Draw a stage on one line, for a card with many model chunks."""
    width = CARD_WIDTH_PX - 2 * _PADDING
    text_width = 0.6 * width
    yield Label(left, y + 12, f"{unit}.{stage.stage}", color="ink", size=11, bold=True)
    yield Label(left + text_width - 6, y + 12, layers_text(stage), "end", size=10)
    yield from _layers(unit, stage, unit_color(unit, units), left + text_width, y + 3, width - text_width)


def _layers(unit: str, stage: StagePlan, color: Color, left: float, y: float, width: float) -> Iterator[Mark]:
    """Draw the layers as a bar, recomputed ones outlined; draw single layers if each is at least 5 pixels wide."""
    lo, hi = stage.layers
    for first, end, recomputed in _runs_of_layers(stage, single=hi - lo <= width / 5):
        x = left + width * (first - lo) / (hi - lo)
        x_end = left + width * (end - lo) / (hi - lo)
        tooltip = f"{unit} layers {first} to {end - 1}: {'recomputed' if recomputed else 'activations kept'}"
        yield Box(x + 0.5, y, x_end - x - 1, 10, color, tooltip=tooltip, outlined=recomputed)


def _runs_of_layers(stage: StagePlan, single: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield (first, end, recomputed) for runs of layers that are treated alike, or for every layer if `single`."""
    lo, hi = stage.layers
    recomputed = set(stage.recompute)
    first = lo
    for layer in range(lo, hi):
        is_last = single or layer + 1 == hi or (layer + 1 in recomputed) != (layer in recomputed)
        if is_last:
            yield first, layer + 1, layer in recomputed
            first = layer + 1


def _edge_notes(card: RankGroup, edges: Sequence[UnitEdge]) -> list[str]:
    """Write which edges between units start or end on the card's ranks."""
    notes = []
    for held in card.units:
        first = held.stages[0].stage
        last = held.stages[-1].stage
        for edge in edges:
            if edge.src == held.unit and last == edge.last_stage:
                notes.append(f"{held.unit}.{last} → {edge.dst}: {edge.transport}")
            if edge.dst == held.unit and first == 0 and edge.transport != "local":
                notes.append(f"{held.unit}.0 ← {edge.src}: {edge.transport}")
    return notes


def _units_by_replicas(held: Sequence[UnitStages]) -> list[tuple[list[str], tuple[ReplicaRanks, ...]]]:
    """Group the units whose replicas lie on the same ranks."""
    names: defaultdict[tuple[ReplicaRanks, ...], list[str]] = defaultdict(list)
    for unit_stages in held:
        names[unit_stages.replicas].append(unit_stages.unit)
    return [(unit_names, replicas) for replicas, unit_names in names.items()]


def _replicas(
    names: Sequence[str], replicas: Sequence[ReplicaRanks], units: tuple[str, ...], left: float, y: float
) -> Iterator[Mark]:
    """Draw a line for each replica, with a cell for each rank of its TP group."""
    tp = len(replicas[0].ranks)
    is_single = len(replicas) == 1
    count_text = "1 replica" if is_single else f"{len(replicas)} replicas"
    if tp > 1:
        group_text = f"TP group{'s' * (not is_single)} of {tp} ranks"
    else:
        group_text = "one rank" if is_single else "one rank each"
    yield Label(left, y + 10, f"{', '.join(names)}: {count_text}, {group_text}", size=10)
    y += _TEXT_HEIGHT
    color: Color = unit_color(names[0], units) if len(names) == 1 else "soft"
    x = left + _REPLICA_LABEL_WIDTH
    cell = (CARD_WIDTH_PX - 2 * _PADDING - _REPLICA_LABEL_WIDTH) / tp
    drawn = replicas if len(replicas) <= _MAX_REPLICAS else replicas[: _MAX_REPLICAS - 1]
    for replica in drawn:
        yield Label(left, y + 12, f"replica {replica.replica}", size=10)
        for tp_rank, rank in enumerate(replica.ranks):
            tooltip = f"rank {rank}: replica {replica.replica}, tensor-parallel rank {tp_rank}"
            yield Box(x + tp_rank * cell + 0.5, y + 1, cell - 1, _REPLICA_HEIGHT - 4, color, 0.3, tooltip)
        fits = cell > 7 * len(str(replica.ranks[-1]))
        if fits:
            texts = [(float(tp_rank), str(rank)) for tp_rank, rank in enumerate(replica.ranks)]
        else:
            texts = [((tp - 1) / 2, ranges_text(replica.ranks))]
        for position, text in texts:
            yield Label(x + (position + 0.5) * cell, y + 12, text, "middle", color="ink", size=10)
        y += _REPLICA_HEIGHT
    if len(drawn) < len(replicas):
        yield Label(left, y + 11, f"and {len(replicas) - len(drawn)} more replicas", size=10)


def _arrow(left: RankGroup, right: RankGroup, edges: Sequence[UnitEdge], x: float, top: float) -> Iterator[Mark]:
    """Draw an arrow between neighbors if data flows from one to the other; label it where it joins two units."""
    first_stages = {(held.unit, held.stages[0].stage) for held in right.units}
    transport = None
    for held in left.units:
        if (held.unit, held.stages[0].stage + 1) in first_stages:
            transport = ""
        for edge in edges:
            leaves_here = edge.src == held.unit and edge.last_stage == held.stages[-1].stage
            enters_there = (edge.dst, 0) in first_stages
            if leaves_here and enters_there and edge.transport != "local":
                transport = edge.transport
    if transport is None:
        return
    yield Polyline(((x + 3, top + 50), (x + CARD_GAP_PX - 3, top + 50)), "ink", 1.5, arrow=True)
    for line, word in enumerate(transport.split()):
        yield Label(x + CARD_GAP_PX / 2, top + 64 + 12 * line, word, "middle", size=10)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    text = ranges_text(ranks)
    if len(text) > _MAX_RANKS_TEXT:
        text = f"{ranges_text(ranks[:1])} … {ranks[-1]}, {len(ranks)} in total"
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _describe(plan: Plan, cards: Sequence[RankGroup], edges: Sequence[UnitEdge]) -> str:
    """Describe the picture in words, for screen readers."""
    stages = [
        f"{name}.{stage.stage}, layers {layers_text(stage)}, recomputed {recompute_text(stage)}, on ranks "
        f"{ranges_text(tuple(sorted(stage_ranks(unit, stage.stage))))}"
        for name, unit in plan.units.items()
        for stage in unit.stages
    ]
    feeds = "; ".join(f"{edge.src} feeds {edge.dst} ({edge.transport})" for edge in edges)
    text = f"{plan.placement} plan, {len(cards)} groups of ranks. " + ". ".join([*stages, feeds]) + "."
    return " ".join([text, *activation_notes(plan)])
