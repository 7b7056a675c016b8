"""Grouped experts equal torch expert by expert, alone and in core's DDP, with kernels in the interpreter, and
their tokens come back from other ranks (dispatch_checks.py).

Transformer Engine's linears need a GPU; only their weights are imitated here.
"""

from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from torch import Tensor, nn

from megatron_vl.kernels.experts.token_copies import make_row_ids
from megatron_vl.models.attention import PackedRow, keep_layer_outputs
from megatron_vl.models.lora import add_to_output
from megatron_vl.models.moe import experts
from megatron_vl.models.moe.dispatch import ExpertRows
from megatron_vl.models.moe.experts import GroupedAdapter, GroupedExperts, PlannedLinear
from megatron_vl.parallel.ddp import ReplicaDDP
from tests.kernels.triton_checks import fix_interpreter, largest
from tests.support.expert_config import expert_config
from tests.support.ranks import call, run_module
from tests.support.tiny_trainer import join

pytestmark = pytest.mark.ranks

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
HIDDEN, FFN, EXPERTS = 32, 24, 4
MICROBATCHES = [[[3, 0, 13, 7], [0, 0, 0, 0]], [[1, 0, 2, 3], [0, 0, 0, 4]]]
"""Rows of each expert by microbatch and rank; one rank has no rows, and one expert never has any.

Experts with more rows than a tile has are in :func:`layer_error`: the interpreter is slow with each row.
"""


@cache
def config() -> Any:
    return expert_config(HIDDEN, FFN, EXPERTS, calculate_per_token_loss=True)


class Linear(PlannedLinear, nn.Module):
    """``weight0`` [out, in] and so on, multiplied by our products."""

    def __init__(self, num_experts: int, features_in: int, features_out: int, **unused: object) -> None:
        super().__init__()
        self.num_gemms = num_experts
        for expert in range(num_experts):
            weight = nn.Parameter(torch.randn(features_out, features_in) * 0.2)
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)


class Layer(nn.Module):
    """A dense linear (which stands for what precedes experts), then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = GroupedExperts(
            EXPERTS,
            config(),
            submodules=GroupedMLPSubmodules(linear_fc1=Linear, linear_fc2=Linear),
            pg_collection=SimpleNamespace(ep=None, expt_tp=None),
        )
        self.experts.planned = True  # float32, which the interpreter computes
        self.linears = self.experts.linear_fc1, self.experts.linear_fc2

    def forward(self, x: Tensor, counts: list[int] | ExpertRows, probs: Tensor) -> Tensor:
        rows = counts if isinstance(counts, ExpertRows) else torch.tensor(counts)
        return self.experts(self.dense(x), rows, probs)[0]

    def matrix(self, linear: int, expert: int) -> Tensor:
        return getattr(self.linears[linear], f"weight{expert}")

    def reference(
        self, x: Tensor, counts: list[int], probs: Tensor, source: Tensor | slice = slice(None)
    ) -> Tensor:
        """Computes the same, expert by expert; ``source``: the token of each row."""
        outs = []
        parts = zip(self.dense(x)[source].split(counts), probs.split(counts), strict=True)
        for expert, (rows, weight) in enumerate(parts):
            gate, up = F.linear(rows, self.matrix(0, expert)).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up * weight[:, None], self.matrix(1, expert)))
        return torch.cat(outs)

    def fuse(self) -> None:
        """Makes weight gradients go to ``main_grad``."""
        for linear in self.linears:
            linear.fuse_wgrad_accumulation = True


class AdaptedLayer(Layer):
    """Frozen experts with adapters, which compute the activation again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)
        self.experts.activation_recompute = True
        for linear, width, height in zip(self.linears, (HIDDEN, FFN), (2 * FFN, HIDDEN), strict=True):
            factors = [[torch.randn(*s) * 0.2 for _ in range(EXPERTS)] for s in ((8, width), (height, 8))]
            linear.adapter = GroupedAdapter(*factors, 1.5, is_expert_parallel=False)
            linear.register_forward_hook(add_to_output)

    def matrix(self, linear: int, expert: int) -> Tensor:
        adapter = self.linears[linear].adapter
        a, b = (getattr(factor, f"weight{expert}") for factor in (adapter.lora_A, adapter.lora_B))
        return super().matrix(linear, expert) + 1.5 * b @ a


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


def difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    return largest(zip(ours, reference, strict=True), floor=1e-6)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def layer_error(layer: Layer, *, main_grad: bool = False, extra: int = 0) -> float:
    """Output and all gradients of a layer that gathers its rows, without DDP.

    Tokens go to several experts, to one or to none. ``main_grad`` is not empty before. The memory of
    ``extra`` rows after the experts' rows, and its gradient, is NaN.
    """
    chosen = torch.zeros(150, EXPERTS, dtype=torch.bool)
    chosen[10:140, 2] = chosen[50:57, 3] = chosen[[3, 70, 141], 0] = True
    counts = chosen.sum(0).tolist()
    x = torch.randn(len(chosen), HIDDEN, requires_grad=True)
    probs = torch.rand(sum(counts), requires_grad=True)
    dy = torch.randn(sum(counts), HIDDEN)
    weights = [weight for weight in layer.experts.parameters() if weight.requires_grad]
    inputs = [x, probs, layer.dense.weight]
    reference = layer.reference(x, counts, probs, source=chosen.T.nonzero()[:, 1])
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


