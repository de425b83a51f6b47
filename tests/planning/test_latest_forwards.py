"""The LLM's forwards are delayed as far as its backwards allow."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planning.colocated.llm_alone import delay_forwards
from mmtrain.program import Backward, Forward, Send, TransferCost, action_to_text, build_program, simulate
from tests.program.graphs import Unit, chain
from tests.program.timings import Seconds

MESSAGE_S = 0.25


class WithMessages(Seconds):
    def message(self, sender: int, action: Send) -> TransferCost:
        return TransferCost(MESSAGE_S, 1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_forwards_are_delayed_and_the_step_is_no_longer(pp: int, vpp: int, n: int, trains: bool) -> None:
    graph = chain(Unit("llm", pp, num_stages=pp * vpp, trainable=(trains,) * pp * vpp), n=n)
    timing = WithMessages(llm=1.0)
    alone = simulate(build_program(graph), timing)
    spans = [s for s in alone.spans if isinstance(s.action, Forward | Backward)]
    late = delay_forwards(graph, spans)
    assert late.keys() == {s.action for s in spans}
    on_rank = defaultdict(list)
    for span in spans:
        on_rank[span.rank].append((late[span.action], span.duration_s, span.action))
        delay = late[span.action] - span.start_s
        assert delay == 0 if isinstance(span.action, Backward) else delay >= -1e-9
        if isinstance(span.action, Forward):
            for edge in graph.outputs(span.action.stage):
                reader = late[Forward(edge.dst, span.action.mb)]
                on_other_rank = graph.stage(edge.dst).tp_groups != graph.stage(edge.src).tp_groups
                assert reader >= late[span.action] + span.duration_s + (MESSAGE_S if on_other_rank else 0) - 1e-9
    for works in on_rank.values():
        assert all(
            a + seconds <= b + 1e-9 for (a, seconds, _), (b, _, _) in pairwise(sorted(works, key=lambda w: w[0]))
        )
    order = {
        rank: [action_to_text(action) for _, _, action in sorted(works, key=lambda w: w[0])]
        for rank, works in on_rank.items()
    }
    again = simulate(build_program(graph, kind="explicit", order=order), timing)
    assert again.step_time_s == pytest.approx(alone.step_time_s), "a shorter warm-up is as fast"


def test_the_warm_up_is_shortened_where_the_step_is_no_longer() -> None:
    """Delay some of the forwards that interleaved 1F1B starts early without need past a backward."""
    graph = chain(Unit("llm", 2, num_stages=4), n=4)
    spans = [
        s for s in simulate(build_program(graph), Seconds(llm=1.0)).spans if isinstance(s.action, Forward | Backward)
    ]
    late = delay_forwards(graph, spans)

    def warm_up(starts: dict[object, float]) -> list[int]:
        first = [min(starts[s.action] for s in spans if s.rank == r and isinstance(s.action, Backward)) for r in (0, 1)]
        return [
            sum(s.rank == r and isinstance(s.action, Forward) and starts[s.action] < first[r] for s in spans)
            for r in (0, 1)
        ]

    before, after = warm_up({s.action: s.start_s for s in spans}), warm_up(dict(late))
    assert after != before
    assert all(a <= b for a, b in zip(after, before, strict=True))
