"""Chooses the platform that a command runs on."""

from __future__ import annotations

from typing import Literal

from megatron_vl.errors import UserError


def choose_platform(
    requested_platform: Literal["auto", "cuda", "cpu"], option_flag: str = "--platform"
) -> Literal["cuda", "cpu"]:
    """Returns ``cuda`` or ``cpu``: ``requested_platform``, or for ``auto`` the one that this machine has.

    Raises:
        UserError: ``requested_platform`` is ``cuda``, but torch sees no GPU. The message names
            ``option_flag``.
    """
    import torch

    cuda_is_available = torch.cuda.is_available()
    if requested_platform == "cuda" and not cuda_is_available:
        raise UserError(
            f"{option_flag} cuda: torch sees no GPU here; leave it out, or give cpu (see megatron-vl doctor)"
        )
    if requested_platform == "auto":
        return "cuda" if cuda_is_available else "cpu"
    return requested_platform
