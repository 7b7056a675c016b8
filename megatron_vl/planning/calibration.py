"""Rates of a kind of GPU: the measured half of the cost model.

A calibration is a JSON file in ``calibrations/`` with the name of the GPU and the measurements that its rates
come from.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vl.errors import UserError

SHIPPED_CALIBRATIONS_DIR = Path(__file__).parent / "calibrations"
"""The calibrations of this package."""


class CalibrationError(UserError, ValueError):
    """There are no rates of a GPU. The message names those that are known."""


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
    """Bytes that a layer of the tower moves likewise, in its hidden widths."""
    window_widths: float
    """Bytes that window attention moves in both passes, in hidden widths."""
    activation_widths: float
    """Bytes that the MLP's activation moves in both passes, in FFN widths."""
    logits_widths: float
    """Bytes that the loss moves in both passes, in widths of the vocabulary."""
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
    """Shortest forward and backward pass of a layer of experts under expert parallelism. The processor
    launches its kernels and waits for the counts."""
    expert_host_alone_s: tuple[float, float]
    """Shortest passes of such a layer if a rank has all experts."""
    nvlink_gb_s: float
    """Bandwidth of collectives within a node: bytes that leave a GPU."""
    network_gb_s: float
    """Bandwidth of collectives between nodes, for each GPU of a node."""
    send_gb_s: float
    """Bandwidth of a message to the next pipeline stage."""
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
    """Largest share of a reduction of gradients, or a gathering of weights, that a concurrent pass hides."""
    host_copy_gb_s: float
    """Bandwidth of copies between GPU and host, in each direction if both run at once."""
    step_s: float
    """Constant time of a step: reading rows and the loss, and launches."""
    measured: bool = True
    """Whether the rates were measured on this kind of GPU; if not, they are scaled from another kind's."""
    provenance: tuple[str, ...] = ()
    """The measurements that the rates come from."""
    source: str = ""
    """The origin of this calibration, as the beginning of a sentence. It is not part of the file."""


def parse_gpu_kind(device_name: str) -> str:
    """The kind of a GPU from its device name: ``H200`` for ``NVIDIA H200``. An unknown name is a kind."""
    return next((kind for kind in DATA_SHEETS if kind in device_name.upper()), device_name.strip())


@cache
def find_calibration(device_name: str = "H200") -> Calibration:
    """The calibration for a kind of GPU or a device name: its own, or that of H200 scaled by the data sheets.

    Raises:
        CalibrationError: the kind is unknown.
    """
    gpu_name = parse_gpu_kind(device_name)
    calibration_path = SHIPPED_CALIBRATIONS_DIR / f"{gpu_name.lower()}.json"
    if calibration_path.is_file():
        json_fields = json.loads(calibration_path.read_text())
        field_values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json_fields.items()
        }
        return Calibration(**field_values, source=f"rates of {gpu_name} from this package")
    if gpu_name not in DATA_SHEETS:
        raise CalibrationError(f"GPU {gpu_name} is unknown; known: {', '.join(DATA_SHEETS)}")
    return _scale_calibration(find_calibration("H200"), gpu_name)


@dataclass(frozen=True)
class DataSheet:
    """Numbers of a GPU from its vendor's data sheet."""

    marketed_gb: int
    """Memory by its vendor's name."""
    memory_gib: float
    """Memory that CUDA reports."""
    peak_tflops: float
    """Dense bf16 peak."""
    memory_tb_s: float
    nvlink_gb_s: float
    """Bandwidth of NVLink in one direction."""


DATA_SHEETS = {
    "H200": DataSheet(141, 139.8, 989.0, 4.8, 450.0),
    "H100": DataSheet(80, 79.1, 989.0, 3.35, 450.0),
    "A100": DataSheet(80, 79.1, 312.0, 2.0, 300.0),
    "B200": DataSheet(180, 178.4, 2250.0, 8.0, 900.0),
}


def _scale_calibration(base_calibration: Calibration, gpu_name: str) -> Calibration:
    """The calibration of another kind of GPU that reaches the same shares of its peaks."""
    base_sheet, target_sheet = DATA_SHEETS[base_calibration.gpu], DATA_SHEETS[gpu_name]
    compute_ratio = target_sheet.peak_tflops / base_sheet.peak_tflops
    memory_ratio = target_sheet.memory_tb_s / base_sheet.memory_tb_s
    link_ratio = target_sheet.nvlink_gb_s / base_sheet.nvlink_gb_s

    return dataclasses.replace(
        base_calibration,
        gpu=gpu_name,
        memory_gib=target_sheet.memory_gib,
        peak_tflops=target_sheet.peak_tflops,
        product_tflops=base_calibration.product_tflops * compute_ratio,
        attention_tflops=base_calibration.attention_tflops * compute_ratio,
        tower_attention_tflops=base_calibration.tower_attention_tflops * compute_ratio,
        expert_tflops=base_calibration.expert_tflops * compute_ratio,
        memory_tb_s=base_calibration.memory_tb_s * memory_ratio,
        optimizer_ps=base_calibration.optimizer_ps / memory_ratio,
        gradient_ps=base_calibration.gradient_ps / memory_ratio,
        nvlink_gb_s=base_calibration.nvlink_gb_s * link_ratio,
        send_gb_s=base_calibration.send_gb_s * link_ratio,
        measured=False,
        provenance=(f"the shares of the peaks of {base_calibration.gpu}, with the data sheet of {gpu_name}",),
        source=f"rates of {gpu_name} were not measured but scaled from {base_calibration.gpu}'s by the data"
        " sheets",
    )
