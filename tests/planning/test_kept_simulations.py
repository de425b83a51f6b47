"""What the evaluator keeps of earlier simulations gives what simulating anew gives."""

from itertools import islice

import pytest

from mmtrain.planning.evaluate.layout_simulation import simulate_layout
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
