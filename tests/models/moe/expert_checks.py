"""Compares grouped experts with torch expert by expert, alone and in core's DDP; prints the largest
errors as JSON.

It runs on two ranks with TRITON_INTERPRET=1. Transformer Engine's linears need a GPU; only their weights
are imitated here.
"""

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vl.platform import get_platform

get_platform("cpu")

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.tensor_parallel import checkpoint  # noqa: E402
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules  # noqa: E402

from megatron_vl.kernels.experts.token_copies import make_row_ids  # noqa: E402
from megatron_vl.models.attention import PackedRow, keep_layer_outputs  # noqa: E402
from megatron_vl.models.lora import add_to_output  # noqa: E402
from megatron_vl.models.moe import experts  # noqa: E402
from megatron_vl.models.moe.dispatch import ExpertRows  # noqa: E402
from megatron_vl.models.moe.experts import GroupedAdapter, GroupedExperts, PlannedLinear  # noqa: E402
from megatron_vl.parallel.ddp import ReplicaDDP  # noqa: E402
from megatron_vl.parallel.process_grid import init_distributed  # noqa: E402
from tests.kernels.triton_checks import fix_interpreter  # noqa: E402
from tests.support.expert_config import expert_config  # noqa: E402

HIDDEN, FFN, EXPERTS = 32, 24, 4
CONFIG = expert_config(HIDDEN, FFN, EXPERTS, calculate_per_token_loss=True)
MICROBATCHES = [[[3, 0, 13, 7], [0, 0, 0, 0]], [[1, 0, 2, 3], [0, 0, 0, 4]]]
"""Rows of each expert by microbatch and rank; one rank has no rows, and one expert never has any.

Experts with more rows than a tile has are in :func:`layer_error`: the interpreter is slow with each row.
"""


class Weights(nn.Module):
    """``weight0`` [out, in] and so on."""

    def __init__(self, experts: int, features_in: int, features_out: int, **unused: object) -> None:
        super().__init__()
        self.num_gemms = experts
        for expert in range(experts):
            weight = nn.Parameter(torch.randn(features_out, features_in) * 0.2)
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)


class Linear(PlannedLinear, Weights):
    """The weights, multiplied by our products."""


class Layer(nn.Module):
    """A dense linear (which stands for what precedes experts), then experts."""

    def __init__(self) -> None:
        super().__init__()
        groups = SimpleNamespace(ep=None, expt_tp=None)
        self.dense = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = GroupedExperts(
            EXPERTS,
            CONFIG,
            submodules=GroupedMLPSubmodules(linear_fc1=Linear, linear_fc2=Linear),
            pg_collection=groups,
        )
        self.experts.planned = True  # float32, which the interpreter computes

    def forward(self, x: Tensor, counts: list[int] | ExpertRows, probs: Tensor) -> Tensor:
        rows = counts if isinstance(counts, ExpertRows) else torch.tensor(counts)
        return self.experts(self.dense(x), rows, probs)[0]

    def reference(
        self, x: Tensor, counts: list[int], probs: Tensor, source: Tensor | slice = slice(None)
    ) -> Tensor:
        """Computes the same, expert by expert; ``source``: the token of each row."""
        parts = zip(self.dense(x)[source].split(counts), probs.split(counts), strict=True)
        outs = []
        for expert, (rows, weight) in enumerate(parts):
            gate, up = F.linear(rows, getattr(self.experts.linear_fc1, f"weight{expert}")).chunk(2, -1)
            outs.append(
                F.linear(
                    F.silu(gate) * up * weight[:, None], getattr(self.experts.linear_fc2, f"weight{expert}")
                )
            )
        return torch.cat(outs)

    def fuse(self) -> None:
        """Makes weight gradients go to ``main_grad``."""
        self.experts.linear_fc1.fuse_wgrad_accumulation = self.experts.linear_fc2.fuse_wgrad_accumulation = (
            True
        )


def difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """The largest difference, relative to each reference's largest value."""
    each = [
        (a - b).abs().max() / b.abs().max().clamp(min=1e-6)
        for a, b in zip(ours, reference, strict=True)
        if b.numel()
    ]
    return float(torch.stack(each).max())  # not Python's max, which passes over NaN


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


