"""FP8 weights in blocks, as in the released ``*-FP8`` folders: read as plain weights, and written.

A matrix ``NAME`` holds E4M3 values, and ``NAME_scale_inv`` the scale of each block, of 128 rows and columns
as released. The last blocks of a matrix may be smaller, as in serving engines. A weight is the product of the
two in float32, rounded once to the type that ``config.json`` names (``dtype``; bfloat16 if it names none):
bit for bit what transformers 5.17 to 5.24 loads in that type with ``dequantize``, which knows neither smaller
blocks nor stacks of experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_vl.spec.families.hf_folder import SCALE_SUFFIX, fp8_block_size
from megatron_vl.weights.tensor_files import (
    CODE_BY_DTYPE,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    MatrixRegion,
    WeightsError,
)
from megatron_vl.weights.trained_media import read_json_object

from .tensor_folder import TensorFolder

FP8 = torch.float8_e4m3fn
RELEASED_BLOCK_SIZE = (128, 128)


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a matrix, or of each matrix of a stack."""

    shape: tuple[int, ...]
    block_size: tuple[int, int]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        sides = zip(self.shape[-2:], self.block_size, strict=True)
        return (*self.shape[:-2], *(-(-side // block_side) for side, block_side in sides))

    def scale_rows(self, row: int, row_end: int) -> Tensor:
        """The row of the scales, int64 [row_end - row], of each row of the (stacked) matrix."""
        rows = torch.arange(row, row_end)
        return rows // self.shape[-2] * self.scale_shape[-2] + rows % self.shape[-2] // self.block_size[0]

    def first_row(self, scale_row: int) -> int:
        """The first row of the (stacked) matrix that has this row of the scales."""
        matrix, block_row = divmod(scale_row, self.scale_shape[-2])
        return matrix * self.shape[-2] + block_row * self.block_size[0]


class Fp8Folder(TensorFolder):
    """A folder of FP8 weights that is read as if its weights were not quantised. Scales are no tensors of it.

    Attributes:
        stored: the folder as it is.
        weight_dtype: the type of the weights that are read.
        grid_by_tensor: the blocks of each FP8 tensor.

    Raises:
        WeightsError: a tensor has scales of a wrong shape or type.
    """

    def __init__(self, stored: TensorFolder, block_size: tuple[int, int], weight_dtype: torch.dtype) -> None:
        vars(self).update(vars(stored))  # the same open files
        self.stored, self.weight_dtype = stored, weight_dtype
        names = [name for name in stored.file_by_tensor if not name.endswith(SCALE_SUFFIX)]
        self.file_by_tensor = {name: stored.file_by_tensor[name] for name in names}
        self.grid_by_tensor: dict[str, BlockGrid] = {}
        for scale_name in [name for name in stored.file_by_tensor if name.endswith(SCALE_SUFFIX)]:
            name = scale_name.removesuffix(SCALE_SUFFIX)
            if name not in self.file_by_tensor:
                raise WeightsError(f"{self.path}: tensor {scale_name!r} scales {name!r}, which is missing")
            self.grid_by_tensor[name] = BlockGrid(self.shape(name), block_size)
            self._check_scales(name, scale_name)

    def _check_scales(self, name: str, scale_name: str) -> None:
        code, scale_code = self.stored.dtype_code(name), self.stored.dtype_code(scale_name)
        if code != "F8_E4M3" or scale_code not in DTYPE_BY_CODE or len(self.shape(name)) not in (2, 3):
            raise WeightsError(
                f"{self.path}: tensor {name!r} has type {code} and scales of type {scale_code}; only matrices"
                f" of type F8_E4M3 with scales of type {', '.join(DTYPE_BY_CODE)} are read"
            )
        if (found := self.stored.shape(scale_name)) != (expected := self.grid_by_tensor[name].scale_shape):
            raise WeightsError(
                f"{self.path}: tensor {scale_name!r} has shape {list(found)}; weight_block_size in"
                f" config.json says {list(expected)}"
            )

    def dtype(self, tensor_name: str) -> torch.dtype:
        return self.weight_dtype if tensor_name in self.grid_by_tensor else super().dtype(tensor_name)

    def dtype_code(self, tensor_name: str) -> str:
        is_fp8 = tensor_name in self.grid_by_tensor
        return CODE_BY_DTYPE[self.weight_dtype] if is_fp8 else super().dtype_code(tensor_name)

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        grid = self.grid_by_tensor.get(tensor_name)
        values = self.stored.read_region(tensor_name, region)
        if grid is None or region.is_empty:
            return values
        scale_rows = grid.scale_rows(region.row, region.row_end)
        scale_cols = torch.arange(region.col, region.col_end) // grid.block_size[1]
        first_row, first_col = int(scale_rows[0]), int(scale_cols[0])
        scale_region = MatrixRegion(first_row, int(scale_rows[-1]) + 1, first_col, int(scale_cols[-1]) + 1)
        scales = self.stored.read_region(tensor_name + SCALE_SUFFIX, scale_region).float()
        scales = scales.index_select(1, scale_cols - first_col).index_select(0, scale_rows - first_row)
        return scales.mul_(values.float()).to(self.weight_dtype)


def is_fp8_folder(hf_dir: str | Path) -> bool:
    """Whether the config of a folder says that it has FP8 weights."""
    return fp8_block_size(read_json_object(Path(hf_dir) / "config.json")) is not None


def open_tensor_folder(hf_dir: str | Path) -> TensorFolder:
    """Opens the weights of a folder, dequantised if its config says FP8. Raises its errors."""
    folder, config = TensorFolder(hf_dir), read_json_object(Path(hf_dir) / "config.json")
    if (block_size := fp8_block_size(config)) is None:
        return folder
    sections = (config, config.get("text_config") or {})
    type_names = [section.get(name) for section in sections for name in ("dtype", "torch_dtype")]
    weight_dtype = DTYPE_BY_NAME.get(next(filter(None, type_names), ""), torch.bfloat16)
    return Fp8Folder(folder, block_size, weight_dtype)


@dataclass
class Fp8Output:
    """A tensor that is written in FP8: first its values, of whole rows of blocks at a time, then its scales.

    A block takes the scale ``peak / 448``, so that its largest value becomes the largest of E4M3; values are
    rounded to the nearest. Blocks that are equal to those of ``original`` keep its bytes: what was not
    trained does not change, however its scales were chosen.
    """

    grid: BlockGrid
    read_values: Callable[[MatrixRegion], Tensor]
    """Returns a region of the new values, float32."""
    original: tuple[Fp8Folder, str] | None = None
    """The folder and tensor that the new values come from."""
    _scale_rows: dict[int, Tensor] = field(default_factory=dict)
    """The scales of the values that were read, which are not computed a second time."""

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.original is None:
            return torch.float32
        folder, name = self.original
        return folder.stored.dtype(name + SCALE_SUFFIX)

    def read_weight(self, region: MatrixRegion) -> Tensor:
        """Whole rows of the E4M3 values."""
        numbers = self.grid.scale_rows(region.row, region.row_end)
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        weight, scales = self._quantise(first, end)
        self._scale_rows |= zip(range(first, end), scales, strict=True)
        first_row = self.grid.first_row(first)
        return weight[region.row - first_row : region.row_end - first_row]

    def read_scales(self, region: MatrixRegion) -> Tensor:
        """Whole rows of the scales. Their values must have been read, and each is returned once."""
        return torch.stack([self._scale_rows.pop(row) for row in range(region.row, region.row_end)])

    def _quantise(self, scale_row: int, scale_row_end: int) -> tuple[Tensor, Tensor]:
        cols, block_cols = self.grid.shape[-1], self.grid.block_size[1]
        region = MatrixRegion(self.grid.first_row(scale_row), self.grid.first_row(scale_row_end), 0, cols)
        values = self.read_values(region)
        block_rows = self.grid.scale_rows(region.row, region.row_end) - scale_row

        def tiles_of(elements: Tensor) -> Tensor:
            """[rows, blocks, columns of a block]: without a copy if the last block is whole."""
            whole = pad(elements, (0, -cols % block_cols)) if cols % block_cols else elements
            return whole.unflatten(1, (-1, block_cols))

        def largest_of_blocks(tile_peaks: Tensor) -> Tensor:
            peaks = tile_peaks.new_zeros(scale_row_end - scale_row, tile_peaks.shape[1])
            return peaks.scatter_reduce_(0, block_rows[:, None].expand_as(tile_peaks), tile_peaks, "amax")

        tiles = tiles_of(values)
        peaks = largest_of_blocks(torch.maximum(tiles.amax(2), -tiles.amin(2)))
        limit = torch.finfo(FP8).max
        factors = torch.where(peaks > 1e-30, limit / peaks, 1.0)
        scales = (1 / factors).to(self.scale_dtype)
        if self.scale_dtype != torch.float32:
            factors = 1 / scales.float()  # of the scale that readers find
        scaled = (tiles * factors.index_select(0, block_rows)[:, :, None]).clamp_(-limit, limit)
        weight = scaled.to(FP8).flatten(1)[:, :cols]
        if self.original is None:
            return weight, scales

        folder, name = self.original
        earlier = folder.read_region(name, region)
        is_changed = largest_of_blocks(tiles_of(earlier != values.to(earlier.dtype)).any(2).byte()) > 0
        scale_region = MatrixRegion(scale_row, scale_row_end, 0, scales.shape[1])
        earlier_weight = folder.stored.read_region(name, region).view(torch.uint8)
        earlier_scales = folder.stored.read_region(name + SCALE_SUFFIX, scale_region)
        element_changed = is_changed.index_select(0, block_rows).repeat_interleave(block_cols, 1)[:, :cols]
        weight_bytes = torch.where(element_changed, weight.view(torch.uint8), earlier_weight)
        return weight_bytes.view(FP8), torch.where(is_changed, scales, earlier_scales)
