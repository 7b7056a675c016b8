"""How fast a kind of GPU does what a step consists of: the measured half of the cost model.

A calibration is a JSON file, named for the GPU, and says from which measurements it comes. Those of this
package are in ``calibrations/``. ``megatron-vl bench --calibrate`` writes others into the folder of
:func:`stored_folder`, which come first: all commands take a stored one for the kind of GPU that it names.
``megatron-vl plan --calibration FILE`` takes any file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vl.durable import write
from megatron_vl.errors import UserError

SHIPPED = Path(__file__).parent / "calibrations"
"""The calibrations of this package."""
STORED = "MEGATRON_VL_CALIBRATIONS"
"""Environment variable with the folder of stored calibrations."""
HOW = "`megatron-vl bench --calibrate` measures them"


class CalibrationError(UserError, ValueError):
    """A calibration cannot be used. The message names the file and the field."""


@dataclass(frozen=True)
class Calibration:
    """Rates of one kind of GPU. TFLOP/s count useful FLOPs; bytes are those that must move."""

    gpu: str
    """Part of the device's name: ``H200``."""
    memory_gib: float
    """Memory that CUDA reports."""
    peak_tflops: float
    """Dense bf16 peak of the data sheet, for MFU."""
    product_tflops: float
    """Matrix products whose sides are very long; :attr:`product_width` is for narrow ones."""
    product_width: float
    """A product of sides K and N reaches ``w / (w + product_width)`` of the rate, with ``w = sqrt(K N)``."""
    memory_tb_s: float
    """Elementwise kernels, TB/s."""
    decoder_widths: float
    """Bytes that norms, RoPE, residuals and casts of a decoder layer move in both passes, in widths h."""
    tower_widths: float
    """The same for a layer of the tower, in its hidden widths."""
    window_widths: float
    """The same for window attention."""
    activation_widths: float
    """The same for the MLP's activation, in FFN widths."""
    logits_widths: float
    """The same for the loss, in widths of the vocabulary."""
    attention_tflops: float
    """Causal attention over very long documents."""
    attention_length: float
    """Documents of n tokens reach ``n / (n + attention_length)`` of that rate."""
    tower_attention_tflops: float
    """Full attention of the tower."""
    expert_tflops: float
    """Grouped products of experts with many rows each."""
    expert_rows: float
    """Experts with r rows reach ``r / (r + expert_rows)`` of that rate."""
    expert_host_s: tuple[float, float]
    """Shortest forward and backward pass of a layer of experts under expert parallelism: the processor
    launches its kernels and waits for the counts."""
    expert_host_alone_s: tuple[float, float]
    """The same where a rank has all experts."""
    nvlink_gb_s: float
    """Collectives within a node, bytes that leave a GPU."""
    network_gb_s: float
    """The same between nodes, for each GPU of a node."""
    send_gb_s: float
    """A message to the next pipeline stage."""
    pass_s: float
    """Time of a pass of a pipeline stage in which its GPU waits for the processor and the message."""
    collective_s: float
    """Latency of a collective."""
    all_reduce_share: float
    """Share of :attr:`nvlink_gb_s` that the tower's all-reduces under tensor parallelism reach, waiting
    included."""
    exchange_share: float
    """Share of :attr:`nvlink_gb_s` that exchanges between experts' ranks reach, waiting included."""
    optimizer_ps: float
    """Update of a parameter on the rank that owns its state, in ps."""
    gradient_ps: float
    """Clearing and scaling the gradient of a parameter on each rank, in ps."""
    tensor_us: float
    """Work of the processor for each parameter tensor in an update, in us."""
    hidden_reduction: float
    """Share of a reduction of gradients, or a gathering of weights, that a pass beside it hides."""
    host_copy_gb_s: float
    """Copies between GPU and host, each way at once."""
    step_s: float
    """What a step takes besides: feed, reading the loss, launches."""
    measured: bool = True
    """Whether the rates were measured on this kind of GPU; if not, they are scaled from another kind's."""
    provenance: tuple[str, ...] = ()
    """Where the rates come from."""
    source: str = ""
    """Which calibration this is, as a sentence's beginning. It is not part of the file."""

    def as_json(self) -> dict[str, object]:
        stored = dataclasses.asdict(self)
        del stored["source"]
        return stored


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration file.

    Raises:
        CalibrationError: the file is no calibration; the message names the field.
    """
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise CalibrationError(f"{path} is not JSON ({error})") from error

    if not isinstance(stored, dict):
        raise CalibrationError(
            f"{path} is no calibration; write one like those of megatron_vl/planning/calibrations"
        )

    known = {field.name: field for field in dataclasses.fields(Calibration) if field.name != "source"}
    unknown = sorted(set(stored) - set(known))
    missing = sorted(
        name for name, field in known.items() if name not in stored and field.default is dataclasses.MISSING
    )

    if unknown or missing:
        faults = [f"has the unknown field {name}" for name in unknown]
        faults += [f"lacks the field {name}" for name in missing]
        raise CalibrationError(
            f"{path} {faults[0]}; write one like those of megatron_vl/planning/calibrations"
        )

    for name, value in stored.items():
        _check_rate(path, name, value)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return Calibration(**values, source=f"rates of {values['gpu']} from {path}")


_TEXTS = ("gpu", "provenance", "measured")


def _check_rate(path: Path, name: str, value: object) -> None:
    if name in _TEXTS:
        return
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e9:
            raise CalibrationError(f"{path}: {name} {value!r} must be a number of at least 0")
        if number == 0 and name.endswith(("tflops", "tb_s", "gb_s", "g_s", "share")):
            raise CalibrationError(f"{path}: {name} must be above 0")


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes a file that :func:`read_calibration` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, (json.dumps(calibration.as_json(), indent=2) + "\n").encode())


def stored_folder() -> Path:
    """Where ``bench --calibrate`` keeps calibrations of this user: ``$MEGATRON_VL_CALIBRATIONS``, else
    ``megatron-vl/calibrations`` in the user's folder for configurations."""
    if folder := os.environ.get(STORED):
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megatron-vl" / "calibrations"


