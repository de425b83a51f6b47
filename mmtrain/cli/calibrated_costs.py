"""`mmtrain plan --calibrate FILE`: costs corrected by what this machine's cores do."""

from pathlib import Path

from mmtrain.recipe import Recipe


def calibrated_setting(settings: Recipe, out: Path) -> str:
    """Measure this machine, write its costs to `out`, and return the setting that names them; say what was found.

    Raises:
        UserError: the plan is for other hardware than this machine's cores, or its costs are calibrated already.
    """
    import typer

    from mmtrain.cli.local_cluster import resolve_cluster
    from mmtrain.costs import MeasuredCosts, costs_for, machine_for, precision_for
    from mmtrain.errors import UserError, writing
    from mmtrain.models.model_shape import build_model_shape

    _, hardware = resolve_cluster(settings)
    if hardware != "cpu-core":
        raise UserError(
            f"--calibrate {out}: it measures this machine's cores, and this is planned for {hardware}; measure such "
            "hardware there with `mmtrain profile`"
        )
    machine = machine_for(settings, hardware)
    precision = precision_for(settings, machine)
    costs = costs_for(machine, precision, settings.cluster.costs)
    if isinstance(costs, MeasuredCosts) and costs.table.calibrated:
        raise UserError(
            f"--calibrate {out}: cluster.costs={settings.cluster.costs} is calibrated already; leave one of the two out"
        )
    from mmtrain.runtime.profiling.calibration import calibrate, calibrated_table

    calibration = calibrate(costs, machine, precision)
    shape = build_model_shape(settings)
    table = calibrated_table(costs, shape, calibration, settings.data.seq_len)
    with writing("--calibrate", out, "cost table"):
        table.save(out)
    typer.echo(
        f"Calibrated on this machine: {calibration}. Train and simulate with --set cluster.costs={out}", err=True
    )
    return f"cluster.costs={out.absolute()}"
