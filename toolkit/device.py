"""The platform that a command runs on."""

from __future__ import annotations

from megatron_vl.errors import UserError


def chosen_platform(wanted: str, option: str = "--platform") -> str:
    """``cuda`` or ``cpu``, as ``wanted`` or (``auto``) as there is.

    Raises:
        UserError: CUDA is wanted, by ``option``, where torch sees no GPU.
    """
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise UserError(
            f"{option} cuda: torch sees no GPU here; leave it out, or give cpu (megatron-vl doctor says more)"
        )
    return ("cuda" if found else "cpu") if wanted == "auto" else wanted
