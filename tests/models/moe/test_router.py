"""Tests of experts beyond the parity table: load-balancing loss, counts of the routers, and names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_vl.config import ModelConfig, ParallelConfig, TrainConfig
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import LayoutError
from megatron_vl.weights.weight_reader import WeightReader
from tests.models.programs import gradients_of_cases
from tests.support.ranks import call

KINDS = ["mixed", "text", "video", "image"]
"""One sample per row, of four lengths, so the tails have four lengths too."""
SEQ_LEN = 256
COEFFICIENT = 0.3
"""Large, so that its gradient is a good part of the router's gradient."""


LAYOUTS = ["TP2 + SP", "TP2 + SP, ETP2", "EP2", "full recompute", "CP2", "CP2, EP2"]


def gradients(cases: dict[str, dict], ranks: int, out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Full gradients (and the experts' load) of named cases, all in one process group."""
    call(gradients_of_cases, ranks, cases=cases, out=str(out))
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, str]:
    """A model with one decoder layer: its load-balancing loss is that of ``transformers``."""
    from converters.convert import convert_weights

    hf = tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32, layers=1, deepstack_layers=(1,))
    weights = tmp_path_factory.mktemp("moe") / "full"
    convert_weights(hf, weights)
    return {"hf": str(hf), "weights": str(weights)}


