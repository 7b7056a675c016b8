"""What a model with linear attention refuses, and its layer in a row that ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vl.config import Fp8Config, RunConfigError
from megatron_vl.models.transformer_configs import check_linear_attention
from megatron_vl.spec.families import read_spec
from tests.models.programs import devices_of_random_weights
from tests.support.ranks import call

SPEC = read_spec(Path(__file__).resolve().parents[1] / "hf_configs" / "Qwen3.5-9B.json")


def test_what_was_never_tried_is_refused_by_name() -> None:
    check_linear_attention(SPEC, Fp8Config())
    with pytest.raises(RunConfigError, match=r"fp8\.recipe tensorwise: qwen3_5 .* set it to none"):
        check_linear_attention(SPEC, Fp8Config(recipe="tensorwise"))


@pytest.mark.ranks
def test_random_weights_are_drawn_where_the_generators_of_the_ranks_are() -> None:
    """On the CPU, they would be the same on all ranks, and core would warn for each layer."""
    assert call(devices_of_random_weights) == {"conv1d.weight": "meta", "A_log": "meta"}
