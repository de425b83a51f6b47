"""The broker moves the rows that plain indexing selects on random routes, for every ratio of replicas and dtype."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.costs import TokenLoad
from mmtrain.program import (
    Backward,
    Edge,
    Forward,
    Microbatch,
    Recv,
    Route,
    Send,
    Share,
    StageGraph,
    StepLoads,
    build_program,
)
from mmtrain.program.ir.actions import Payload
from mmtrain.program.verify.deadlock import send_window
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.process_groups import Transport, build_groups
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.program.graphs import Unit, chain

CPU = torch.device("cpu")
WIDTH = 3
WORLD = 8
NUM_DRAWS = 3
LIMIT = 1  # sends under way on a channel
NUM_MICROBATCHES = 4

# name -> (units, ranks of a TP group that share out the tokens of a unit)
CASES: dict[str, tuple[tuple[Unit, ...], dict[str, int]]] = {
    "2:3": ((Unit("vision", dp=2), Unit("llm", dp=3)), {}),
    "3:2": ((Unit("vision", dp=3), Unit("llm", dp=2)), {}),
    "1:4": ((Unit("vision"), Unit("llm", dp=4)), {}),
    "4:1": ((Unit("vision", dp=4), Unit("llm")), {}),
    "4:2, two replica groups": ((Unit("vision", dp=4), Unit("llm", dp=2)), {}),
    "tp2 to 2:3": ((Unit("vision", dp=2, tp=2), Unit("llm", dp=3)), {}),
    "3:2 to tp2": ((Unit("vision", dp=3), Unit("llm", dp=2, tp=2)), {}),
    "tp2 to tp2, 1:2": ((Unit("vision", tp=2), Unit("llm", dp=2, tp=2)), {}),
    "2:1 to tp2 pp2 with slices": ((Unit("vision", dp=2), Unit("llm", pp=2, tp=2)), {"llm": 2}),
    "two encoders, 1:2 and 2:2": ((Unit("vision"), Unit("audio", dp=2), Unit("llm", dp=2, pp=2)), {}),
    "2:3, two merged into one": ((Unit("vision", dp=2, n=2), Unit("llm", dp=3)), {}),
    "3:2, one split into two, tp2": ((Unit("vision", dp=3, n=8), Unit("llm", dp=2, tp=2)), {}),
    "a unit after the LLM": ((Unit("vision"), Unit("llm", dp=2, tp=2), Unit("generator", dp=3)), {}),
    "2:3 on the same ranks": ((Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", dp=3, ranks=(0, 1, 2))), {}),
    "one TP group, two encoder ranks": ((Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", tp=2, ranks=(0, 1))), {}),
}


@dataclass(frozen=True)
class Item:
    """Rows of a source microbatch that go to one destination microbatch, or to none."""

    src: Microbatch
    src_offset: int
    length: int
    dst: Microbatch | None
    dst_offset: int = 0


@dataclass(frozen=True)
class Draw:
    """The rows that every edge carries in one step."""

    loads: StepLoads
    items: dict[Edge, list[Item]]
    seed: int

    def rows(self, num: int, *key: object) -> Tensor:
        """Return the same rows for the same key on every rank; whole numbers, so that bf16 represents them exactly."""
        rng = np.random.default_rng([self.seed, *str(key).encode()])
        return torch.from_numpy(rng.integers(-99, 99, (num, WIDTH)).astype(np.float32))


def draw(graph: StageGraph, seed: int) -> Draw:
    """Draw microbatches of 0 to 4 items of 0 to 5 rows; each item goes to any microbatch that its source may feed."""
    rng = np.random.default_rng(seed)
    mbs = [Microbatch(m.unit, r, i) for m in graph.meshes for r in range(m.dp) for i in range(m.num_microbatches)]
    tokens = {mb: int(rng.integers(0, 6)) for mb in mbs}
    items: dict[Edge, list[Item]] = {}
    routes: dict[tuple[str, str], Route] = {}
    rows_out = dict(tokens)
    for edge in (e for e in graph.edges if e.crosses_units):
        items[edge] = _items(graph, edge, mbs, rng)
        spans: dict[tuple[Microbatch, Microbatch], list[tuple[int, int, int]]] = {}
        for item in sorted(items[edge], key=lambda item: item.dst_offset):
            if item.dst is not None and item.length:
                spans.setdefault((item.src, item.dst), []).append((item.src_offset, item.dst_offset, item.length))
        routes[edge.src.unit, edge.dst.unit] = Route({k: np.array(v, dtype=np.int64) for k, v in spans.items()})
        for mb in mbs:
            if mb.unit == edge.src.unit:
                rows_out[mb] = sum(item.length for item in items[edge] if item.src == mb)
    return Draw(StepLoads({mb: TokenLoad(n, n, n, 1) for mb, n in tokens.items()}, routes, rows_out), items, seed)


def _items(graph: StageGraph, edge: Edge, mbs: list[Microbatch], rng: np.random.Generator) -> list[Item]:
    items = []
    for src in (mb for mb in mbs if mb.unit == edge.src.unit):
        offset = 0
        for _ in range(int(rng.integers(0, 5))):
            choices = [*graph.destinations(edge, src), None] if rng.random() < 0.2 else graph.destinations(edge, src)
            item = Item(src, offset, int(rng.integers(0, 6)), choices[rng.integers(len(choices))])
            items.append(item)
            offset += item.length
    placed = []
    filled: Counter[Microbatch | None] = Counter()
    for k in rng.permutation(len(items)):
        item = items[k]
        placed.append(Item(item.src, item.src_offset, item.length, item.dst, filled[item.dst]))
        filled[item.dst] += item.length
    return placed


class Stages:
    """The units of one rank: they send made-up rows and compare the rows they receive with plain indexing."""

    def __init__(
        self, graph: StageGraph, rank: int, token_shards: dict[str, int], dtype: torch.dtype, step: Draw
    ) -> None:
        self.graph, self.rank, self.token_shards, self.dtype, self.step = graph, rank, token_shards, dtype, step
        self.wrong: list[str] = []

    def run(self, broker: Broker, action: Forward | Backward) -> None:
        forward = isinstance(action, Forward)
        ways: tuple[Payload, Payload] = ("activation", "gradient")
        payload = ways[0] if forward else ways[1]
        into = self.graph.inputs(action.stage)
        out_of = self.graph.outputs(action.stage)
        for edge in into if forward else out_of:
            received = broker.take(edge, action.mb, payload)
            expected = self.flows(edge, action.mb, payload)
            if received.dtype != self.dtype or not torch.equal(received, expected.to(self.dtype)):
                self.wrong.append(f"{action}: {payload}s over {edge} are {received.tolist()}, not {expected.tolist()}")
        for edge in out_of if forward else into:
            broker.put(edge, action.mb, payload, self.made(edge, action.mb, payload).to(self.dtype))

    def flows(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        """Return the rows that `mb` must receive over the edge."""
        if not edge.crosses_units:
            return self.made(edge, mb, payload)
        forward = payload == "activation"
        items = [i for i in self.step.items[edge] if (i.dst if forward else i.src) == mb]
        parts = [torch.zeros(0, WIDTH)]
        for item in sorted(items, key=lambda i: i.dst_offset if forward else i.src_offset):
            if item.dst is None:
                parts.append(torch.zeros(item.length, WIDTH))
            else:
                other, begin = (item.src, item.src_offset) if forward else (item.dst, item.dst_offset)
                parts.append(self.made(edge, other, payload)[begin : begin + item.length])
        return torch.cat(parts)

    def made(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        """Return the rows of `mb` that go over the edge: all of them, or a slice between stages of one unit."""
        if edge.crosses_units:
            into = sum(i.length for i in self.step.items[edge] if i.dst == mb)
            return self.step.rows(self.step.loads.rows_out[mb] if payload == "activation" else into, edge, mb, payload)
        share = self.token_shards.get(mb.unit, 1)
        num_tokens = self.step.loads.loads[mb].tokens
        tp_groups = (self.graph.tp_group(stage, mb.replica) for stage in (edge.src, edge.dst))
        place = next(tp_group.index(self.rank) for tp_group in tp_groups if self.rank in tp_group) if share > 1 else 0
        return self.step.rows(-(-num_tokens // share), edge, mb, payload, place)


def run_case(name: str, world: World) -> tuple[list[str], list[dict[str, int]]]:
    """Run all draws of a case on this rank; return what was wrong, and for each step the bytes sent by edge."""
    units, token_shards = CASES[name]
    graph = chain(*units, n=NUM_MICROBATCHES)
    groups = build_groups(graph, world)
    wrong: list[str] = []
    sent: list[dict[str, int]] = []
    if all(world.rank not in mesh.ranks for mesh in graph.meshes):
        return wrong, sent
    program = build_program(graph)
    assert send_window(program, LIMIT) == LIMIT, "or the sends below might wait for ever"
    actions = [a for a in program.for_rank(world.rank) if isinstance(a, Forward | Backward | Send | Recv | Share)]
    widths = dict.fromkeys(graph.edges, WIDTH)
    for seed in range(NUM_DRAWS):
        for dtype in (torch.float32, torch.bfloat16):
            step = draw(graph, seed)
            activity = Activity()
            stages = Stages(graph, world.rank, token_shards, dtype, step)
            transport = Transport(world.rank, groups, widths, token_shards, CPU, dtype)
            broker = Broker(graph, actions, transport, LIMIT, activity)
            # On a GPU rows that were not brought would be a copy that the device waits for.
            rows = broker.host_rows(step.loads) if dtype == torch.bfloat16 else None
            broker.start_step(step.loads, rows)
            activity.recorder.start_step()
            for action in actions:
                activity.start(action)
                match action:
                    case Forward() | Backward():
                        stages.run(broker, action)
                    case Send():
                        broker.send(action)
                        num_in_flight = max((len(channel) for channel in broker._sending.values()), default=0)
                        assert num_in_flight <= LIMIT, f"{num_in_flight} sends are under way"
                    case Recv():
                        broker.receive(action)
                    case Share():
                        broker.share(action)
            broker.drain()
            record = activity.recorder.stop_step()
            assert rows is None or broker._rows.keys() == rows.keys(), "rows were not listed ahead"
            wrong += [f"{name}, draw {seed}, {dtype}, rank {world.rank}: {text}" for text in stages.wrong]
            sent.append({str(edge): traffic.nbytes for edge, traffic in record.traffic_by_edge().items()})
    return wrong, sent


def run_cases(names: tuple[str, ...]) -> list[tuple[list[str], list[dict[str, int]]]]:
    world = World(dist.get_rank(), dist.get_world_size(), CPU)
    return [run_case(name, world) for name in names]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[list[str], list[dict[str, int]]]]]:
    """Run all cases in one world, because starting a world takes longer than they do; return the outcomes by case."""
    by_rank = run_ranks(WORLD, run_cases, tuple(CASES))
    return {name: [by_case[k] for by_case in by_rank] for k, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_every_row_comes_where_the_route_says(name: str, outcomes: dict) -> None:
    assert [text for wrong, _ in outcomes[name] for text in wrong] == []
    assert any(sent for _, sent in outcomes[name])


@pytest.mark.parametrize("name", [n for n, (units, _) in CASES.items() if all(not u.ranks for u in units)])
def test_between_units_each_row_travels_once_each_way(name: str, outcomes: dict) -> None:
    """Send a replica its rows once, however many ranks it has, and send no rows without a destination."""
    graph = chain(*CASES[name][0], n=NUM_MICROBATCHES)
    for seed in range(NUM_DRAWS):
        for draw_index, element_bytes in ((2 * seed, 4), (2 * seed + 1, 2)):
            for edge, items in draw(graph, seed).items.items():
                rows = sum(item.length for item in items if item.dst is not None)
                sent_bytes = sum(sent[draw_index].get(str(edge), 0) for _, sent in outcomes[name] if sent)
                assert sent_bytes == 2 * rows * WIDTH * element_bytes
