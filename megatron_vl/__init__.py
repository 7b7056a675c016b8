"""Megatron-core based 3D-parallel training for Qwen-VL models."""

from megatron_vl.core_fixes import faster_imports, silenced_messages

__version__ = "0.2.0"

silenced_messages.silence_messages()
faster_imports.install_finders()
