"""`mmtrain doctor`."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmtrain.cli.options import AsJson

if TYPE_CHECKING:
    from mmtrain.extras import CommandState
    from mmtrain.runtime.profiling.host_report import MachineReport


def doctor(
    context: typer.Context,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which runs would be written.")] = Path("runs"),
    links: Annotated[bool, typer.Option(help="Start two processes and time messages between them.")] = True,
    as_json: AsJson = False,
) -> None:
    """Report what this machine can do and what it lacks.

    Shows versions, devices, communication backends, attention, kernels, networks and the speed of messages between two
    processes.
    Then lists for each command whether it is ready, and which extras it needs or can use. At the end it says what would
    be slow and why, and what is missing. Without torch it examines what needs no torch.
    """
    import json
    from dataclasses import asdict

    from mmtrain.extras import TRAIN

    commands = list(_command_names(context.find_root().command))
    if TRAIN.missing():
        from mmtrain.runtime.profiling.host_report import examine_host

        health = examine_host(run_dir, commands)
    else:
        from mmtrain.runtime.profiling.doctor import examine_machine

        health = examine_machine(run_dir, links, commands)
    typer.echo(json.dumps(asdict(health), indent=2) if as_json else "\n".join(health_lines(health)))


def health_lines(health: "MachineReport") -> list[str]:
    """Write the findings about this machine as lines of text, with headings in the first column."""
    devices = health.devices
    lines = _section("Versions", [", ".join(f"{name} {version}" for name, version in health.versions.items())])
    lines += _section("Devices", devices)
    if health.flops is not None:
        lines += _torch_lines(health, health.flops)
    messages = [
        f"{kind}: 1 KiB in {small * 1e6:.0f} us, 4 MiB in {large * 1e3:.2f} ms"
        for kind, (small, large) in health.messages.items()
    ]
    lines += _section("Peers", health.peers)
    lines += _section("Network", health.network)
    lines += _section("Links", messages)
    lines += _section("Commands", list(map(_command_line, health.commands)))
    for kind, heading in (("slow", "Slow"), ("missing", "Missing")):
        findings = []
        for finding in health.findings:
            if finding.kind == kind:
                commands = f" [{', '.join(finding.commands)}]" if finding.commands else ""
                findings.append(f"{finding.what}{commands}: {finding.remedy}")
        lines += _section(heading, findings or ["nothing found"])
    return lines


def _torch_lines(health: "MachineReport", flops: float) -> list[str]:
    """Write what torch says of this machine; flops: FLOP/s of large GEMMs."""
    lines = _section("GEMM", [f"{flops / 1e12:.3g} TFLOP/s on one {'GPU' if len(health.devices) > 1 else 'core'}"])
    lines += _section("Preset", [f"{health.preset or 'none'}, used for plans without a cost table"])
    lines += _section("Backends", [", ".join(f"{n} {'yes' if ok else 'no'}" for n, ok in health.backends.items())])
    unusable = [f"{name}: {problem}" for name, problem in health.attention.items() if problem]
    lines += _section("Attention", [_selected_attention(health.attention_by_head_dim), *unusable])
    return lines + _section("Kernels", health.kernels)


def _command_names(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the commands of a group of commands, such as `plan` and `data stats`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _command_names(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def _command_line(state: "CommandState") -> str:
    """Write whether a command is ready, which extras it needs, and which of those that it can use are here."""
    words = ["ready" if state.is_ready else "not ready"]
    if state.problem is not None:
        words.append(f"it {state.problem}")
    words += [f"needs {name}, {'which is here' if ok else 'not installed'}" for name, ok in state.needs.items()]
    for what, is_here in (("can use", True), ("does without", False)):
        names = [name for name, ok in state.uses.items() if ok == is_here]
        if names:
            words.append(f"{what} {', '.join(names)}")
    return f"{state.command}: {'; '.join(words)}"


def _selected_attention(by_head_dim: dict[int, str]) -> str:
    """Say which backend `auto` selects, and where it depends on the width of heads, for which."""
    widths = sorted(by_head_dim)
    if len(set(by_head_dim.values())) == 1:
        return f"{by_head_dim[widths[0]]} is used"
    ends = [width for width, wider in itertools.pairwise(widths) if by_head_dim[width] != by_head_dim[wider]]
    uses = [f"{by_head_dim[width]} is used for heads of up to {width} features" for width in ends]
    return f"{', '.join(uses)}, {by_head_dim[widths[-1]]} for wider ones"


def _section(heading: str, lines: list[str]) -> list[str]:
    """Put the heading in front of the first line and indent the others."""
    return [f"{heading if number == 0 else '':<12}{line}" for number, line in enumerate(lines)]
