"""``megatron-vl plan``: searches the layouts of a run, or predicts the one that it sets."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megatron_vl.config import ParallelConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.errors import UsageError, UserError
from megatron_vl.planning.calibration import Calibration, known, read_calibration
from megatron_vl.planning.cost import Network
from megatron_vl.planning.gpus import calibration_for
from megatron_vl.planning.predict import Prediction, predict
from megatron_vl.planning.rows import RowStatistics, stated_rows
from megatron_vl.planning.run import run_layout
from megatron_vl.planning.search import Found, Wanted, describe, search, what_fits, why_slower, with_split
from megatron_vl.spec.families import ModelSpec, read_spec

from .options import PlanOptions
from .result import Plan
from .show import show

SIZES = ("tp", "cp", "pp", "vpp", "layers", "ep", "etp")


def plan(options: PlanOptions) -> int:
    """Returns 0, or 1 if the given layout, or every layout, does not fit."""
    result = make_plan(options)
    if options.picture is not None:
        from .picture import draw

        draw(result.best, options.picture)
    if options.yaml is not None:
        from .run_file import write_run

        write_run(options.yaml, result.best, _set_fields(options))
    if options.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        show(result)
    return 0 if result.best.fits else 1


def make_plan(options: PlanOptions) -> Plan:
    """Searches, or predicts.

    Raises:
        UsageError: there is no model, or it is searched although nothing is left to choose.
        UserError: no layout fits, or the given one is impossible; the message says why.
    """
    config = _config(options)
    spec = read_spec(config.model.hf)
    rows = _rows(options, config, spec)
    wanted = Wanted(
        config,
        spec,
        options.gpus,
        _calibration(options),
        rows,
        Network(options.gpus_per_node),
        keep=options.keep,
    )
    if _is_given(config.parallel) and not options.search:
        prediction = _given(wanted)
        return Plan(wanted, prediction, None, None if prediction.fits else what_fits(wanted))
    own = _own(wanted) if _is_given(config.parallel) else None
    found = search(dataclasses.replace(wanted, config=_without_split(config)))
    if not found.best:
        raise UserError(_nothing_fits(found, wanted))

    return Plan(wanted, found.best[0], found, own=own)


def _own(wanted: Wanted) -> Prediction | None:
    """The prediction of the run's own layout, to compare with; None if it needs another number of GPUs."""
    try:
        return _given(wanted)
    except UserError:
        return None


def _without_split(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=None))


def _config(options: PlanOptions) -> TrainConfig:
    fields = [*options.fields]
    fields += ["--model.hf", options.hf] if options.hf else []
    fields += ["--data.path", str(options.data)] if options.data is not None else []
    try:
        config = parse_config(fields)
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl plan --help explains every field") from error
    if not config.model.hf:
        raise UsageError("no model is given: megatron-vl plan --hf HF_DIR, or model.hf of a run")
    if not _sets_batch(options.fields) and config.global_batch_size < options.gpus:
        # The field's default is for one GPU.
        return dataclasses.replace(config, global_batch_size=8 * options.gpus)
    return config


def _sets_batch(fields: list[str]) -> bool:
    return any("global_batch_size" in word or word == "--config" for word in fields)


def _calibration(options: PlanOptions) -> Calibration:
    if options.calibration is not None:
        return read_calibration(options.calibration)
    if options.gpu:
        return known(options.gpu)
    return calibration_for("auto")


def _rows(options: PlanOptions, config: TrainConfig, spec: ModelSpec) -> RowStatistics:
    if options.data is None:
        return stated_rows(spec, config.data.seq_len, config.data.max_patches)
    from .data_rows import measured_rows

    return measured_rows(config, spec, options.rows)


def _is_given(parallel: ParallelConfig) -> bool:
    """Whether a run sets a layout."""
    default = ParallelConfig()
    return any(getattr(parallel, name) not in (getattr(default, name), "auto") for name in SIZES)


def _given(wanted: Wanted) -> Prediction:
    """The prediction of the layout that the run sets."""
    config, spec, world = wanted.config, wanted.spec, wanted.world
    how: dict[str, Any] = {
        "calibration": wanted.calibration,
        "rows": wanted.rows,
        "network": wanted.network,
    }
    layout = run_layout(config, spec, world, **how)
    return predict(config, spec, world, layout, **how)


def _nothing_fits(found: Found, wanted: Wanted) -> str:
    nearest = f"; the nearest, {found.lost[0].text}, takes {found.lost[0].why}" if found.lost else ""
    return (
        f"no layout of {wanted.world} {wanted.calibration.gpu} fits {wanted.spec.family} with rows of"
        f" {wanted.config.data.seq_len} tokens{nearest}: take more GPUs, or lower data.seq_len"
    )


def _set_fields(options: PlanOptions) -> dict[str, Any]:
    """Fields that the command line gives by its own options."""
    return {"model.hf": options.hf} if options.hf else {}


def as_json(result: Plan) -> dict[str, Any]:
    """What ``--json`` prints."""
    wanted, c = result.wanted, result.wanted.calibration
    facts: dict[str, Any] = {
        "family": wanted.spec.family,
        "gpus": wanted.world,
        "gpu": c.gpu,
        "measured_rates": c.measured,
        "rates": c.source,
        "seq_len": wanted.config.data.seq_len,
        "global_batch_size": wanted.config.global_batch_size,
        "rows": wanted.rows.as_json(),
        "best": _one(result.best),
    }

    if result.found is not None:
        others = zip(result.found.best[1:], result.found.reasons, strict=True)
        facts["others"] = [{**_one(other), "why": why} for other, why in others]
        facts["lost"] = [dataclasses.asdict(lost) for lost in result.found.lost]
        facts["combinations"] = result.found.combinations

    if result.own is not None:
        facts["own"] = {**_one(result.own), "why": why_slower(result.best, result.own)}
    if result.instead is not None:
        facts["instead"] = _one(result.instead)
    return facts


def _one(prediction: Prediction) -> dict[str, Any]:
    after = with_split(prediction.config, prediction.layout)
    return {
        "text": describe(prediction.config, prediction.layout, prediction.dp),
        **prediction.as_json(),
        "recompute": dataclasses.asdict(after.recompute),
    }