def check_layers() -> None:
    fix_interpreter()
    join()
    torch.manual_seed(0)
    assert layer_error(Layer()) < 5e-6
    assert layer_error(AdaptedLayer()) < 5e-6
    assert layer_error(Layer(), main_grad=True, extra=150) < 5e-6
    with patch.object(experts, "row_product", wraps=experts.row_product) as product:
        assert layer_error(RecomputedLayer()) < 5e-6
    assert product.call_count == 4, "one product of each matrix, and one for each gradient"


def test_grouped_experts_equal_one_expert_after_another() -> None:
    call(check_layers, environment=INTERPRETED)


def rows_of(step: int, microbatch: int, chunk: int, rank: int) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """(x, counts, probs, gradient of the output), the same on every rank that asks."""
    counts = MICROBATCHES[microbatch][rank]
    draw = torch.Generator().manual_seed(((step * 10 + microbatch) * 10 + chunk) * 10 + rank)
    x, dy = (torch.randn(sum(counts), HIDDEN, generator=draw) for _ in range(2))
    return x, counts, torch.rand(sum(counts), generator=draw), dy


def expected(chunks: list[Layer], step: int) -> list[Tensor]:
    for number, chunk in enumerate(chunks):
        chunk.zero_grad()
        for microbatch in range(len(MICROBATCHES)):
            for rank in range(dist.get_world_size()):
                x, counts, probs, dy = rows_of(step, microbatch, number, rank)
                chunk.reference(x, counts, probs).backward(dy)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    return [gradient_of(p) for p in parameters if p.requires_grad]


def run_step(wrapped: list[ReplicaDDP], groups: list, step: int) -> Counter:
    """Runs all microbatches. Returns how many reductions each bucket group started and still counts."""
    started: Counter = Counter()

    def count(group: Any, start: Any, *args: object, **kwargs: object) -> None:
        started[group] += 1
        start(group, *args, **kwargs)

    for group in groups:
        group.start_grad_sync = partial(count, group, type(group).start_grad_sync)
    for ddp in wrapped:
        ddp.zero_grad_buffer()
    for microbatch in range(len(MICROBATCHES)):
        for number, ddp in reversed(list(enumerate(wrapped))):
            x, counts, probs, dy = rows_of(step, microbatch, number, dist.get_rank())
            if microbatch + 1 < len(MICROBATCHES):
                with ddp.no_sync():
                    ddp(x, counts, probs).backward(dy)
            else:
                ddp(x, counts, probs).backward(dy)
    return started


def check_ddp(overlap: bool, frozen: bool) -> None:
    """Two chunks of two ranks, two microbatches, two steps with overlap (DDP learns in the first)."""
    fix_interpreter()
    join()
    mpu.initialize_model_parallel()
    torch.manual_seed(1)
    chunks, references = [[Layer(), Layer()] for _ in range(2)]
    for chunk, reference in zip(chunks, references, strict=True):
        reference.load_state_dict(chunk.state_dict())
        chunk.fuse()
    for pair in (chunks, references):
        pair[1].experts.requires_grad_(not frozen)

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=4 * HIDDEN * FFN
    )
    wrapped = [ReplicaDDP(config(), settings, chunk) for chunk in chunks]
    groups = [group for ddp in wrapped for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups]
    for ddp in wrapped:
        ddp.module.experts.report_to(ddp)
    for step in range(1 + overlap):
        started = run_step(wrapped, groups, step)
        if overlap:
            assert all(set(group.per_param_grad_ready_counts.values()) == {1} for group in groups)
            assert all(len(group.per_param_grad_ready_counts) == len(group.params) for group in groups)
            assert step == 0 or [started[group] for group in groups] == [1] * len(groups), started
        for ddp in wrapped:
            ddp.finish_grad_sync()
        assert [started[group] for group in groups] == [1] * len(groups), started
        ours = [p.main_grad for ddp in wrapped for p in ddp.parameters() if p.requires_grad]
        assert difference(ours, expected(references, step)) < 5e-6


@pytest.mark.parametrize(("overlap", "frozen"), [(False, False), (True, True)])
def test_ddp_reduces_the_gradients_of_grouped_experts_once(overlap: bool, frozen: bool) -> None:
    """``frozen``: the experts of one chunk."""
    call(check_ddp, 2, environment=INTERPRETED, overlap=overlap, frozen=frozen)


def test_dispatched_tokens_come_back_as_if_they_had_stayed() -> None:
    """On 1 and 4 ranks, one without tokens: each goes and returns once. Core sends no padding either."""
    done = run_module("tests.models.moe.dispatch_checks", ranks=4, environment=INTERPRETED)
    assert done.returncode == 0, done.stderr[-4000:]
