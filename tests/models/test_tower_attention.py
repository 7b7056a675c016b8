"""Towers whose layers take our Triton kernels are the towers that take torch's SDPA; how a backend is chosen."""

from __future__ import annotations

import pytest
import torch

from megatron_vl.models.attention import choose_backend
from megatron_vl.models.tower_attention import tower_attention
from tests.training.process import run_single
from tests.training.test_optimizer import STEP


def test_a_step_with_the_kernels_is_the_step_without(tiny_checkpoint) -> None:
    """One step from the same weights on the same rows, the kernels in Triton's interpreter; window layers take them, too."""
    plain, kernels = run_single(
        "import os\nos.environ['TRITON_INTERPRET'] = '1'\n"
        + STEP
        + """
from megatron_vl.models import build, tower_attention
from tests.models.triton_checks import mend_interpreter
mend_interpreter()
calls, attend = [], tower_attention._attend
def counted(*args): calls.append(1); return attend(*args)
tower_attention._attend = counted
data = feed.next_step()
def step(wrapped, optimizer):
    result = train_step(wrapped, optimizer, data.rows, grid, 256)
    return [result.loss, result.grad_norm, len(calls)]
RESULT = [step(wrapped, optimizer)]
build.choose_backend = lambda name, *, causal, **rest: "sdpa" if causal else "triton"
chunks = build_chunks(platform, spec, layout, config, pixel_mean=(0.5,) * 3, pixel_std=(0.5,) * 3)
wrapped = wrap(config, chunks)
RESULT.append(step(wrapped, build_optimizer(config, platform, wrapped)))
""",
        HF=str(tiny_checkpoint(vision_heads=2)),  # of 40
    )
    assert plain[2] == 0 and kernels[2] > 0
    assert kernels[:2] == pytest.approx(plain[:2], rel=1e-5)


def test_triton_is_for_towers_in_bfloat16() -> None:
    def chosen(name: str, head_dim: int = 72, causal: bool = False, **more) -> str:
        return choose_backend(name, platform="cuda", head_dim=head_dim, causal=causal, **more)

    assert chosen("triton") == "triton"
    for options in ({"causal": True}, {"head_dim": 76}, {"head_dim": 256}, {"dtype": torch.float32}):
        with pytest.raises(ValueError, match="vision towers in bfloat16"):
            chosen("triton", **options)
    assert [chosen("auto"), chosen("auto", 80), chosen("auto", 64)] == ["triton", "triton", "torch_varlen"]
    assert chosen("auto", 72, dtype=torch.float16) == "torch_varlen"
    assert chosen("auto", 128, causal=True) == "te"


def test_a_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        tower_attention(torch.zeros(4, 3 * 68), torch.zeros(4, 34), torch.zeros(4, 34), torch.tensor([0, 4]), 68)
