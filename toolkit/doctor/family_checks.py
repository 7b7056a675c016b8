"""Checks what only some families have: linear attention, wide heads, float32 tensors, thinking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_vl.config import TrainConfig
from megatron_vl.data.sample.thinking import has_thinking_switch, template_has_thinking
from megatron_vl.kernels.sizes import TE_HEAD_DIMS
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import LinearAttentionSpec
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.spec.tensors import LayoutError, check_tensor_parallel
from toolkit.doctor import Finding, note_finding, ok_finding
from toolkit.doctor.machine_checks import installed_version

DELTA_RULE_WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the kernels of the delta rule compute."""


def check_family(config: TrainConfig, spec: ModelSpec, on_gpus: bool) -> Iterator[Finding]:
    """Findings about a run's model, if its family has linear attention; no others.

    Args:
        on_gpus: whether the run uses GPUs.
    """
    linear_attention = spec.language.linear_attention
    if linear_attention is None:
        return
    yield _check_linear_attention(config, spec, linear_attention, on_gpus)
    yield _check_attention_heads(config, spec.language.head_dim, on_gpus)
    yield _check_tensor_parallel(spec, linear_attention)
    yield from _check_decays(Path(config.model.hf))
    yield from _check_thinking(config)


def _check_linear_attention(
    config: TrainConfig, spec: ModelSpec, linear_attention: LinearAttentionSpec, on_gpus: bool
) -> Finding:
    """Says which kernels compute linear attention."""
    layers = f"{len(linear_attention.linear_layers)} of {spec.language.num_layers} decoder layers"
    if not on_gpus:
        return ok_finding(
            "linear attention", f"{layers}; without a GPU they run in torch, on GPUs in our kernels"
        )

    unsupported_widths = {linear_attention.key_dim, linear_attention.value_dim} - set(DELTA_RULE_WIDTHS)
    slow_text = f"{layers}; the delta rule runs in torch, which is slow,"
    if config.dtype == "float32":
        return note_finding(
            "linear attention", f"{slow_text} because dtype is float32", "set dtype to bfloat16"
        )
    if unsupported_widths:
        return note_finding(
            "linear attention",
            f"{slow_text} because its kernels have no heads of {min(unsupported_widths)}",
            "",
        )
    triton_version = installed_version("triton")
    if triton_version is None:
        return note_finding(
            "linear attention", f"{layers}; Triton is not installed", "pip install torch -c constraints.txt"
        )
    return ok_finding("linear attention", f"{layers}, with our kernels on Triton {triton_version}")


def _check_attention_heads(config: TrainConfig, head_dim: int, on_gpus: bool) -> Finding:
    """Says which kernels compute softmax attention."""
    takes_flash_attention_2 = head_dim not in TE_HEAD_DIMS and installed_version("flash-attn-4") is None
    if not on_gpus or config.model.attention != "auto" or not takes_flash_attention_2:
        return ok_finding("attention", f"heads of {head_dim}, backend {config.model.attention}")
    return ok_finding(
        "attention",
        f"heads of {head_dim} take FlashAttention-2 (torch_varlen), "
        "because flash-attn-4 is not installed and cuDNN computes wrong gradients for packed rows of them",
    )


def _check_tensor_parallel(spec: ModelSpec, linear_attention: LinearAttentionSpec) -> Finding:
    """Says which tensor parallel sizes divide all heads and widths."""

    def divides_model(tp_size: int) -> bool:
        try:
            check_tensor_parallel(spec, tp_size)
        except LayoutError:
            return False
        return True

    valid_sizes = ", ".join(str(tp) for tp in (1, 2, 4, 8, 16) if divides_model(tp))
    return ok_finding(
        "tensor parallel",
        f"parallel.tp may be {valid_sizes} ({linear_attention.key_heads} key heads of linear attention)",
    )


def _check_decays(hf_dir: Path) -> Iterator[Finding]:
    """Whether the decays of the folder of origin were rounded, if it has weights."""
    from converters.hf_checkpoint import HfCheckpoint

    try:
        rounded_text = HfCheckpoint(hf_dir).rounded_decays()
    except (ValueError, OSError):
        return  # a run needs the config only; conversion reports weights that it cannot read
    if rounded_text:
        yield note_finding(
            "float32 tensors",
            rounded_text,
            "convert the released folder instead, if you did not train this one",
        )
    else:
        yield ok_finding("float32 tensors", f"the decays (A_log) in {hf_dir} are as released")


def _check_thinking(config: TrainConfig) -> Iterator[Finding]:
    """What the chat template does about thinking."""
    try:
        chat_template = read_chat_template(config.model.hf)
    except (OSError, ValueError):
        return  # reading the rows reports it
    if not template_has_thinking(chat_template):
        yield note_finding(
            "thinking",
            f"the chat template in {config.model.hf} writes no <think>, but those of this family do",
            "replace it by chat_template.jinja of the released folder, or train without thinking on purpose",
        )
        return
    switch_text = (
        "a request may switch it" if has_thinking_switch(chat_template) else "a request cannot switch it"
    )
    rules_text = f"empty blocks are {config.data.empty_think}, earlier answers {config.data.earlier_answers}"
    yield ok_finding("thinking", f"the chat template writes it, and {switch_text}; {rules_text}")
