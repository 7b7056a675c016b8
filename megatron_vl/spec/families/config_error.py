"""The error of a Hugging Face config that cannot be used."""

from __future__ import annotations

from megatron_vl.system.errors import UserError


class ConfigError(UserError, ValueError):
    """A Hugging Face config cannot be used. The message names the field and what would be valid."""
