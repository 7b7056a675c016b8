"""Tests of experts beyond the parity table: load-balancing loss, counts of the routers, and names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from megatron_vl.config import ModelConfig, ParallelConfig, TrainConfig
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.estimate.split import run_layout
from megatron_vl.models.build import aux_loss
from megatron_vl.models.moe.router import expert_load
from megatron_vl.models.parameter_names import canonical_name
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import LayoutError
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import run_passes, trainer_of
from tests.tiny import tiny_checkpoint
from toolkit.parity.case import draw_samples
from toolkit.parity.reference import hf_inputs, load_hf_for_training, write_canonical
from toolkit.parity.worker import gradient_errors

ROWS = [["mixed"], ["text"], ["video"], ["image"]]
"""One sample per row, of four lengths, so the tails have four lengths too."""
SEQ_LEN = 256
COEFFICIENT = 0.3
"""Large, so that its gradient is a good part of the router's gradient."""
ROUTER = "language_model.decoder.layers.0.mlp.router.weight"
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2 + SP, ETP2": {"tp": 2, "sequence_parallel": True, "etp": 2},
    "EP2, full recompute": {"ep": 2, "recompute": {"language": "full"}},
    "CP2, EP2": {"cp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, Path, list[int]]:
    """(model of one decoder layer, folder with gradients, tokens of each expert) of ``transformers``.

    The loss is the mean over all loss tokens, and each sample's load-balancing loss by its share of tokens.
    The latter comes from a row padded like ours, with an attention mask that leaves out its tail. With one
    layer, it is that of ``transformers``.
    """
    hf = tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32, layers=1, deepstack_layers=(1,))
    spec, norm, model = read_spec(hf), read_pixel_norm(hf), load_hf_for_training(hf)
    moe, load = spec.language.moe, torch.zeros(spec.language.moe.num_experts, dtype=torch.long)
    samples = [sample for [sample] in draw_samples(ROWS, spec, 0)]
    loss_tokens, tokens = sum(int(s.loss_mask[1:].sum()) for s in samples), sum(len(s) for s in samples)
    for sample in samples:
        out = model(**hf_inputs([sample], spec, norm), use_cache=False, output_router_logits=True)
        losses = F.cross_entropy(out.logits[0, :-1].float(), sample.token_ids[1:], reduction="none")
        loss = (losses * sample.loss_mask[1:]).sum() / loss_tokens
        tail = SEQ_LEN - len(sample)
        mask = torch.tensor([[1] * len(sample) + [0] * tail])
        logits = tuple(F.pad(layer, (0, 0, 0, tail), value=3.0) for layer in out.router_logits)
        balance = load_balancing_loss_func(logits, moe.num_experts, moe.top_k, mask)
        (loss + COEFFICIENT * balance * len(sample) / tokens).backward()
        [layer_logits] = out.router_logits
        load += layer_logits.topk(moe.top_k, -1).indices.flatten().bincount(minlength=moe.num_experts)

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    folder = tmp_path_factory.mktemp("reference")
    write_canonical(gradients, hf, folder / "gradients")
    return hf, folder, load.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@in_ranks(2)
def test_balancing_loss_of_one_layer_is_that_of_transformers(reference, layout: str) -> None:
    """Of four rows with tails, two ranks have two each, or half of each; the scale must not depend on that.

    Every real token is counted once, and padding is not, wherever it is: with sequence parallelism, it is a
    rank's whole half of the shortest rows.
    """
    hf, folder, load = reference
    trainer = trainer_of(hf, SEQ_LEN, optimizer=False, aux_loss=COEFFICIENT, **LAYOUTS[layout])
    run_passes(trainer, ROWS)
    errors = gradient_errors(trainer, folder)
    assert len(errors) > 30 and max(errors.values()) <= 1e-4, errors
    counts = expert_load(trainer.model_chunks, 1, len(load), trainer.platform.device)
    assert counts.tolist() == [load]
    if layout == "DP2":  # the loss does something
        trainer = trainer_of(hf, SEQ_LEN, optimizer=False, aux_loss=0.0)
        run_passes(trainer, ROWS)
        assert gradient_errors(trainer, folder)[ROUTER] > 0.1


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
def test_balancing_loss_follows_the_config(asked, fields, coefficient: float, reason: str, section) -> None:
    config = json.loads((tiny_checkpoint("qwen3_vl_moe") / "config.json").read_text())
    config["text_config"]["router_aux_loss_coef"] = 0.02
    config["text_config"].pop("output_router_logits", None)
    (config[section] if section else config).update(asked)
    spec = read_spec(config)
    found, why = aux_loss(spec, ModelConfig(**fields))
    assert found == coefficient and re.match(reason, why)
    # Weights that were converted with another coefficient are those of the same model.
    assert spec.language == read_spec(tiny_checkpoint("qwen3_vl_moe")).language


def test_tensor_parallel_without_sequence_parallel_is_refused() -> None:
    spec = read_spec(tiny_checkpoint("qwen3_vl_moe"))
    with pytest.raises(LayoutError, match=r"parallel\.tp=2 with experts needs parallel\.sequence_parallel"):
        run_layout(TrainConfig(parallel=ParallelConfig(tp=2)), spec, 2)
    both = ParallelConfig(tp=2, sequence_parallel=True, ep=4)
    assert run_layout(TrainConfig(parallel=both, global_batch_size=2), spec, 4).ep == 4
    with pytest.raises(LayoutError, match="ep=3 does not divide 8 experts"):
        run_layout(TrainConfig(parallel=ParallelConfig(ep=3), global_batch_size=3), spec, 3)


def test_experts_of_both_kinds_are_named() -> None:
    """Local modules list experts, grouped ones number weights; the norm before experts has its own name."""
    layers = "language_model.decoder.layers."

    def name_of(tensor: str, has_router: bool = True) -> tuple[str, int | None]:
        return canonical_name(f"{layers}1.{tensor}", 4, False, has_router=has_router)

    for module_name in ("mlp.experts.local_experts.3.linear_fc1.weight", "mlp.experts.linear_fc1.weight3"):
        assert name_of(module_name) == (f"{layers}5.mlp.experts.linear_fc1.weight", 3)
    norm = "pre_mlp_layernorm.weight"
    assert name_of(norm) == (f"{layers}5.{norm}", None)
    assert name_of(norm, has_router=False) == (f"{layers}5.mlp.linear_fc1.layer_norm_weight", None)
