"""Recomputation in FP8 with delayed scaling, by Transformer Engine.

The first module of an FP8 region reduces the amaxes of all gradients over the ranks after its backward pass.
While a layer is recomputed, each of its linears counts as first. After it, so does a norm of the tower, which
is not in FP8: its backward pass comes first in a row without images and last in any other. Ranks with
different rows then enter different collectives, and hang.
"""

from typing import Any


def reduce_amaxes_once() -> None:
    """Makes only the layer that ran first in an FP8 region reduce amaxes when it is recomputed. Idempotent.

    That layer must have a linear in FP8: otherwise, no module reduces the gradients' amaxes. Pipeline chunks
    with different numbers of layers take each other's flags, which only moves a reduction to another layer.
    """
    from transformer_engine.pytorch.distributed import activation_recompute_forward as Recompute
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    enter, leave, flags = Recompute.__enter__, Recompute.__exit__, Recompute._is_first_fp8_module
    if enter.__module__ == __name__:
        return

    def enter_nested(self: Any) -> None:
        if self.recompute_phase:
            self.flag_outside = Manager.quantization_state.is_first_fp8_module
            Manager.quantization_state.autocast_depth += 1  # an outermost region would reduce
            flags.insert(0, flags.pop())  # `enter` takes flags[0], but the last layer is recomputed first
        enter(self)

    def leave_nested(self: Any, *error: Any) -> None:
        leave(self, *error)
        state = Manager.quantization_state
        state.is_first_fp8_module = self.recompute_phase and self.flag_outside
        state.autocast_depth -= self.recompute_phase

    Recompute.__enter__, Recompute.__exit__ = enter_nested, leave_nested
