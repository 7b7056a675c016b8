"""Recomputation under FP8 with delayed scaling, by Transformer Engine.

The first module of an FP8 region reduces all gradients' amaxes over the ranks, last in its backward pass. A
module that runs again finds itself first in a region of its own: so do all linears of each layer, and after
them, outside FP8, a norm of the tower, whose backward pass comes first in rows without images and last in
others. Ranks whose rows differ then waited for each other for ever.
"""

from typing import Any


def reduce_amaxes_once() -> None:
    """Makes layers that run again leave amaxes to the layer that ran first. Idempotent.

    Such layers may not begin a region without linears: no module would reduce the gradients' amaxes.
    """
    from transformer_engine.pytorch.distributed import activation_recompute_forward as Recompute
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    enter, leave, flags = Recompute.__enter__, Recompute.__exit__, Recompute._is_first_fp8_module
    if enter.__module__ == __name__:
        return

    def enter_nested(self: Any) -> None:
        if self.recompute_phase:
            self.flag_outside = Manager.quantization_state.is_first_fp8_module
            Manager.quantization_state.autocast_depth += 1  # so that no region begins within
            flags.insert(0, flags.pop())  # the last layer runs again first, and `enter` takes flags[0]
        enter(self)

    def leave_nested(self: Any, *error: Any) -> None:
        leave(self, *error)
        state = Manager.quantization_state
        state.is_first_fp8_module = self.recompute_phase and self.flag_outside
        state.autocast_depth -= self.recompute_phase

    Recompute.__enter__, Recompute.__exit__ = enter_nested, leave_nested
