"""How fast a run's model answers its held-out questions, and what each rank holds of it, by layout.

    python scripts/bench_evaluate.py RUN [QUESTIONS]

Seconds are those of the busiest rank's processor, start-up and loading apart: media are read, encoded, and answers
written token by token. The last columns let every answer run on to LONG tokens, and sum up all of these: layouts that
write the same show the same sum.
"""

import sys
import time
import zlib
from functools import partial
from pathlib import Path

import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import ChatTokenizer, build_index
from mmtrain.models.model_shape import ModelShape, build_model_shape
from mmtrain.plan.artifact.plan import StagePlan, UnitPlan
from mmtrain.recipe import load_recipe
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE
from mmtrain.runtime.world import Address, World, join, leave

WARM_UP = 8  # questions
LONG = 128  # tokens of an answer that does not end
Layout = dict[str, UnitPlan]


def main() -> None:
    run_dir = Path(sys.argv[1])
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    print("| layout | ranks | parameters on the fullest rank | seconds | tokens/s | long: seconds | tokens/s | sum |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (num_ranks, layout) in layouts(build_model_shape(load_recipe(run_dir / RECIPE_FILE).recipe)).items():
        launch_local(num_ranks, partial(measure, run_dir, limit, name, layout))


def layouts(model: ModelShape) -> dict[str, tuple[int, Layout]]:
    def of(encoder: partial[UnitPlan], llm: partial[UnitPlan]) -> Layout:
        return {unit.name: (llm if unit.kind == "llm" else encoder)(len(unit.layers)) for unit in model.units}

    whole = partial(unit, ranks=(0,))
    return {
        "whole": (1, of(whole, whole)),
        "disaggregated": (2, of(whole, partial(unit, ranks=(1,)))),
        "LLM in two stages": (2, of(whole, partial(unit, ranks=(0, 1), pp=2))),
        "tensor-parallel": (2, of(partial(unit, ranks=(0, 1), tp=2), partial(unit, ranks=(0, 1), tp=2))),
        "two replicas": (2, of(partial(unit, ranks=(0, 1), dp=2), partial(unit, ranks=(0, 1), dp=2))),
    }


def unit(num_layers: int, *, ranks: tuple[int, ...], tp: int = 1, pp: int = 1, dp: int = 1) -> UnitPlan:
    cuts = [num_layers * i // pp for i in range(pp + 1)]
    stages = tuple(StagePlan(stage=i, layers=(cuts[i], cuts[i + 1])) for i in range(pp))
    return UnitPlan(tp=tp, pp=pp, dp=dp, ranks=ranks, stages=stages)


def measure(run_dir: Path, limit: int, name: str, layout: Layout, address: Address) -> None:
    torch.set_num_threads(1)
    world = join(address)
    recipe = load_recipe(run_dir / RECIPE_FILE).recipe
    checkpoint = open_newest_good(run_dir / CHECKPOINTS_FOLDER, print, checkpoint_ranks(world))
    index, tokenizer = build_index(recipe, "validation"), ChatTokenizer.load(recipe.data.tokenizer)
    endless = ChatTokenizer.load(recipe.data.tokenizer)
    endless.end_id = -1
    rates: list[float] = []
    for ending, max_new_tokens in ((tokenizer, None), (endless, LONG)):
        generator = load_generator(recipe, layout, world, checkpoint, ending)
        asker, questions = (
            QuestionAnswerer(generator, recipe, tokenizer, index, world, max_new_tokens),
            select_questions(index, limit),
        )
        asker.answer(questions[:WARM_UP], blank=False)
        world.barrier()
        begin = time.process_time()
        written, _ = asker.generate(questions, blank=False)
        seconds = time.process_time() - begin
        num_tokens = sum(len(tokens) + (max_new_tokens is None) for tokens in written.values())  # with the last one
        checksum = zlib.crc32(repr([*written.values()]).encode())
        busiest = most(world, seconds)
        rates += [busiest, num_tokens / busiest]
        stages = [stage for unit in generator.units.values() for stage in unit.stages.values()]
        held = most(world, sum(param.numel() for stage in stages for param in stage.parameters()))
    if world.is_first:
        figures = "{:,.0f} | {:.2f} | {:.0f} | {:.2f} | {:.0f} | {:08x}".format(held, *rates, checksum)
        print(f"| {name} | {world.size} | {figures} |", flush=True)
    leave()


def most(world: World, value: float) -> float:
    return max(float(str(theirs)) for theirs in world.all_gather(value))


if __name__ == "__main__":
    main()
