"""The tensors of an exported Hugging Face folder, and what its files say about them.

They are those of the original folder, in its files. FP8 changes that: an original with FP8 weights can be
written as it is or with plain weights, and one with plain weights in FP8, with experts apart, as transformers
and vLLM read them.

What vLLM reads (``fp8.py`` at 1436674bcb3f and ``utils/quant_utils.py`` at 01693a61cbed, in
``model_executor/layers/quantization``): ``quant_method`` with "fp8", ``activation_scheme: dynamic``,
``weight_block_size``; for each matrix ``weight`` in E4M3 and ``weight_scale_inv`` in float32, of whole blocks
if it is fused with others. A module is plain if ``ignored_layers``, or else ``modules_to_not_convert``, has
its whole name: all parts of a fused one, or none.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.families.hf_folder import FP8_FIELD, SCALE_SUFFIX, WEIGHT_INDEX_FILE
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.matrix_blocks import MatrixBlock, gather_region
from megatron_vl.weights.tensor_files import (
    ANY_DTYPE_BY_CODE,
    MatrixRegion,
    WeightsError,
    make_safetensors_header,
)

from . import make_conversion_rules
from .fp8 import FP8, RELEASED_BLOCK_SIZE, BlockGrid, Fp8Folder, Fp8Output
from .hf_checkpoint import HfCheckpoint, is_carried_tensor
from .output_folder import OutputTensor
from .rules import DOWN_STACK, GATE_UP_STACK
from .tensor_folder import TensorFolder

_FP8_MATRICES = re.compile(
    r"\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj)\.weight$"
)
"""What the released FP8 folders quantise: not the tower, routers, gates, embeddings and the output layer."""
_NAMES_OF_ENGINES = {"attn.qkv": "attn.qkv_proj", "linear_attn.in_proj_b": "linear_attn.in_proj_ba"}
"""Layers that serving engines call otherwise, or fuse with others; the released folders list both names."""


def gather_from(
    source: CanonicalWeights, source_blocks: Sequence[MatrixBlock], dtype: torch.dtype
) -> Callable[[MatrixRegion], Tensor]:
    """Reads regions of a tensor that consists of these blocks of the source's tensors."""
    return lambda region: gather_region(
        source_blocks, region, lambda name, part: source.read_region(str(name), part), dtype
    )


def output_tensors(source: CanonicalWeights, original: HfCheckpoint, *, as_fp8: bool) -> list[OutputTensor]:
    """The tensors that an export writes, in model order.

    The HF tensors of one canonical tensor (q, k, v) then find its bytes in the page cache.

    Args:
        as_fp8: whether decoder matrices are written in FP8; those that are, if ``original`` has FP8 weights.

    Raises:
        WeightsError: a matrix cannot be cut into blocks.
    """
    folder = original.tensor_folder
    fp8_folder = folder if isinstance(folder, Fp8Folder) else None
    outputs: list[OutputTensor] = []
    for file, name, shape, blocks in _model_tensors(original, experts_apart=as_fp8 and fp8_folder is None):
        source_name = str(blocks[0].part_id)
        is_fp8 = name in fp8_folder.grid_by_tensor if fp8_folder else _FP8_MATRICES.search(name)
        if not (as_fp8 and is_fp8):
            dtype = folder.dtype(name)
            outputs.append(
                OutputTensor(file, name, shape, dtype, source_name, gather_from(source, blocks, dtype))
            )
            continue
        grid = fp8_folder.grid_by_tensor[name] if fp8_folder else BlockGrid(shape, RELEASED_BLOCK_SIZE)
        if fp8_folder is None and any(side % 128 for side in shape):
            raise WeightsError(
                f"{original.path}: tensor {name!r} of shape {list(shape)} cannot be written in FP8: serving"
                " engines need whole blocks of 128 x 128"
            )
        earlier = (fp8_folder, name) if fp8_folder else None
        fp8_output = Fp8Output(grid, gather_from(source, blocks, torch.float32), earlier)
        scale_types = (grid.scale_shape, fp8_output.scale_dtype)
        outputs += [
            OutputTensor(file, name, shape, FP8, source_name, fp8_output.read_weight),
            OutputTensor(file, name + SCALE_SUFFIX, *scale_types, source_name, fp8_output.read_scales, True),
        ]
    stored = fp8_folder.stored if fp8_folder and as_fp8 else folder
    for name, file in stored.file_by_tensor.items():
        if is_carried_tensor(original.spec, name):
            dtype, read_region = any_dtype(stored, name), partial(stored.read_region, name)
            outputs.append(OutputTensor(file, name, stored.shape(name), dtype, name, read_region))
    return outputs