class AdaptedLayer(Layer):
    """Frozen experts with adapters, which compute the activation again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)
        self.experts.activation_recompute = True
        for linear, width, height in self.linears():
            factors = [
                [torch.randn(*size) * 0.2 for _ in range(EXPERTS)] for size in ((8, width), (height, 8))
            ]
            linear.adapter = GroupedAdapter(*factors, 1.5, is_expert_parallel=False)
            linear.register_forward_hook(add_to_output)

    def linears(self) -> list[tuple[nn.Module, int, int]]:
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        return [(fc1, HIDDEN, 2 * FFN), (fc2, FFN, HIDDEN)]

    def merged(self) -> Layer:
        """A layer with the sums of weights and adapters, which depend on the adapters."""
        layer = Layer()
        layer.dense = self.dense
        for (linear, *_), (plain, *_) in zip(self.linears(), AdaptedLayer.linears(layer), strict=True):
            for expert in range(EXPERTS):
                a, b, weight = (
                    getattr(part, f"weight{expert}")
                    for part in (linear.adapter.lora_A, linear.adapter.lora_B, linear)
                )
                delattr(plain, f"weight{expert}")
                setattr(plain, f"weight{expert}", weight + 1.5 * b @ a)
        return layer


class RecomputedLayer(Layer):
    """A layer under full recompute that keeps the output of its first matrices."""

    def __init__(self) -> None:
        super().__init__()
        keep_layer_outputs([self], ["experts"])
        self.row = PackedRow()

    def __call__(self, x: Tensor, rows: ExpertRows, probs: Tensor) -> Tensor:
        def run(x: Tensor, probs: Tensor) -> Tensor:
            return super(RecomputedLayer, self).__call__(x, rows, probs, packed_seq_params=self.row)

        return checkpoint(run, False, x, probs)

    def forward(self, *inputs: Any, packed_seq_params: PackedRow) -> Tensor:
        return super().forward(*inputs)


def num_products_of_recomputed_layer() -> float:
    """The products [rows, features] that a recomputed layer computes in both passes, beyond one each and
    one for each gradient."""
    with patch.object(experts, "row_product", wraps=experts.row_product) as product:
        error = layer_error(layer_class=RecomputedLayer)
    return error + (product.call_count - 4)


def layer_error(*, main_grad: bool = False, extra: int = 0, layer_class: type[Layer] = Layer) -> float:
    """Output and all gradients of a layer that gathers its rows, without DDP.

    ``main_grad`` is not empty before.

    Tokens go to several experts, to one or to none. The memory after the experts' rows, and its gradient, is
    NaN.
    """
    layer = layer_class()
    chosen = torch.zeros(150, EXPERTS, dtype=torch.bool)
    chosen[10:140, 2] = chosen[50:57, 3] = chosen[[3, 70, 141], 0] = True
    counts = chosen.sum(0).tolist()
    x = torch.randn(len(chosen), HIDDEN, requires_grad=True)
    probs = torch.rand(sum(counts), requires_grad=True)
    dy = torch.randn(sum(counts), HIDDEN)
    weights = [weight for weight in layer.experts.parameters() if weight.requires_grad]
    inputs = [x, probs, layer.dense.weight]
    plain = layer.merged() if isinstance(layer, AdaptedLayer) else layer
    reference = plain.reference(x, counts, probs, source=chosen.T.nonzero()[:, 1])
    want = [reference, *torch.autograd.grad(reference, [*inputs, *weights], dy)]
    if main_grad:
        layer.fuse()
        for weight in weights:
            weight.main_grad = torch.full_like(weight, 0.5)

    rows = ExpertRows(chosen.sum(0), make_row_ids(chosen), sum(counts) + extra)
    out = layer(x, rows, torch.cat((probs, torch.full((extra,), torch.nan))))
    value = out[: sum(counts)].detach().clone()
    out.backward(torch.cat((dy, torch.full((extra, HIDDEN), torch.nan))))
    ours = [w.main_grad - 0.5 if main_grad else gradient_of(w) for w in weights]
    return difference([value, *(gradient_of(t) for t in inputs), *ours], want)


def alone(**options: Any) -> float:
    """The error of a layer without DDP, computed by the first rank, which prints it."""
    return 0.0 if dist.get_rank() else layer_error(**options)


def rows_of(step: int, microbatch: int, chunk: int, rank: int) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """(x, counts, probs, gradient of the output), the same on every rank that asks."""
    counts = MICROBATCHES[microbatch][rank]
    draw = torch.Generator().manual_seed(((step * 10 + microbatch) * 10 + chunk) * 10 + rank)
    x, dy = (torch.randn(sum(counts), HIDDEN, generator=draw) for _ in range(2))
    return x, counts, torch.rand(sum(counts), generator=draw), dy


def expected(chunks: list[Layer], step: int) -> list[Tensor]:
    """Gradients of all ranks' rows, summed."""
    for number, chunk in enumerate(chunks):
        for microbatch in range(len(MICROBATCHES)):
            for rank in range(dist.get_world_size()):
                x, counts, probs, dy = rows_of(step, microbatch, number, rank)
                chunk.reference(x, counts, probs).backward(dy)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    return [gradient_of(p) for p in parameters if p.requires_grad]


