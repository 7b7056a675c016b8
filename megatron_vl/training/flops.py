"""Model FLOPs of a packed row, for MFU.

Counted: every matrix product of both towers (fused QKV, projections, MLPs, patch embedding, merger, output layer) over
real tokens and patches, and attention over true document, frame and window lengths, the causal half only where the
mask is causal. Not counted: embeddings look-ups, norms, RoPE, softmax, activations, padding (rows' tails, padded FFN
columns) and recomputation. Backward costs two forwards where a part is trained; a frozen part costs what passing the
gradient through takes, and nothing when no gradient has to pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import ModelConfig
from megatron_vl.models.families import LanguageSpec, ModelSpec, VisionSpec


@dataclass(frozen=True)
class Flops:
    """FLOPs of forward and backward."""

    language: float
    vision: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.language + other.language, self.vision + other.vision)

    @property
    def total(self) -> float:
        return self.language + self.vision


def language_forward(m: LanguageSpec, lengths: list[int]) -> float:
    """Forward FLOPs of documents of these lengths in tokens."""
    tokens = sum(lengths)
    heads = m.num_heads * m.head_dim
    linear = (
        m.hidden_size * (heads + 2 * m.num_kv_heads * m.head_dim) + heads * m.hidden_size + 3 * m.hidden_size * m.ffn_hidden_size
    )
    attention = 2 * heads * sum(n * n for n in lengths)  # QK^T and PV, half of each
    return m.num_layers * (2 * linear * tokens + attention) + 2 * m.hidden_size * m.vocab_size * tokens


def vision_forward(v: VisionSpec, full: list[int], window: list[int]) -> tuple[float, float]:
    """Forward FLOPs (blocks with patch embedding, mergers) of segments of these lengths in patches."""
    patches = sum(full)
    mlp = (3 if v.gated_mlp else 2) * v.hidden_size * v.ffn_hidden_size
    linear = 2 * (4 * v.hidden_size**2 + mlp) * patches
    blocks = 2.0 * v.patch_dim * v.hidden_size * patches
    for layer in range(v.num_layers):
        lengths = full if v.is_full_attention(layer) else window
        blocks += linear + 4 * v.hidden_size * sum(n * n for n in lengths)
    width = v.merge_unit * v.hidden_size
    mergers = 1 + len(v.deepstack_layers)
    merger = mergers * 2.0 * (patches // v.merge_unit) * (width * width + width * v.out_hidden_size)
    return blocks, merger


def row_flops(spec: ModelSpec, model: ModelConfig, lengths: list[int], full: list[int], window: list[int]) -> Flops:
    """Forward and backward FLOPs of one row.

    Args:
        lengths: real document lengths in tokens (without the padded tail).
        full, window: frame and window lengths in patches; empty for a text-only row.
    """
    language = language_forward(spec.language, lengths)
    blocks, merger = vision_forward(spec.vision, full, window) if full else (0.0, 0.0)
    vision_trains = not model.freeze_vision
    merger_trains = vision_trains or not model.freeze_merger
    language_factor = 3.0 if not model.freeze_language else (2.0 if merger_trains else 1.0)
    merger_factor = 1.0 + (not model.freeze_merger) + vision_trains
    return Flops(language * language_factor, blocks * (3.0 if vision_trains else 1.0) + merger * merger_factor)


PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
"""Dense bf16 peak of one accelerator in TFLOP/s, by a part of its name (vendor data sheets)."""


def peak_tflops(device_name: str, stated: float = 0.0) -> float:
    """Peak for MFU: the stated one, else by device name, else 0 (MFU is then not shown)."""
    if stated:
        return stated
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), 0.0)
