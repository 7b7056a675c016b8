"""Megatron-core based 3D-parallel training for Qwen-VL models."""

__version__ = "0.1.0"
