"""Measure how fast a run's model answers held-out questions, and the parameters per rank, by layout.

    python scripts/bench_evaluate.py RUN [QUESTIONS]

Seconds are CPU seconds of the busiest rank without start-up and loading: reading and encoding media, and generating
answers token by token. For the last columns every answer has LONG_ANSWER_TOKENS tokens; `sum` is a checksum of all of
them, so layouts that generate the same answers show the same sum.
"""

import sys
import time
import zlib
from functools import partial
from pathlib import Path

import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import ChatTokenizer, build_index
from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.recipe import load_recipe
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE
from mmtrain.runtime.world import Address, World, join, leave

NUM_WARM_UP_QUESTIONS = 8
LONG_ANSWER_TOKENS = 128  # of an answer that does not end
Layout = dict[str, UnitPlan]


def main() -> None:
    """Measure every layout; print one row of a Markdown table for each."""
    run_dir = Path(sys.argv[1])
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    print("| layout | ranks | parameters on the fullest rank | seconds | tokens/s | long: seconds | tokens/s | sum |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (num_ranks, layout) in layouts(build_model_shape(load_recipe(run_dir / RECIPE_FILE).recipe)).items():
        launch_local(num_ranks, partial(measure, run_dir, limit, name, layout))


def layouts(model: ModelShape) -> dict[str, tuple[int, Layout]]:
    """Return the number of ranks and the layout of each row."""

    def of(encoder: partial[UnitPlan], llm: partial[UnitPlan]) -> Layout:
        return {unit.name: (llm if unit.kind == "llm" else encoder)(len(unit.layers)) for unit in model.units}

    on_rank_0 = partial(unit, ranks=(0,))
    return {
        "whole": (1, of(on_rank_0, on_rank_0)),
        "disaggregated": (2, of(on_rank_0, partial(unit, ranks=(1,)))),
        "LLM in two stages": (2, of(on_rank_0, partial(unit, ranks=(0, 1), pp=2))),
        "tensor-parallel": (2, of(partial(unit, ranks=(0, 1), tp=2), partial(unit, ranks=(0, 1), tp=2))),
        "two replicas": (2, of(partial(unit, ranks=(0, 1), dp=2), partial(unit, ranks=(0, 1), dp=2))),
    }


def unit(num_layers: int, *, ranks: tuple[int, ...], tp: int = 1, pp: int = 1, dp: int = 1) -> UnitPlan:
    """Return a unit whose layers are split evenly over `pp` stages."""
    bounds = [num_layers * i // pp for i in range(pp + 1)]
    stages = tuple(StagePlan(stage=i, layers=(bounds[i], bounds[i + 1])) for i in range(pp))
    return UnitPlan(tp=tp, pp=pp, dp=dp, ranks=ranks, stages=stages)


def measure(run_dir: Path, limit: int, name: str, layout: Layout, address: Address) -> None:
    """Answer as one rank; the first rank prints the row."""
    torch.set_num_threads(1)
    world = join(address)
    recipe = load_recipe(run_dir / RECIPE_FILE).recipe
    checkpoint = open_newest_good(run_dir / CHECKPOINTS_FOLDER, print, checkpoint_ranks(world))
    index = build_index(recipe, "validation")
    questions = select_questions(index, limit)
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
    endless = ChatTokenizer.load(recipe.data.tokenizer)
    endless.end_ids = frozenset()
    rates: list[float] = []
    for ending, max_new_tokens in ((tokenizer, None), (endless, LONG_ANSWER_TOKENS)):
        generator = load_generator(recipe, layout, world, checkpoint, ending)
        answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, max_new_tokens)
        answerer.answer(questions[:NUM_WARM_UP_QUESTIONS], blank=False)
        world.barrier()
        start_s = time.process_time()
        answers, _ = answerer.generate(questions, blank=False)
        seconds = time.process_time() - start_s
        num_end_tokens = int(max_new_tokens is None)  # each answer ends with one, which it does not hold
        num_tokens = sum(len(tokens) + num_end_tokens for tokens in answers.values())
        checksum = zlib.crc32(repr([*answers.values()]).encode())
        busiest_s = max_over_ranks(world, seconds)
        rates += [busiest_s, num_tokens / busiest_s]
        stages = [stage for unit in generator.units.values() for stage in unit.stages.values()]
        num_parameters = max_over_ranks(world, sum(param.numel() for stage in stages for param in stage.parameters()))
    if world.is_first:
        figures = "{:,.0f} | {:.2f} | {:.0f} | {:.2f} | {:.0f} | {:08x}".format(num_parameters, *rates, checksum)
        print(f"| {name} | {world.size} | {figures} |", flush=True)
    leave()


def max_over_ranks(world: World, value: float) -> float:
    """Return the largest of the ranks' values."""
    return max(float(str(of_rank)) for of_rank in world.all_gather(value))


if __name__ == "__main__":
    main()
