"""Experts: what the parity table leaves out. The load-balancing loss, the counts of the routers, and names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_vl.config import ParallelConfig
from megatron_vl.models.families import read_spec
from megatron_vl.models.tensors import LayoutError
from megatron_vl.parallel.layout import run_layout
from tests.models.programs import gradients_of_cases
from tests.support.ranks import call

KINDS = ["mixed", "text", "video", "image"]
"""One sample a row, of four lengths, with tails of four lengths."""
COEFFICIENT = 0.3
"""Large, so that its gradient is a good part of the router's."""


def gradients(cases: dict[str, dict], ranks: int, out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Full gradients (and the experts' load) of named cases, all in one process group."""
    call(gradients_of_cases, ranks, cases=cases, out=str(out))
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, str]:
    """A model with one decoder layer: its load-balancing loss is that of ``transformers``."""
    from converters.convert import convert

    hf = tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32, layers=1, deepstack_layers=(1,))
    weights = tmp_path_factory.mktemp("moe") / "full"
    convert(hf, weights)
    return {"hf": str(hf), "weights": str(weights)}


def reference(hf: str) -> dict[str, torch.Tensor]:
    """``transformers``: mean loss over all loss tokens, and each sample's load-balancing loss by its share of the tokens."""
    import torch.nn.functional as F

    from megatron_vl.data.pixels import read_pixel_norm
    from toolkit.parity.batches import make_sample
    from toolkit.parity.reference import canonical, hf_inputs, load_hf

    spec, norm, model = read_spec(hf), read_pixel_norm(hf), load_hf(hf)
    samples = [make_sample(kind, spec, seed=i) for i, kind in enumerate(KINDS)]
    loss_tokens, tokens = sum(int(s.loss_mask[1:].sum()) for s in samples), sum(len(s) for s in samples)
    for sample in samples:
        out = model(**hf_inputs(sample, spec, norm), use_cache=False, output_router_logits=True)
        losses = F.cross_entropy(out.logits[0, :-1].float(), sample.token_ids[1:], reduction="none")
        loss = (losses * sample.loss_mask[1:]).sum() / loss_tokens
        (loss + COEFFICIENT * out.aux_loss * len(sample) / tokens).backward()
    return canonical({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, hf)


@pytest.fixture(scope="module")
def measured(one_layer: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    common = {**one_layer, "steps": [[[kind] for kind in KINDS]], "seq_len": 256, "aux_loss": COEFFICIENT}
    cases = {
        "TP2 + SP": common | {"tp": 2, "sequence_parallel": True},
        "DP2": common,
        "EP2": common | {"ep": 2},
        "full recompute": common | {"ep": 2, "recompute": {"language": "full"}},
        "off": common | {"ep": 2, "aux_loss": 0.0},
    }
    return gradients(cases, 2, tmp_path_factory.mktemp("gradients") / "out.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["TP2 + SP", "DP2", "EP2", "full recompute"])
def test_balancing_loss_of_one_layer_is_that_of_transformers(one_layer, measured, layout: str) -> None:
    """Four rows with tails, of which two ranks have two each, or each half of all: the scale depends on neither."""
    want, ours = reference(one_layer["hf"]), measured[layout]
    without = measured["off"]
    router = "language_model.decoder.layers.0.mlp.router.weight"
    assert (want[router] - without[router]).norm() > 0.1 * want[router].norm()  # the loss does something
    for name, gradient in want.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["TP2 + SP", "EP2", "full recompute"])
def test_every_token_is_counted_once(one_layer, measured, layout: str) -> None:
    moe = read_spec(one_layer["hf"]).language.moe
    load = measured[layout]["load"]
    assert load.shape == (1, moe.num_experts)
    assert int(load.sum()) == len(KINDS) * 256 * moe.top_k  # tails too
    assert torch.equal(load, measured["DP2"]["load"])


def test_tensor_parallel_without_sequence_parallel_is_refused(tiny_checkpoint) -> None:
    spec = read_spec(tiny_checkpoint("qwen3_vl_moe"))
    with pytest.raises(LayoutError, match=r"parallel\.tp=2 with experts needs parallel\.sequence_parallel"):
        run_layout(spec, ParallelConfig(tp=2))
    assert run_layout(spec, ParallelConfig(tp=2, sequence_parallel=True, ep=4)).ep == 4
    with pytest.raises(LayoutError, match="ep=3 does not divide 8 experts"):
        run_layout(spec, ParallelConfig(ep=3))


def test_names_of_both_kinds_of_experts() -> None:
    """Local modules list experts, grouped ones number weights; the norm before experts stays apart."""
    from megatron_vl.models.names import canonical_name

    layer = "language_model.decoder.layers.1."
    listed = canonical_name(layer + "mlp.experts.local_experts.3.linear_fc1.weight", 4, False, router=True)
    grouped = canonical_name(layer + "mlp.experts.linear_fc1.weight3", 4, False, router=True)
    assert listed == grouped == ("language_model.decoder.layers.5.mlp.experts.linear_fc1.weight", 3)
    name = "language_model.decoder.layers.5."
    assert canonical_name(layer + "pre_mlp_layernorm.weight", 4, False, router=True) == (name + "pre_mlp_layernorm.weight", None)
    assert canonical_name(layer + "pre_mlp_layernorm.weight", 4, False)[0] == name + "mlp.linear_fc1.layer_norm_weight"