def _model_tensors(
    original: HfCheckpoint, *, experts_apart: bool
) -> Iterator[tuple[str, str, tuple[int, ...], Sequence[MatrixBlock]]]:
    """File, stored name, shape and blocks in the canonical tensors of each tensor of the model."""
    folder = original.tensor_folder
    rules = make_conversion_rules(original.spec, "apart", "apart") if experts_apart else []
    rules_apart = {rule.name: rule for rule in rules}
    for hf_name, blocks in original.hf_blocks.items():
        stored_name = original.stored_name_by_released[hf_name]
        file = folder.file_by_tensor[stored_name]
        if not experts_apart or not hf_name.endswith((GATE_UP_STACK, DOWN_STACK)):
            yield file, stored_name, folder.shape(stored_name), blocks
            continue
        rule = rules_apart[str(blocks[0].part_id)]
        for block in rule.blocks:
            name = str(block.part_id)
            apart_name = f"{stored_name.rpartition('experts.')[0]}experts.{name.rpartition('experts.')[2]}"
            yield file, apart_name, rule.hf_shapes[name], [block.inverse_block(rule.name)]


def headers_of(outputs: Sequence[OutputTensor]) -> dict[str, bytes]:
    types_by_file: dict[str, dict[str, tuple[torch.dtype, Sequence[int]]]] = {}
    for output in outputs:
        types_by_file.setdefault(output.file, {})[output.name] = (output.dtype, output.shape)
    return {file: make_safetensors_header(types, {"format": "pt"}) for file, types in types_by_file.items()}


def any_dtype(folder: TensorFolder, tensor_name: str) -> torch.dtype:
    """The type of a stored tensor, also if it cannot be converted."""
    return ANY_DTYPE_BY_CODE[folder.dtype_code(tensor_name)]


def describe_form(output_dir: Path, outputs: Sequence[OutputTensor], *, as_fp8: bool) -> None:
    """Makes the copies of ``config.json`` and the index in ``output_dir`` say what the tensors are now."""
    config = json.loads((output_dir / "config.json").read_text())
    config.pop(FP8_FIELD, None)
    if as_fp8:
        config[FP8_FIELD] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(RELEASED_BLOCK_SIZE),
            "modules_to_not_convert": _plain_modules(outputs),
        }
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_index(output_dir, outputs)


def write_index(output_dir: Path, outputs: Sequence[OutputTensor]) -> None:
    """Writes the index of an exported folder, if it has one."""
    if (output_dir / WEIGHT_INDEX_FILE).exists():
        total_size = sum(math.prod(output.shape) * output.dtype.itemsize for output in outputs)
        weight_map = {output.name: output.file for output in sorted(outputs, key=lambda o: o.name)}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (output_dir / WEIGHT_INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _plain_modules(outputs: Sequence[OutputTensor]) -> list[str]:
    """The modules that are not quantised, under the names of the folder and of serving engines."""
    plain_names = {o.name for o in outputs if o.dtype != FP8 and not o.name.endswith(SCALE_SUFFIX)}
    modules = {name.removesuffix(".weight").removesuffix(".bias") for name in plain_names}
    modules -= {output.name.removesuffix(".weight") for output in outputs if output.dtype == FP8}
    modules |= {name.removeprefix("model.") for name in modules if name.startswith("model.visual.")}
    for ending, engine_ending in _NAMES_OF_ENGINES.items():
        modules |= {name.removesuffix(ending) + engine_ending for name in modules if name.endswith(ending)}
    return sorted(modules)