@pytest.fixture(scope="module")
def reference(one_layer: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """``transformers``: mean loss over all loss tokens, and each sample's load-balancing loss by its
    share of tokens.

    The latter comes from a row padded like ours, with an attention mask that leaves out its tail.
    """
    import torch.nn.functional as F
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    from megatron_vl.data.sample.pixel_settings import read_pixel_norm
    from toolkit.parity.random_samples import make_sample
    from toolkit.parity.reference import hf_inputs, load_hf_for_training, write_canonical

    hf, folder = one_layer["hf"], tmp_path_factory.mktemp("reference") / "gradients"
    spec, norm = read_spec(hf), read_pixel_norm(hf)
    model = load_hf_for_training(hf)
    samples = [make_sample(kind, spec, seed=i) for i, kind in enumerate(KINDS)]
    loss_tokens, tokens = sum(int(s.loss_mask[1:].sum()) for s in samples), sum(len(s) for s in samples)
    for sample in samples:
        out = model(**hf_inputs([sample], spec, norm), use_cache=False, output_router_logits=True)
        losses = F.cross_entropy(out.logits[0, :-1].float(), sample.token_ids[1:], reduction="none")
        loss = (losses * sample.loss_mask[1:]).sum() / loss_tokens
        tail = SEQ_LEN - len(sample)
        mask = torch.tensor([[1] * len(sample) + [0] * tail])
        logits = tuple(F.pad(layer, (0, 0, 0, tail), value=3.0) for layer in out.router_logits)
        balance = load_balancing_loss_func(
            logits, spec.language.moe.num_experts, spec.language.moe.top_k, mask
        )
        (loss + COEFFICIENT * balance * len(sample) / tokens).backward()

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    write_canonical(gradients, hf, folder)
    weight_reader = WeightReader(folder)
    return {name: weight_reader.read_shard(name) for name in weight_reader.tensor_names()}


@pytest.fixture(scope="module")
def measured(
    one_layer: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, torch.Tensor]]:
    common = {**one_layer, "steps": [[[kind] for kind in KINDS]], "seq_len": SEQ_LEN, "aux_loss": COEFFICIENT}
    cases = {
        "TP2 + SP": common | {"tp": 2, "sequence_parallel": True},
        "TP2 + SP, ETP2": common | {"tp": 2, "sequence_parallel": True, "etp": 2},
        "DP2": common,
        "CP2": common | {"cp": 2},
        "CP2, EP2": common | {"cp": 2, "ep": 2},
        "EP2": common | {"ep": 2},
        "full recompute": common | {"ep": 2, "recompute": {"language": "full"}},
        "off": common | {"ep": 2, "aux_loss": 0.0},
    }
    return gradients(cases, 2, tmp_path_factory.mktemp("gradients") / "out.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [*LAYOUTS, "DP2"])
def test_balancing_loss_of_one_layer_is_that_of_transformers(reference, measured, layout: str) -> None:
    """Of four rows with tails, two ranks have two each, or half of each; the scale must not
    depend on that."""
    want, ours = reference, measured[layout]
    without = measured["off"]
    router = "language_model.decoder.layers.0.mlp.router.weight"
    assert (want[router] - without[router]).norm() > 0.1 * want[router].norm()  # the loss does something
    for name, gradient in want.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_real_token_is_counted_once(one_layer, measured, layout: str) -> None:
    """Padding is not counted, wherever it is: a rank's whole half of the shortest rows
    with sequence parallelism."""
    from toolkit.parity.random_samples import make_sample

    spec = read_spec(one_layer["hf"])
    moe = spec.language.moe
    load = measured[layout]["load"]
    lengths = [len(make_sample(kind, spec, seed=i)) for i, kind in enumerate(KINDS)]
    assert min(lengths) <= SEQ_LEN // 2 and max(lengths) < SEQ_LEN
    assert load.shape == (1, moe.num_experts)
    assert int(load.sum()) == sum(lengths) * moe.top_k
    assert torch.equal(load, measured["DP2"]["load"])


@pytest.mark.parametrize(
    ("asked", "fields", "coefficient", "reason"),
    [
        ({}, {}, 0.0, "output_router_logits is not true in .*; --model.moe_aux_loss 0.02 adds it"),
        ({"output_router_logits": False}, {}, 0.0, "output_router_logits is not true"),
        ({"output_router_logits": True}, {}, 0.02, "router_aux_loss_coef"),
        ({"output_router_logits": True}, {"moe_aux_loss": 0.0}, 0.0, "model.moe_aux_loss"),
        ({}, {"moe_aux_loss": 0.3}, 0.3, "model.moe_aux_loss"),
        ({"output_router_logits": True}, {"freeze_language": True}, 0.0, "model.freeze_language"),
    ],
)
@pytest.mark.parametrize("section", ["text_config", None])
def test_balancing_loss_follows_the_config(
    tiny_checkpoint, asked: dict, fields: dict, coefficient: float, reason: str, section: str | None
) -> None:
    from megatron_vl.models.build import aux_loss

    config = json.loads((tiny_checkpoint("qwen3_vl_moe") / "config.json").read_text())
    config["text_config"]["router_aux_loss_coef"] = 0.02
    config["text_config"].pop("output_router_logits", None)
    (config[section] if section else config).update(asked)
    spec = read_spec(config)
    found, why = aux_loss(spec, ModelConfig(**fields))
    assert found == coefficient and re.match(reason, why)
    # Weights that were converted with another coefficient are those of the same model.
    assert spec.language == read_spec(tiny_checkpoint("qwen3_vl_moe")).language


def test_tensor_parallel_without_sequence_parallel_is_refused(tiny_checkpoint) -> None:
    spec = read_spec(tiny_checkpoint("qwen3_vl_moe"))
    with pytest.raises(LayoutError, match=r"parallel\.tp=2 with experts needs parallel\.sequence_parallel"):
        run_layout(TrainConfig(parallel=ParallelConfig(tp=2)), spec, 2)
    both = ParallelConfig(tp=2, sequence_parallel=True, ep=4)
    assert run_layout(TrainConfig(parallel=both, global_batch_size=2), spec, 4).ep == 4
    with pytest.raises(LayoutError, match="ep=3 does not divide 8 experts"):
        run_layout(TrainConfig(parallel=ParallelConfig(ep=3), global_batch_size=3), spec, 3)


def test_names_of_both_kinds_of_experts() -> None:
    """Local modules list experts, grouped ones number weights; the norm before experts has its own name."""
    from megatron_vl.models.parameter_names import canonical_name

    layer = "language_model.decoder.layers.1."
    listed = canonical_name(
        layer + "mlp.experts.local_experts.3.linear_fc1.weight", 4, False, has_router=True
    )
    grouped = canonical_name(layer + "mlp.experts.linear_fc1.weight3", 4, False, has_router=True)
    assert listed == grouped == ("language_model.decoder.layers.5.mlp.experts.linear_fc1.weight", 3)
    name = "language_model.decoder.layers.5."
    assert canonical_name(layer + "pre_mlp_layernorm.weight", 4, False, has_router=True) == (
        name + "pre_mlp_layernorm.weight",
        None,
    )
    assert (
        canonical_name(layer + "pre_mlp_layernorm.weight", 4, False)[0]
        == name + "mlp.linear_fc1.layer_norm_weight"
    )
