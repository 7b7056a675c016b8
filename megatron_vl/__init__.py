"""Megatron-core based 3D-parallel training for Qwen-VL models."""

from megatron_vl.core_fixes import compile_on_cpu, messages

__version__ = "0.1.0"

messages.silence()
compile_on_cpu.install()