def kind_of(name: str) -> str:
    """The kind of GPU by the name of a device: ``NVIDIA H200`` gives ``H200``; an unknown name is a kind."""
    return next((kind for kind in DATA_SHEETS if kind in name.upper()), name.strip())


def stored_path(kind: str) -> Path:
    """The file of a kind's stored calibration."""
    return stored_folder() / f"{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-')}.json"


def known(name: str) -> Calibration:
    """The calibration for a kind of GPU or a device's name: the stored one, else that of this package.

    Raises:
        CalibrationError: nothing is known of it, or the stored file is damaged.
    """
    kind = kind_of(name)
    path = stored_path(kind)
    return read_calibration(path) if path.is_file() else shipped(kind)


@cache
def shipped(gpu: str = "H200") -> Calibration:
    """The calibration for a kind of GPU: its own, or that of H200 scaled by the data sheets.

    Raises:
        CalibrationError: nothing is known of this kind.
    """
    path = SHIPPED / f"{gpu.lower()}.json"
    if path.is_file():
        return dataclasses.replace(read_calibration(path), source=f"rates of {gpu} from this package")
    if gpu not in DATA_SHEETS:
        raise CalibrationError(
            f"GPU {gpu} is unknown; known: {', '.join(DATA_SHEETS)}; measure the rates of yours on a machine"
            " that has it (megatron-vl bench --calibrate), or give them as a file (megatron-vl plan"
            " --calibration FILE)"
        )
    return _scaled(shipped("H200"), gpu)


@dataclass(frozen=True)
class DataSheet:
    """What the vendor says of a GPU."""

    memory_gib: float
    """As CUDA reports it."""
    peak_tflops: float
    """Dense, bf16."""
    memory_tb_s: float
    nvlink_gb_s: float
    """One way."""


DATA_SHEETS = {
    "H200": DataSheet(139.8, 989.0, 4.8, 450.0),
    "H100": DataSheet(79.1, 989.0, 3.35, 450.0),
    "A100": DataSheet(79.1, 312.0, 2.0, 300.0),
    "B200": DataSheet(178.4, 2250.0, 8.0, 900.0),
}


def _scaled(base: Calibration, gpu: str) -> Calibration:
    """The same shares of the peaks on another kind of GPU."""
    ours, theirs = DATA_SHEETS[base.gpu], DATA_SHEETS[gpu]
    compute = theirs.peak_tflops / ours.peak_tflops
    memory = theirs.memory_tb_s / ours.memory_tb_s
    link = theirs.nvlink_gb_s / ours.nvlink_gb_s

    return dataclasses.replace(
        base,
        gpu=gpu,
        memory_gib=theirs.memory_gib,
        peak_tflops=theirs.peak_tflops,
        product_tflops=base.product_tflops * compute,
        attention_tflops=base.attention_tflops * compute,
        tower_attention_tflops=base.tower_attention_tflops * compute,
        expert_tflops=base.expert_tflops * compute,
        memory_tb_s=base.memory_tb_s * memory,
        optimizer_ps=base.optimizer_ps / memory,
        gradient_ps=base.gradient_ps / memory,
        nvlink_gb_s=base.nvlink_gb_s * link,
        send_gb_s=base.send_gb_s * link,
        measured=False,
        provenance=(f"the shares of the peaks of {base.gpu}, with the data sheet of {gpu}",),
        source=f"rates of {gpu} were not measured but scaled from {base.gpu}'s by the data sheets; {HOW}",
    )
