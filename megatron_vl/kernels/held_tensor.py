"""A tensor that is recognised again by its memory. Imports no Triton."""

from torch import Tensor


class HeldTensor:
    """Holds a tensor, so that no other one gets its address."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def has_values_of(self, other: Tensor) -> bool:
        """Whether ``other`` has all of its memory in the same order, not written since."""
        return (
            other.data_ptr() == self._tensor.data_ptr()
            and other.numel() == self._tensor.numel()
            and other.dtype == self._tensor.dtype
            and other.is_contiguous()
            and self._tensor.is_contiguous()
            and other._version == self._version
        )
