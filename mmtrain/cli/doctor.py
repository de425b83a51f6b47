"""`mmtrain doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson

if TYPE_CHECKING:
    from mmtrain.runtime.profiling.doctor import MachineReport


def doctor(
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where runs would be written.")] = Path("runs"),
    links: Annotated[bool, typer.Option(help="Start two processes and time their messages.")] = True,
    as_json: AsJson = False,
) -> None:
    """Tell what this machine can do and what it lacks.

    Versions, devices, backends, attention kernels, links between two processes; what would be slow and why; what is
    missing for which command.
    """
    import json
    from dataclasses import asdict

    from mmtrain.runtime.profiling.doctor import examine_machine

    health = examine_machine(run_dir, links)
    typer.echo(json.dumps(asdict(health), indent=2) if as_json else "\n".join(health_lines(health)))


def health_lines(health: "MachineReport") -> list[str]:
    """What was found, for people."""
    text = ["Versions    " + ", ".join(f"{name} {version}" for name, version in health.versions.items())]
    text += [f"{'Devices' if i == 0 else '':<12}{device}" for i, device in enumerate(health.devices)]
    text.append(f"{'Products':<12}{health.flops / 1e12:.3g} TFLOP/s on one {'GPU' if health.devices[1:] else 'core'}")
    text.append(f"{'Preset':<12}{health.preset or 'none'}, for plans without a cost table")
    text.append(f"{'Backends':<12}" + ", ".join(f"{n} {'yes' if ok else 'no'}" for n, ok in health.backends.items()))
    chosen = next((name for name, problem in health.attention.items() if problem is None), "none")
    text.append(f"{'Attention':<12}{chosen} is used")
    text += [f"{'':<12}{name}: {problem}" for name, problem in health.attention.items() if problem]
    for i, (kind, (small, large)) in enumerate(health.messages.items()):
        heading = "Links" if i == 0 else ""
        text.append(f"{heading:<12}{kind}: 1 KiB in {small * 1e6:.0f} us, 4 MiB in {large * 1e3:.2f} ms")
    for kind, heading in (("slow", "Slow"), ("missing", "Missing")):
        found = [f for f in health.findings if f.kind == kind]
        for i, finding in enumerate(found):
            whom = f" [{', '.join(finding.commands)}]" if finding.commands else ""
            text.append(f"{heading if i == 0 else '':<12}{finding.what}{whom}: {finding.remedy}")
        if not found:
            text.append(f"{heading:<12}nothing found")
    return text
