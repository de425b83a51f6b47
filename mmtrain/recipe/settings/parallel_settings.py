"""Settings of a recipe's `parallel` and `cluster`: constraints on the plan, and the hardware to plan for."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mmtrain.recipe.settings.base import NOTHING, PositiveInt, Section, setting


class UnitParallel(Section):
    """Fixed parallel degrees of one unit. The planner chooses what is left out."""

    tp: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Tensor-parallel degree. Must divide `heads`; must divide `kv_heads` or be a multiple of it. "
        "In `unified` an encoder's is the LLM's or a divisor of it; in `replicated` all units have the same.",
    )
    pp: PositiveInt | None = setting(None, affects={"plan"}, description="Pipeline-parallel degree.")
    dp: PositiveInt | None = setting(
        None, affects={"plan"}, description="Data-parallel degree. Must divide `train.global_batch`."
    )
    vpp: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Model chunks on each pipeline rank (interleaved schedule). The same for all units in `unified`, "
        "1 for encoders and generators in `colocated`.",
    )
    layers_per_chunk: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (),
        affects={"plan"},
        added_later=True,
        description="Blocks of the unit in each model chunk of its pipeline, pp x vpp numbers; chunk i is on pipeline "
        "rank i % pp. Layers at the ends (embedding, head, projector) are not counted and stay beside their blocks; a "
        "0 at an end is such a layer alone. In `unified` the chunks are those of the one pipeline of all units, where "
        "0 leaves a chunk to others. For encoders and the LLM; not in `replicated`. `[]`: the planner divides.",
    )
    sp: bool | Literal["auto"] = setting(
        "auto",
        affects={"plan"},
        description="Sequence parallelism: the ranks of a tensor-parallel group shard the tokens in norms and residual "
        "connections. Needs tp above 1. `auto`: if it costs no time, or if nothing fits into memory without it.",
    )
    tp_overlap: bool | Literal["auto"] = setting(
        "auto",
        affects={"plan"},
        description="Run the GEMMs of tensor-parallel linears in chunks of tokens, so that the ranks of a group "
        "communicate one chunk while they compute the next. Needs tp above 1. `auto`: where it saves time, by the "
        "cost table or by the model of the hardware.",
    )
    num_microbatches: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Microbatches of each replica in one step. The LLM's number times its dp is `train.global_batch`. "
        "An encoder's number divides the LLM's (one encoder microbatch serves several LLM microbatches) or is a "
        "multiple of it. Default: the LLM's number.",
    )
    recompute: Literal["auto", "none", "selective", "all"] = setting(
        "auto",
        affects={"plan"},
        description="Activation recomputation in backward. `auto`: for as few layers as memory allows. `none`: no "
        "layers. `selective`: no layers, but activation functions (`recompute_activation_function`) beside attention's "
        "scores, which no kernel keeps; not for a generator. `all`: all layers, as Megatron-LM's `full`.",
    )
    recompute_activation_function: bool | Literal["auto"] = setting(
        "auto",
        affects={"plan"},
        description="Keep the input of each MLP's activation function, but not its output, which backward computes "
        "again before the gradient of the MLP's last linear. Saves a fifth to a quarter of what a block keeps, for a "
        "pass over its widest tensor. For encoders and the LLM. `auto`: where layers would be recomputed, and a plan "
        "with it is over 1% faster or the only one that fits.",
    )
    offload: Literal["none", "inputs", "all", "auto"] = setting(
        "none",
        affects={"plan"},
        description="Host memory for blocks whose activations do not stay on the device; `recompute` says how many "
        "these are. `inputs`: their inputs wait there, and they are recomputed. `all`: all that they would keep waits "
        "there, and nothing of them is recomputed. `auto`: `none` where a plan fits, else `inputs` or `all`. Copies "
        "overlap with compute. For encoders and the LLM.",
    )
    balance_policy: Literal["auto", "packed", "padded"] = setting(
        "auto",
        affects={"plan"},
        added_later=True,
        description="In `replicated`: by which cost samples or items are assigned to ranks (`parallel.dispatch`). "
        "`packed`: of sequences without padding, the longest first. `padded`: as if each were padded to the longest "
        "of its batch, batches of neighbors in length. It changes no result. `auto`: as the unit computes them: "
        "`packed`, and `padded` for the LLM with `data.pad`.",
    )

    @property
    def runs_activations_again(self) -> bool | Literal["auto"]:
        """Whether backward computes activation functions again; `auto`: the planner decides."""
        return True if self.recompute == "selective" else self.recompute_activation_function


class LlmParallel(UnitParallel):
    """Fixed parallel degrees of the LLM, which alone may share long sequences between ranks."""

    cp: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Context-parallel degree: ranks that share the sequences of every microbatch. Each computes some "
        "of the tokens, and they exchange what attention and gated DeltaNets need.",
    )
    cp_method: Literal["auto", "ulysses", "ring"] = setting(
        "auto",
        affects={"plan"},
        description="How ranks that share a sequence attend. `ulysses`: an all-to-all gives each of them some of the "
        "heads of all tokens; cp divides heads / tp, and key heads / tp of gated DeltaNets. `ring`: keys and values go "
        "round the ranks; not for windows, gated DeltaNets or images whose tokens see each other. `auto`: `ulysses` "
        "where the heads allow it.",
    )
    cp_split: Literal["auto", "even"] = setting(
        "auto",
        affects={"plan"},
        description="With cp above 1, which sequences are cut. `auto`: the longest, as few as are needed to give the "
        "ranks equal tokens and equal attention work; the others stay whole on one rank each and exchange nothing. "
        "`even`: all.",
    )

    ep: PositiveInt | None = setting(
        None,
        affects={"plan"},
        added_later=True,
        description="Expert-parallel degree of an LLM with `moe`: as many replicas hold its experts together, and "
        "exchange tokens inside each of its blocks. Divides the experts and dp x cp. Default: the planner decides.",
    )
    expert_spread: Annotated[float, Field(ge=0, le=10)] | Literal["auto"] = setting(
        "auto",
        affects={"plan"},
        added_later=True,
        description="How unevenly the router loads the experts of an LLM with `moe`: standard deviation of their "
        "numbers of tokens in a pass, over the mean. With `ep` the fullest rank sets the pace, and memory has room for "
        "it. `auto`: what the run that `cluster.costs` names recorded, else 0.3, that of a router trained with a "
        "balancing loss (arXiv 2408.15664, table 2: the fullest of 64 experts has 0.72 more than the mean). "
        "`mmtrain report` of a run states what it recorded.",
    )


class ParallelSettings(Section):
    """Constraints on the plan."""

    placement: Literal["auto", "unified", "disaggregated", "colocated", "replicated"] = setting(
        "auto",
        affects={"plan"},
        description="How units share ranks. `unified`: one pipeline holds the layers of all units. `disaggregated`: "
        "every unit has ranks of its own. `colocated`: encoders run on the LLM's ranks while these would be idle, "
        "and a generator between the LLM's passes. "
        "`replicated`: every rank, or every TP group, runs all units, which are sharded over them (FSDP). `auto`: the "
        "fastest of them, without `replicated` where there is one rank or a generator.",
    )
    shard: PositiveInt | Literal["all", "auto"] = setting(
        "auto",
        affects={"plan"},
        description="In `replicated`: ranks (with tensor parallelism: TP groups) that hold one copy of weights, "
        "gradients and optimizer state together. 1: every rank holds all (DDP). `all`: all hold one copy (ZeRO-3). "
        "Between: hybrid sharding; it divides the number of ranks. `auto`: the fastest that fits.",
    )
    zero: Literal[1, 2, 3] = setting(
        3,
        affects={"plan"},
        description="In `replicated`: what is sharded (ZeRO). 3: weights, gradients and optimizer state, over `shard` "
        "ranks (FSDP). 2: gradients and optimizer state over `shard` ranks, as of one node; weights are gathered once "
        "a step and stay whole until its last backward. 1: the optimizer state alone, over all ranks; every rank keeps "
        "weights and gradients whole, so nothing is gathered in a forward or backward, and ranks wait for each other "
        "in dispatches and at the end of a step alone. With `placement: auto` all three are tried.",
    )
    dispatch: Literal["auto", "all", "llm", "none"] = setting(
        "auto",
        affects={"plan"},
        description="In `replicated`: what is balanced over the ranks, which wait for each other in every unit. `all`: "
        "each unit's work by itself; any rank may encode an image or clip, or draw an image, and an all-to-all brings "
        "features to and from the rank of its sample. `llm`: the LLM's work; images and clips stay with their samples. "
        "In both, ranks exchange samples of a mini-batch, unless `data.grouping: matched` makes them even. `none`: "
        "nothing, samples stay where the stream puts them. `auto`: the faster of `all` and `llm`.",
    )
    exchange: Literal["all_to_all", "all_gather"] = setting(
        "all_to_all",
        affects={"plan"},
        description="In `replicated` with `dispatch: all`: how features go from rank to rank. `all_to_all`: "
        "each rank gets its own. `all_gather`: every rank gets those of all ranks and takes its own, which moves and "
        "holds more; a baseline.",
    )
    node_wise: bool = setting(
        True,
        affects={"plan"},
        description="Exchange batches of images or clips between replicas of their unit, which costs no balance, so "
        "that few features go to other nodes (`cluster.ranks_per_node`). `false`: places do not depend on nodes.",
    )
    schedule: Literal["auto", "1f1b", "encoder_first"] = setting(
        "auto",
        affects={"plan"},
        description="In `replicated`: when encoders run. `1f1b`: before and after the LLM in every mini-batch. "
        "`encoder_first`: before the LLM for all mini-batches of a step and after it, keeping features alone between; "
        "an encoder that trains runs forward twice. It then has fewer, larger mini-batches, as few as memory allows, "
        "so that weights are gathered less often and items are balanced over the whole step. `auto`: the faster.",
    )
    vision: UnitParallel = Field(UnitParallel(), description="Parallel degrees of the vision encoder.")
    audio: UnitParallel = Field(UnitParallel(), description="Parallel degrees of the audio encoder.")
    encoders: dict[str, UnitParallel] = Field({}, description="Parallel degrees of `model.encoders`, by their names.")
    llm: LlmParallel = Field(LlmParallel(), description="Parallel degrees of the LLM.")
    max_gpus: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Most ranks that a plan may use. It uses fewer if that is faster. Default: exactly all ranks of "
        "the cluster.",
    )
    bucket_parameters: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Fewest trained parameters of a rank in a bucket of layers, whose gradients are reduced together, "
        "and parameters gathered, beside the layers that still compute. Default: 40 million, or a million for each "
        "replica where that is more (Megatron-LM's `--ddp-bucket-size`). Smaller ones hide more on slow links, and "
        "start more collectives.",
        added_later=True,
    )
    generator: UnitParallel = Field(
        UnitParallel(),
        description="Parallel degrees of the generator. A U-Net has no pipeline stages, and is "
        "whole on every rank of a tensor-parallel group.",
    )

    def of(self, unit: str) -> UnitParallel:
        """Return the parallel degrees that the recipe fixes for a unit."""
        if unit not in self._short_forms():
            return self.encoders.get(unit, UnitParallel())
        degrees: UnitParallel = getattr(self, unit)
        return degrees

    def balance_as_padded(self) -> dict[str, bool]:
        """Return whether a unit is balanced as if padded, for each unit whose balance policy the recipe fixes."""
        policies = {unit: self.of(unit).balance_policy for unit in (*self._short_forms(), *self.encoders)}
        return {unit: policy == "padded" for unit, policy in policies.items() if policy != "auto"}

    @classmethod
    def _short_forms(cls) -> list[str]:
        """Return the fields that hold the degrees of one unit each."""
        return [name for name, field in cls.model_fields.items() if field.annotation in (UnitParallel, LlmParallel)]


class TimeSpreadSettings(Section):
    """How much ranks of one kind differ in the time of the same work, for which others wait."""

    ranks: float | None = setting(
        None,
        ge=0,
        le=1,
        affects={"plan"},
        added_later=True,
        description="Standard deviation of the ranks' compute times for the same work over their mean, as far as it "
        "stays from step to step. Default: that of `cluster.costs`, or the preset's (0.02 for GPUs, 0 for `cpu-core`).",
    )
    layers: float | None = setting(
        None,
        ge=0,
        le=1,
        affects={"plan"},
        added_later=True,
        description="Standard deviation of repeated passes of one layer on one rank over their mean. Default: that of "
        "`cluster.costs`, or the preset's (0.01 for GPUs, 0 for `cpu-core`).",
    )


class ClusterSettings(Section):
    """The hardware to plan for."""

    hardware: str = setting(
        "auto",
        affects={"plan"},
        description="A hardware preset: `cpu-core`, `a100-80g` (with fewer ports: `-4x200`, `-2x200`), `a800-80g` "
        "(`-4x200`), `h100-80g`, `h200-141g`, `b200-180g`, `b300-270g`, `gb200-nvl72`, `gb300-nvl72`, `l40s-48g`, "
        "`rtx-pro-6000-96g`, `rtx-4090-24g`, `rtx-5090-32g`, `a6000-48g`, `gb10-128g`, `mi300x-192g`. `auto`: this "
        "machine's; a GPU without a preset is measured.",
    )
    ranks: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Number of ranks. Default: the launcher's world size; without a launcher the GPUs of this machine, "
        "or 2 on a CPU.",
    )
    ranks_per_node: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Ranks on one node, which reach each other by NVLink or PCIe; of an NVL72, its 72. Default: the "
        "preset's.",
    )
    ports_per_node: PositiveInt | None = setting(
        None,
        affects={"plan"},
        added_later=True,
        description="Network ports of one node, which its ranks share evenly. Default: as many for each rank as in "
        "the preset.",
    )
    intra_node_gb_per_s: float | None = setting(
        None,
        gt=0,
        affects={"plan"},
        added_later=True,
        description="GB/s that a rank sends inside its node in one direction, as collectives reach it (nccl-tests: "
        "bus bandwidth). About 0.8 of NVLink's one direction; data sheets state both directions together. Default: "
        "the preset's.",
    )
    intra_node_latency_us: float | None = setting(
        None,
        gt=0,
        affects={"plan"},
        added_later=True,
        description="Microseconds of an empty message inside a node. Default: the preset's.",
    )
    inter_node_gb_per_s: float | None = setting(
        None,
        gt=0,
        affects={"plan"},
        added_later=True,
        description="GB/s that one network port carries in one direction: 24 of 200 Gb/s, 48 of 400 Gb/s. Default: "
        "the preset's.",
    )
    inter_node_latency_us: float | None = setting(
        None,
        gt=0,
        affects={"plan"},
        added_later=True,
        description="Microseconds of an empty message between nodes. Default: the preset's.",
    )
    rail_optimized: bool | None = setting(
        None,
        affects={"plan"},
        added_later=True,
        description="Whether the k-th ports of all nodes share switches, so that messages between ranks of different "
        "places on their nodes take one more step inside a node. Default: the preset's.",
    )
    time_spread: TimeSpreadSettings = Field(
        TimeSpreadSettings(), description="How much ranks of one kind differ in speed, for which others wait."
    )
    memory_gib: float | None = setting(
        None, gt=0, affects={"plan"}, description="Memory of a rank in GiB. Default: the preset's."
    )
    host_memory_gib: float | None = setting(
        None,
        gt=0,
        affects={"plan"},
        description="Host memory in GiB that a rank may fill with activations (`parallel.UNIT.offload`). Default: the "
        "preset's, half of a rank's share of its node.",
    )
    price_per_gpu_hour: float | None = setting(
        None,
        gt=0,
        affects=NOTHING,
        description="What a GPU costs in an hour, in any currency. Plans and runs state costs.",
    )
    watts_per_gpu: float | None = setting(
        None,
        gt=0,
        affects=NOTHING,
        description="Watts of a GPU with its share of the machine, for the energy of a run.",
    )
    costs: Path | None = setting(
        None,
        affects={"plan"},
        description="A cost table: a file written by `mmtrain profile`, the folder of a run that is done, or the name "
        "of a table that comes with mmtrain (`cpu-core`, `h200-141g`). Default: analytic costs of the preset.",
    )
