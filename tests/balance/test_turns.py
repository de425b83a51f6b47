"""When microbatches run: blocks move together, on all replicas alike, and never to a longer step."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.balance import BatchMeta, Place, Price, SampleLengths, StepAims, assign
from mmtrain.balance.order import makespans
from tests.balance.test_assign import make_groups, make_lengths

PLACES = (
    Place({"vision": Price(40, 1)}, {"vision": Price(80, 2)}),
    Place({"llm": Price(9)}, {"llm": Price(18)}),
    Place({"llm": Price(9, 1)}, {"llm": Price(18, 2)}),
)
AIMS = StepAims(places=PLACES, items={"vision": Price(120, 3)})

cases = st.tuples(  # seed, dp of vision and of the llm, microbatches of each
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([3, 4, 6, 8]),
)
Case = tuple[int, int, int, int, int]


def laid_out(case: Case, aims: StepAims) -> tuple[SampleLengths, BatchMeta]:
    seed, dp_vision, dp_llm, num_vision, num = case
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3 * dp_llm * num)
    groups = make_groups(rng, 3 * dp_llm * num, dp_llm * num)
    dp, counts = {"vision": dp_vision, "llm": dp_llm}, {"vision": num_vision, "llm": num}
    return lengths, assign(0, 0, groups, lengths, dp, counts, aims)


def seconds(meta: BatchMeta, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(dp_llm, places, num) told from the finished layout: what each replica group's encoders do, shared evenly."""
    _, dp_vision, dp_llm, _, num = case
    g = math.gcd(dp_vision, dp_llm)
    table = meta.items["vision"]
    both = []
    for way in ("forward", "backward"):
        found = np.zeros((dp_llm, len(PLACES), num))
        for r, p, i in itertools.product(range(dp_llm), range(len(PLACES)), range(num)):
            prices = getattr(PLACES[p], way)
            if "llm" in prices:
                found[r, p, i] = prices["llm"].of(meta.tokens[meta.microbatch(r, i)]).sum()
            else:
                in_group = meta.replica[table.sample] // (dp_llm // g) == r // (dp_llm // g)
                here = in_group & (meta.index[table.sample] == i)
                found[r, p, i] = prices["vision"].of(table.tokens[here]).sum() // (dp_vision // g)
        both.append(found)
    return both[0], both[1]


@given(cases)
@settings(max_examples=60, deadline=None)
def test_an_order_in_time_moves_whole_blocks_and_lengthens_no_step(case: Case) -> None:
    _, _, dp_llm, num_vision, num = case
    (_, plain), (_, timed) = (laid_out(case, aims) for aims in (StepAims(items=AIMS.items), AIMS))

    def block(meta: BatchMeta, b: int) -> list[list[int]]:
        per = num // math.gcd(num, num_vision)
        mine = range(b * per, (b + 1) * per)
        return [sorted(meta.sample_id[meta.microbatch(r, i)].tolist()) for r in range(dp_llm) for i in mine]

    num_blocks = math.gcd(num, num_vision)
    blocks = [[block(meta, b) for b in range(num_blocks)] for meta in (plain, timed)]
    assert sorted(blocks[0]) == sorted(blocks[1]), "the same blocks, with the same microbatches on the same replicas"
    as_they_came = np.arange(num)[None]
    before, after = (float(makespans(*seconds(meta, case), as_they_came)[0]) for meta in (plain, timed))
    assert after <= before


def test_an_uneven_pipeline_comes_near_the_best_of_all_orders() -> None:
    ratios = []
    for seed in range(12):
        case = seed, 1, 1, 6, 6
        _, timed = laid_out(case, AIMS)
        orders = np.array(list(itertools.permutations(range(6))))
        spans = makespans(*seconds(timed, case), orders)
        ratios.append(float(spans[0] / spans.min()))  # the first is the order as it is
    assert max(ratios) < 1.03
    assert np.mean(ratios) < 1.01


@pytest.mark.parametrize("places", [(), PLACES[:1]])
def test_without_a_pipeline_microbatches_stay(places: tuple[Place, ...]) -> None:
    case = 1, 2, 2, 4, 4
    (_, plain), (_, same) = (laid_out(case, StepAims(places=p)) for p in ((), places))
    assert plain.sample_id.tolist() == same.sample_id.tolist()
    assert plain.index.tolist() == same.index.tolist()
