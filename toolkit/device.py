"""Chooses the platform that a command runs on."""

from __future__ import annotations

from megatron_vl.errors import UserError


def chosen_platform(wanted: str, option: str = "--platform") -> str:
    """Returns ``cuda`` or ``cpu``: ``wanted``, or for ``auto`` the one that this machine has.

    Raises:
        UserError: ``wanted`` is ``cuda``, but torch sees no GPU. The message names ``option``.
    """
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise UserError(
            f"{option} cuda: torch sees no GPU here; leave it out, or give cpu (see megatron-vl doctor)"
        )
    return ("cuda" if found else "cpu") if wanted == "auto" else wanted
