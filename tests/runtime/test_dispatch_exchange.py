"""Dispatches move the rows that plain indexing selects, by what was decided of them before the step."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.program import Dispatch, Exchange, Microbatch, StageGraph, StepLoads, build_program, step_loads
from mmtrain.program.ir.actions import Payload
from mmtrain.runtime.execution.broker import Broker
from tests.program.test_dispatch import EDGE, NUM_REPLICAS, dispatching

WIDTH = 3


class _Mailboxes:
    """Collectives between the threads that stand for ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_REPLICAS, timeout=20)
        self.rows: dict[int, list[Tensor]] = {}
        self.num_exchanges = 0


class _Transport:
    device, dtype, widths = torch.device("cpu"), torch.float32, {EDGE: WIDTH}

    def __init__(self, rank: int, boxes: _Mailboxes) -> None:
        self.rank, self._boxes = rank, boxes

    def exchange(self, rows: Tensor, sent: list[int], received: list[int], action: Dispatch) -> Tensor:
        parts = self._swap(list(rows.split(sent)))
        from_ranks = [parts[rank][self.rank] for rank in range(NUM_REPLICAS)]
        assert [len(part) for part in from_ranks] == received
        return torch.cat(from_ranks)

    def gather_rows(self, rows: Tensor, num_rows: int, action: Dispatch) -> Tensor:
        padded = torch.cat([rows, torch.zeros(num_rows - len(rows), WIDTH)])
        parts = self._swap([padded])
        return torch.stack([parts[rank][0] for rank in range(NUM_REPLICAS)])

    def _swap(self, parts: list[Tensor]) -> dict[int, list[Tensor]]:
        self._boxes.rows[self.rank] = parts
        self._boxes.num_exchanges += 1
        self._boxes.barrier.wait()
        found = dict(self._boxes.rows)
        self._boxes.barrier.wait()
        return found


def _loads(graph: StageGraph, num_items: int, vision_n: int) -> StepLoads:
    rng = np.random.default_rng(num_items)
    replica, index = np.repeat(np.arange(NUM_REPLICAS), 2), np.tile(np.arange(2), NUM_REPLICAS)
    sample = np.sort(rng.integers(0, 6, num_items))
    position = np.arange(num_items) - np.searchsorted(sample, sample)
    of_rank, features = rng.integers(0, NUM_REPLICAS, num_items), rng.integers(1, 5, num_items)
    of_index = index[sample] * vision_n // 2
    order = np.lexsort((position, sample, of_index, of_rank))
    columns = (sample, position, features, np.ones_like(features), features, features, of_rank, of_index)
    items = ItemTable(*(column[order] for column in columns))
    numbers = np.arange(6)
    meta = BatchMeta(0, 0, numbers, numbers + 20, numbers * 0 + 1, replica, index, {"vision": items})
    return step_loads(graph, meta)


def _made(mb: Microbatch, num_rows: int) -> Tensor:
    first = 1000 * (mb.replica * 10 + mb.index + 1) + (500 if mb.unit == "llm" else 0)
    return (first + torch.arange(num_rows, dtype=torch.float32))[:, None].expand(num_rows, WIDTH)


def _wrong(rank: int, graph: StageGraph, loads: StepLoads, boxes: _Mailboxes) -> list[str]:
    """Run the forwards' dispatches of one rank, then the backwards'; return what arrived otherwise than it should."""
    actions = build_program(graph).for_rank(rank)
    broker = Broker(graph, actions, _Transport(rank, boxes), 1)  # type: ignore[arg-type]
    exchanges = broker.host_exchanges(loads)
    assert exchanges.keys() == {action for action in actions if isinstance(action, Dispatch)}
    broker.start_step(loads, broker.host_rows(loads), exchanges)
    broker._decide = None  # type: ignore[assignment]
    route = loads.routes["vision", "llm"].spans
    received = dict.fromkeys(loads.loads, 0)
    for (_, dst), spans in route.items():
        received[dst] += int(spans[:, 2].sum())
    wrong = []
    ways: tuple[Payload, Payload] = ("activation", "gradient")
    for payload in ways:
        forward = payload == "activation"
        num_rows = loads.rows_out if forward else received
        for action in (a for a in actions if isinstance(a, Dispatch) and a.payload == payload):
            made_by = Microbatch("vision", rank, action.src) if forward else Microbatch("llm", rank, action.dst)
            if (EDGE, made_by, payload) not in broker._held:
                broker.put(EDGE, made_by, payload, _made(made_by, num_rows[made_by]))
            broker.dispatch(action)
        for mb in (mb for mb in loads.loads if mb.replica == rank and mb.unit == ("llm" if forward else "vision")):
            expected = torch.zeros(received[mb] if forward else loads.rows_out[mb], WIDTH)
            for pair, spans in route.items():
                if pair[forward] == mb:
                    for span in spans.tolist():
                        begin, to, length = (span[0], span[1], span[2]) if forward else (span[1], span[0], span[2])
                        other = pair[not forward]
                        expected[to : to + length] = _made(other, num_rows[other])[begin : begin + length]
            if not torch.equal(broker.take(EDGE, mb, payload), expected):
                wrong.append(f"{payload}s of {mb}")
    return wrong


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("vision_n", [1, 2])
@pytest.mark.parametrize("num_items", [0, 1, 5, 40])
def test_what_is_decided_before_a_step_moves_the_right_rows(num_items: int, vision_n: int, exchange: Exchange) -> None:
    graph = dispatching(vision_n)
    graph = replace(graph, meshes=tuple(replace(mesh, exchange=exchange) for mesh in graph.meshes))
    loads, boxes = _loads(graph, num_items, vision_n), _Mailboxes()
    with ThreadPoolExecutor(NUM_REPLICAS) as ranks:
        wrong = list(ranks.map(lambda rank: _wrong(rank, graph, loads, boxes), range(NUM_REPLICAS)))
    assert wrong == [[]] * NUM_REPLICAS
    assert (boxes.num_exchanges > 0) == any(s.replica != d.replica for s, d in loads.routes["vision", "llm"].spans)
