"""What the evaluator keeps of earlier simulations gives what simulating anew gives."""

from itertools import islice

import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout, simulate_unless_slow
from mmtrain.planning.space.candidate import Simulation
from tests.planning.exhaustive import everything, random_instance


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_kept_programs_and_simulations_change_nothing(seed: int) -> None:
    instance = random_instance(seed, max_partitions=60)
    evaluator = instance.evaluator
    steps = []
    for candidate in islice(everything(instance), 12):
        anew = simulate_layout(candidate.layout, candidate.schedule, evaluator.layer_costs, evaluator.problem.hardware)
        again = evaluator.simulate(candidate)
        for simulation in (candidate.simulation, again.simulation):
            assert simulation is not None
            assert simulation.step_time_s == anew.step_time_s
            assert simulation.bubbles == anew.bubbles
            assert simulation.graph == anew.graph
        steps.append(anew.step_time_s)
    assert len(set(steps)) > 2


def test_a_layout_that_a_limit_ended_is_simulated_again_for_a_higher_limit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = random_instance(4, max_partitions=60)
    evaluator, candidate = instance.evaluator, next(iter(everything(instance)))
    fitted = evaluator.simulate(candidate)
    assert fitted.simulation is not None
    first_batch_s = fitted.simulation.first_batch_step_s
    anew = Evaluator(evaluator.problem, evaluator.budget, evaluator.layer_costs)
    limits = []

    def counted(*args: object, max_first_batch_s: float, **kwargs: object) -> Simulation | None:
        limits.append(max_first_batch_s)
        return simulate_unless_slow(*args, max_first_batch_s=max_first_batch_s, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("mmtrain.planning.evaluate.evaluator.simulate_unless_slow", counted)
    shares = (0.5, 0.9, 0.7, 0.9, 1.1, 0.9, 2.0)
    found = [anew.simulate_unless_slow(candidate, share * first_batch_s) for share in shares]
    assert limits == [share * first_batch_s for share in (0.5, 0.9, 1.1)]
    assert [candidate is not None for candidate in found] == [share > 1 for share in shares]