def ddp_error(*, overlap: bool, frozen: bool = False) -> float:
    """Runs two chunks of two ranks, two microbatches, two steps with overlap (DDP learns in the first).

    Returns the largest error of reduced gradients; each must have been reduced once.
    """
    torch.manual_seed(1)
    chunks, references = [[Layer(), Layer()] for _ in range(2)]
    for chunk, reference in zip(chunks, references, strict=True):
        reference.load_state_dict(chunk.state_dict())
        chunk.fuse()

    if frozen:
        chunks[1].experts.requires_grad_(False)
        references[1].experts.requires_grad_(False)

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=4 * HIDDEN * FFN
    )
    wrapped = [ReplicaDDP(CONFIG, settings, chunk) for chunk in chunks]
    groups = [group for ddp in wrapped for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups]
    for ddp in wrapped:
        ddp.module.experts.report_to(ddp)
    errors = []

    for step in range(1 + overlap):
        started = run_step(wrapped, groups, step)
        if overlap:
            assert all(set(group.per_param_grad_ready_counts.values()) == {1} for group in groups)
            assert all(len(group.per_param_grad_ready_counts) == len(group.params) for group in groups)
            assert step == 0 or [started[group] for group in groups] == [1] * len(groups), started
        for ddp in wrapped:
            ddp.finish_grad_sync()
        assert [started[group] for group in groups] == [1] * len(groups), started
        parameters = [p for ddp in wrapped for p in ddp.parameters()]
        ours = [p.main_grad.clone() for p in parameters if p.requires_grad]
        for reference in references:
            reference.zero_grad()
        errors.append(difference(ours, expected(references, step)))

    return max(errors)


def run_step(wrapped: list[ReplicaDDP], groups: list, step: int) -> Counter:
    """Runs forward and backward of all microbatches. Returns how often each bucket group
    started a reduction."""
    started: Counter = Counter()
    for group in groups:
        start = type(group).start_grad_sync

        def count(*args: object, group=group, start=start, **kwargs: object) -> None:
            started[group] += 1
            start(group, *args, **kwargs)

        group.start_grad_sync = count
    for ddp in wrapped:
        ddp.zero_grad_buffer()
    for microbatch in range(len(MICROBATCHES)):
        for number in reversed(range(len(wrapped))):
            x, counts, probs, dy = rows_of(step, microbatch, number, dist.get_rank())
            ddp = wrapped[number]
            if microbatch + 1 < len(MICROBATCHES):
                with ddp.no_sync():
                    ddp(x, counts, probs).backward(dy)
            else:
                ddp(x, counts, probs).backward(dy)
    return started


def main() -> None:
    fix_interpreter()
    init_distributed(get_platform("cpu"))
    mpu.initialize_model_parallel()
    torch.manual_seed(0)
    checks: dict[str, Callable[[], float]] = {
        "gradients": alone,
        "adapters": lambda: alone(layer_class=AdaptedLayer),
        "recomputed": lambda: 0.0 if dist.get_rank() else num_products_of_recomputed_layer(),
        "rows after the last": lambda: alone(main_grad=True, extra=150),
        "DDP": lambda: ddp_error(overlap=False),
        "DDP, overlap, one chunk's experts frozen": lambda: ddp_error(overlap=True, frozen=True),
    }
    errors = {name: check() for name, check in checks.items()}

    if dist.get_rank() == 0:
        print(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
