"""Describe how a run's new plan differs from the one that it was executed with before."""

from mmtrain.planning.artifact.plan import Plan


def describe_plan_change(before: Plan, now: Plan) -> list[str]:
    """Return a line for the ranks, the placement, the mesh of every unit, and the predicted step time."""
    lines = [
        f"ranks: {_change(before.world_size, now.world_size)}",
        f"placement: {_change(before.placement, now.placement)}",
    ]
    for name, unit in now.units.items():
        unit_before = before.units.get(name)
        lines.append(f"{name}: {_change(unit_before.mesh_text if unit_before else 'none', unit.mesh_text)}")
    ratio = now.predicted.step_time_s / before.predicted.step_time_s
    lines.append(
        f"predicted step time: {before.predicted.step_time_s:.3f} s -> {now.predicted.step_time_s:.3f} s ({ratio:.2f}x)"
    )
    return lines


def _change(before: object, now: object) -> str:
    return f"{now}, as before" if before == now else f"{before} -> {now}"
