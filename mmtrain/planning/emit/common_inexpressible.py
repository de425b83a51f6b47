"""What several other trainers leave out of a plan, in the same words."""

from collections.abc import Collection, Iterator

from mmtrain.planning.emit.emitted_plan import Inexpressible, PlannedJob


def data_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say what of the data no other trainer does, and which parameters it does not keep fixed."""
    yield Inexpressible(
        f"samples are packed into groups of up to {job.seq_len} tokens that cost the replicas of a step the same",
        "its own loader fills and orders batches",
        lengthens=True,
    )
    yield from freeze_inexpressible(job)
    yield from optimizer_inexpressible(job)


def freeze_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say which parameters train there although the recipe keeps them fixed by their names."""
    if job.recipe.train.freeze:
        yield Inexpressible(f"train.freeze keeps {', '.join(job.recipe.train.freeze)} fixed", "they train", True)


def optimizer_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say what of the optimizer is other there: Muon, and rates that differ between layers."""
    optimizer = job.recipe.train.optimizer
    if optimizer.kind == "muon":
        yield Inexpressible("Muon trains the linears", "AdamW trains all parameters, with two moments")
    if optimizer.layer_lr_decay != 1:
        what = f"the learning rate decays from block to block by {optimizer.layer_lr_decay:g}"
        yield Inexpressible(what, "all layers have one rate")


def moments_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say that the optimizer's state is larger there, if it is."""
    if job.recipe.train.optimizer.moments == "bf16":
        yield Inexpressible("Adam's moments are bf16", "they are fp32, which takes more memory")


PLAIN_SCHEDULES = ("constant", "cosine", "linear")  # those that every other trainer knows
# What Megatron-core calls schedules and cool-downs.
MEGATRON_SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "WSD",
    "inverse_sqrt": "inverse-square-root",
}
MEGATRON_COOLDOWNS = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def plain_schedule(job: PlannedJob) -> str:
    """Return the schedule for a trainer that knows plain ones; of others `schedule_inexpressible` tells."""
    schedule = job.recipe.train.optimizer.schedule
    return schedule if schedule in PLAIN_SCHEDULES else "constant"


def schedule_inexpressible(job: PlannedJob, allowed: Collection[str]) -> Iterator[Inexpressible]:
    """Say that the learning rate follows another course there, for trainers that know the `allowed` schedules."""
    train = job.recipe.train
    optimizer = train.optimizer
    if optimizer.schedule not in allowed:
        what = f"the learning rate follows `{optimizer.schedule}`"
        yield Inexpressible(what, f"it knows {', '.join(sorted(allowed))}")
    elif optimizer.schedule != "wsd" and optimizer.num_cooldown_steps(train.num_steps):
        num_steps = optimizer.num_cooldown_steps(train.num_steps)
        yield Inexpressible(f"the learning rate cools down in the last {num_steps:,} steps", "it does so with WSD only")


def router_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say how routers of experts train, for trainers that take this from the model's configuration."""
    moe = job.recipe.model.llm.moe
    if moe is not None:
        trained = f"balance_loss {moe.balance_loss:g}, z_loss {moe.z_loss:g} and bias rate {moe.selection_bias_rate:g}"
        yield Inexpressible(f"routers train with {trained}", "with what its configuration of the model says")
