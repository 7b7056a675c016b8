"""What a model with linear attention refuses, and where its random weights are drawn."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_vl.config import RunConfigError, parse_config
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.base import LinearAttentionSpec
from megatron_vl.training.resolve import check_fp8_linear_attention
from tests.support.ranks import in_ranks
from tests.test_config import NORMS_AGAIN

SPEC = read_spec(Path(__file__).resolve().parents[1] / "hf_configs" / "Qwen3.5-9B.json")


def test_fp8_rejects_widths_that_16_does_not_divide() -> None:
    """The 9B: 2 x 16 x 128 + 32 x 128 channels, 32 x 128 gates, and 2 x 32 numbers are 12,352 rows."""
    linear = SPEC.language.linear_attention
    fp8 = ["--fp8.recipe", "tensorwise", "--parallel.tp"]
    check_fp8_linear_attention(linear, parse_config([*fp8, "4"]))
    with pytest.raises(RunConfigError, match=r"fp8\.recipe tensorwise: with parallel\.tp 8, .* 1544 rows"):
        check_fp8_linear_attention(linear, parse_config([*fp8, "8"]))
    with pytest.raises(RunConfigError, match="leave out layernorm"):
        check_fp8_linear_attention(linear, parse_config([*fp8, "4", *NORMS_AGAIN.split()]))


@in_ranks()
def test_random_weights_are_drawn_where_the_generators_of_the_ranks_are() -> None:
    """On the CPU, they would be the same on all ranks, and core would warn for each layer."""
    get_platform("cpu")
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vl.models.gated_delta_net import GatedDeltaNet

    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    torch.cuda.current_device = lambda: torch.device("meta")  # the GPU is the meta device
    one_rank = SimpleNamespace(size=lambda: 1)
    made = GatedDeltaNet(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2),
        layer_number=1,
        spec=LinearAttentionSpec(1, 2, 16, 16, 4, (0,)),
        column=torch.nn.Identity,
        row=torch.nn.Identity,
        pg_collection=SimpleNamespace(tp=one_rank, cp=one_rank),
    )
    assert {made.get_parameter(name).device.type for name in ("conv1d.weight", "A_log")} == {"meta"}
