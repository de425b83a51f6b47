"""Which backward the executor fetches activations for while another action computes."""

from mmtrain.program import build_program
from mmtrain.program.ir.actions import Backward, Compute
from mmtrain.program.ir.segments import expand_all, started_pass
from mmtrain.runtime.execution.executor import _next_backwards
from tests.program.graphs import Unit, chain


def test_each_backward_is_announced_by_the_action_that_computes_before_it() -> None:
    program = build_program(chain(Unit("llm", pp=3), n=4))
    num_announced = 0
    for actions in program.actions.values():
        atomic = expand_all(program.graph, actions)
        upcoming = _next_backwards(program.graph, atomic)
        assert len(upcoming) == len(atomic)
        pairs = list(zip(atomic, upcoming, strict=True))
        computed = [(action, then) for action, then in pairs if isinstance(action, Compute)]
        for (_, then), (following, _) in zip(computed, [*computed[1:], (None, None)], strict=True):
            starts_backward = following is not None and isinstance(started_pass(program.graph, following), Backward)
            expected = (following.stage, following.mb) if following is not None and starts_backward else None
            assert then == expected
            num_announced += expected is not None
        others = [then for action, then in pairs if not isinstance(action, Compute)]
        assert others
        assert set(others) == {None}
    assert num_announced == 3 * 4
