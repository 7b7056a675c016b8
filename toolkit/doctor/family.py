"""Checks what only some families have: linear attention, wide heads, float32 tensors, thinking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_vl.config import TrainConfig
from megatron_vl.data.sample.chat import read_chat_template
from megatron_vl.data.sample.thinking import switches_thinking, writes_thinking
from megatron_vl.kernels.sizes import TE_HEADS
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import LinearAttentionSpec
from megatron_vl.spec.tensors import LayoutError, check_tp
from toolkit.doctor import Finding, note, ok
from toolkit.doctor.machine import installed

RULE_WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the kernels of the delta rule compute."""


def check_family(config: TrainConfig, spec: ModelSpec, on_gpus: bool) -> Iterator[Finding]:
    """Findings about a run's model, if its family has linear attention; no others.

    Args:
        on_gpus: whether the run uses GPUs.
    """
    linear = spec.language.linear_attention
    if linear is None:
        return
    yield _linear_layers(config, spec, linear, on_gpus)
    yield _wide_heads(config, spec.language.head_dim, on_gpus)
    yield _tensor_parallel(spec, linear)
    yield from _decays(Path(config.model.hf))
    yield from _thinking(config)


def _linear_layers(
    config: TrainConfig, spec: ModelSpec, linear: LinearAttentionSpec, on_gpus: bool
) -> Finding:
    """Says which kernels compute linear attention."""
    layers = f"{len(linear.layers)} of {spec.language.num_layers} decoder layers"
    if not on_gpus:
        return ok("linear attention", f"{layers}; without a GPU they run in torch, on GPUs in our kernels")

    widths = {linear.key_dim, linear.value_dim} - set(RULE_WIDTHS)
    slow = f"{layers}; the delta rule runs in torch, which is slow,"
    if config.dtype == "float32":
        return note("linear attention", f"{slow} because dtype is float32", "set dtype to bfloat16")
    if widths:
        return note("linear attention", f"{slow} because its kernels have no heads of {min(widths)}", "")
    version = installed("triton")
    if version is None:
        return note(
            "linear attention", f"{layers}; Triton is not installed", "pip install torch -c constraints.txt"
        )
    return ok("linear attention", f"{layers}, with our kernels on Triton {version}")


def _wide_heads(config: TrainConfig, width: int, on_gpus: bool) -> Finding:
    """Says which kernels compute softmax attention."""
    if not on_gpus or config.model.language_attention != "auto" or width in TE_HEADS:
        return ok("attention", f"heads of {width}, backend {config.model.language_attention}")
    return ok(
        "attention",
        f"heads of {width} take FlashAttention-2 (torch_varlen), because cuDNN computes wrong gradients for"
        " packed rows of them",
    )


def _tensor_parallel(spec: ModelSpec, linear: LinearAttentionSpec) -> Finding:
    """Says which tensor parallel sizes divide all heads and widths."""

    def fits(tp: int) -> bool:
        try:
            check_tp(spec, tp)
        except LayoutError:
            return False
        return True

    valid = ", ".join(str(tp) for tp in (1, 2, 4, 8, 16) if fits(tp))
    return ok(
        "tensor parallel", f"parallel.tp may be {valid} ({linear.key_heads} key heads of linear attention)"
    )


def _decays(folder: Path) -> Iterator[Finding]:
    """Whether the decays of the folder of origin were rounded, if it has weights."""
    from converters.hf import HfCheckpoint

    try:
        rounded = HfCheckpoint(folder).rounded_decays()
    except (ValueError, OSError):
        return  # a run needs the config only; conversion reports weights that it cannot read
    if rounded:
        yield note(
            "float32 tensors", rounded, "convert the released folder instead, if you did not train this one"
        )
    else:
        yield ok("float32 tensors", f"the decays (A_log) in {folder} are as released")


def _thinking(config: TrainConfig) -> Iterator[Finding]:
    """What the chat template does about thinking."""
    try:
        template = read_chat_template(config.model.hf)
    except (OSError, ValueError):
        return  # reading the rows reports it
    if not writes_thinking(template):
        yield note(
            "thinking",
            f"the chat template in {config.model.hf} writes no <think>, but those of this family do",
            "copy chat_template.jinja from the released folder, or train without thinking on purpose",
        )
        return
    switch = "a request may switch it" if switches_thinking(template) else "a request cannot switch it"
    rules = f"empty blocks are {config.data.empty_think}, earlier answers {config.data.earlier_answers}"
    yield ok("thinking", f"the chat template writes it, and {switch}; {rules}")
