"""Compares our FLOP counts with torch's counter over the Hugging Face model and over our own modules.

Both sides compute whole squares for causal attention, and our modules the padded columns of the vision FFN;
what our counts leave out is added here.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_vl.config import LoraConfig, ModelConfig, MtpConfig, RecomputeConfig, TrainConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.packing.training_row import LOSS_INDEX_MULTIPLE
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.estimate.flops import RowFlops, _counted_products, needed_flops, repeated_flops, row_sizes
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.lora import fused_lora, saved_modules
from megatron_vl.training.step import run_schedule
from tests.support.mixed_lora import mixed_lora
from tests.support.ranks import call
from tests.support.tiny_trainer import tiny_trainer
from toolkit.parity.random_samples import make_sample
from toolkit.parity.reference import hf_inputs

TRAINED, NO_LORA = ModelConfig(), LoraConfig()
HYBRID = ["qwen3_5", "qwen3_5_moe"]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *HYBRID]
TYPICAL = {"qwen3_vl_moe", "qwen3_5"}
"""Families that have the products of all others."""
FREEZE = {
    "nothing": {},
    "tower": {"freeze_vision": True},
    "vision": {"freeze_vision": True, "freeze_merger": True},
    "merger": {"freeze_merger": True},
    "language": {"freeze_language": True},
    "all but merger": {"freeze_vision": True, "freeze_language": True},
}


@cache
def load(hf) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    experts = {"experts_implementation": "eager"} if read_spec(hf).language.moe else {}
    return AutoModelForImageTextToText.from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager", **experts
    )


def lengths(samples: list[TokenizedSample], spec: ModelSpec) -> tuple[list[int], list[int], list[int]]:
    """Document, frame and window lengths of a full row, the latter two empty without media."""
    documents = [len(sample) for sample in samples]
    row = pack_row(samples, spec, sum(documents))
    vision = [t.diff().tolist() for t in (row.vision.cu_seqlens, row.vision.cu_window_seqlens)]
    return documents, *(vision if row.num_images else ([], []))


def step_flops(
    spec: ModelSpec, where: tuple, loss_tokens: int, model: ModelConfig = TRAINED, lora: LoraConfig = NO_LORA
) -> float:
    return needed_flops(spec, TrainConfig(model=model, lora=lora), row_sizes(*where, loss_tokens)).total


def again_flops(spec: ModelSpec, recompute: RecomputeConfig, where: tuple) -> RowFlops:
    return repeated_flops(spec, TRAINED, NO_LORA, recompute, row_sizes(*where, 0))


def forward_flops(spec: ModelSpec, documents: list[int], head_tokens: int) -> float:
    layers = again_flops(spec, RecomputeConfig(language="full"), (documents, [], [])).language
    layers += unread_flops(spec, documents)
    return layers + 2.0 * spec.language.hidden_size * spec.language.vocab_size * head_tokens


def unread_flops(spec: ModelSpec, documents: list[int]) -> float:
    """Forward FLOPs of the experts' second matrices, which our kernels do not compute again."""
    moe = spec.language.moe
    if moe is None:
        return 0.0
    layers = sum(map(spec.language.has_experts, range(spec.language.num_layers)))
    return 2.0 * sum(documents) * layers * moe.top_k * moe.ffn_hidden_size * spec.language.hidden_size


def attention_flops(spec: ModelSpec, documents: list[int], *, linear: bool = False) -> list[float]:
    """Forward FLOPs of softmax attention (or of the delta rule) in each layer."""
    again = RecomputeConfig(language="selective", language_modules=["core_attn"])
    layers = again_flops(spec, again, (documents, [], [])).layers
    return [layer.delta_rule if linear else layer.dense for layer in layers]


def loss_tokens_of(sample: TokenizedSample) -> torch.Tensor:
    return sample.loss_mask[1:].nonzero()[:, 0]


def counted_step(model: torch.nn.Module, sample: TokenizedSample, spec: ModelSpec, norm) -> float:
    """What torch counts in both passes, with logits of the loss tokens."""
    inputs = hf_inputs([sample], spec, norm) | {"logits_to_keep": loss_tokens_of(sample)}
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def rotary(spec: ModelSpec, tokens: int) -> float:
    """transformers before 5.24 computes rotary angles as a matrix product, which we do not count."""
    is_product = Version(transformers.__version__) < Version("5.24")
    return is_product * 2 * 3 * tokens * spec.language.rotary_dim / 2


@pytest.fixture
def elementwise_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta rule and the convolution without products; gradients pass through all that is given."""

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g, beta, **_):
        # transformers 5.24 repeats the key heads in the rule, earlier versions before it.
        products = (q * k).sum(-1, keepdim=True).repeat_interleave(v.shape[2] // q.shape[2], dim=2)
        return v * products * (g + beta)[..., None], None

    for family in HYBRID:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)
        monkeypatch.setattr(module, "causal_conv1d_fn", lambda x, weight, *_, **__: x * weight[:, :1])


def with_families(cases: Iterable[str], usual: str, typical: set[str]) -> list[Any]:
    """Each case with each family. Of those that are not typical, ``make test`` runs the usual case alone."""
    marks = {family: pytest.mark.slow if family in typical else pytest.mark.full for family in FAMILIES}
    pairs = itertools.product(cases, FAMILIES)
    return [pytest.param(case, family, marks=[marks[family]] * (case != usual)) for case, family in pairs]


@pytest.mark.parametrize(("frozen", "family"), with_families(FREEZE, "nothing", {"qwen3_vl_moe"}))
def test_training_step_equals_counted(tiny_checkpoint, elementwise_rule, family: str, frozen: str) -> None:
    hf = tiny_checkpoint(family, dtype=torch.float32)
    spec, norm, freeze = read_spec(hf), read_pixel_norm(hf), ModelConfig(**FREEZE[frozen])
    model, sample = load(hf), make_sample("mixed", spec, 0)
    for name, parameter in model.named_parameters():
        part = "merger" if "merger" in name else "vision" if ".visual." in name else "language"
        parameter.requires_grad_(not getattr(freeze, f"freeze_{part}"))
    counted = counted_step(model, sample, spec, norm)
    model.requires_grad_(True).zero_grad()
    where = lengths([sample], spec)
    ours = step_flops(spec, where, len(loss_tokens_of(sample)), freeze)
    ours += 3 * sum(attention_flops(spec, where[0])) - 3 * sum(attention_flops(spec, where[0], linear=True))
    assert counted - ours == rotary(spec, len(sample))


LORA_TARGETS = {
    "language": ["language"],
    "all": ["language", "vision", "merger"],
    "merger": ["merger"],
    "later layers": [r".*language_model.*\.(1|3)\..*(o_proj|out_proj)"],
    "second block": [r".*visual\.blocks\.1\..*attn\.qkv", "merger"],
}
WHOLE_MODULES = {
    "beside a trained merger": ["visual.merger"],
    "beside trained norms": ["layers.1.post_attention_layernorm", "blocks.1.norm2"],
    "beside trained ends": ["patch_embed", "embed_tokens", "lm_head"],
}
LORA_TARGETS |= dict.fromkeys(WHOLE_MODULES, [r".*language_model.*\.3\..*(o_proj|out_proj)"])


@pytest.mark.parametrize(("targets", "family"), with_families(LORA_TARGETS, "all", TYPICAL))
def test_step_with_lora_equals_counted(tiny_checkpoint, elementwise_rule, family: str, targets: str) -> None:
    """As of PEFT's model with the same adapters, of which two have ranks of their own."""
    import peft

    hf = tiny_checkpoint(family, dtype=torch.float32)
    spec, norm = read_spec(hf), read_pixel_norm(hf)
    ranks = {"o_proj": 3, "linear_fc1": 5} if targets == "all" and "3" in family else {}
    whole = WHOLE_MODULES.get(targets, [])
    settings = {"rank": 4, "alpha": 32.0, "targets": LORA_TARGETS[targets], "modules_to_save": whole}
    lora = mixed_lora(spec, ranks, **settings)
    adapted = [part for adapter in fused_lora(spec, lora).values() for part in adapter.parts if part.rank]
    names = [part.hf_name for part in adapted]
    options = peft.LoraConfig(
        r=4,
        target_modules=names,
        rank_pattern={part.hf_name: part.rank for part in adapted},
        modules_to_save=list(set(saved_modules(spec, lora).values())) or None,
    )
    model, sample = peft.get_peft_model(load.__wrapped__(hf), options), make_sample("mixed", spec, 0)
    counted, where = counted_step(model, sample, spec, norm), lengths([sample], spec)
    ours = step_flops(spec, where, len(loss_tokens_of(sample)), lora=lora)
    # transformers computes the other half of the squares, and no delta rule.
    softmax, delta_rule = (attention_flops(spec, where[0], linear=linear) for linear in (False, True))
    layers = _counted_products(spec, TRAINED, lora).layers
    for layer, squares, rule in zip(layers, softmax, delta_rule, strict=True):
        ours += layer.attention_count * (squares - rule)
    assert counted - ours == rotary(spec, len(sample))


def counted_flops(hf: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    """Torch's count for a forward and backward pass of our modules: with each recompute and mtp."""
    trainer = tiny_trainer(hf)
    samples = [make_sample("mixed", trainer.spec, seed) for seed in (0, 1)]
    length = sum(map(len, samples))

    counts = []
    for recompute, mtp in runs:
        again = trainer.again(recompute=RecomputeConfig(**recompute), mtp=MtpConfig(**mtp))
        rows = again.feed_of([pack_row(samples, trainer.spec, length)], 1).next_batch().rows
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run_schedule(again.model_chunks, rows, seq_len=length)
        counts.append(counter.get_total_flops())
    return counts


@pytest.mark.ranks
def test_recompute_of_our_modules_equals_counted(tiny_checkpoint) -> None:
    """The output layer runs for the loss tokens and those that fill up their number."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    kinds = [
        RecomputeConfig(),
        RecomputeConfig(language="full"),
        RecomputeConfig(vision="full"),
        RecomputeConfig(language="selective", language_modules=["core_attn"]),
        RecomputeConfig(language="selective", language_modules=["core_attn", "mlp"]),
    ]
    counted = call(counted_flops, hf=str(hf), runs=[(dataclasses.asdict(kind), {}) for kind in kinds])
    spec = read_spec(hf)
    samples = [make_sample("mixed", spec, seed) for seed in (0, 1)]
    where, loss_tokens = lengths(samples, spec), sum(len(loss_tokens_of(sample)) for sample in samples)
    v, squares = spec.vision, sum(attention_flops(spec, where[0]))
    assert loss_tokens < LOSS_INDEX_MULTIPLE < sum(where[0])
    head_tokens = LOSS_INDEX_MULTIPLE - loss_tokens
    filled_up = 3 * (forward_flops(spec, where[0], head_tokens) - forward_flops(spec, where[0], 0))
    padded_columns = v.padded_ffn_hidden_size - v.ffn_hidden_size
    padding = 2.0 * v.num_layers * 3 * v.hidden_size * padded_columns * sum(where[1])
    model = step_flops(spec, where, loss_tokens)
    for kind, count in zip(kinds, counted, strict=True):
        again = again_flops(spec, kind, where).total
        left_out = filled_up + (3 + (kind.language != "none")) * squares
        assert count == model + again + left_out + (3 + (kind.vision == "full")) * padding, kind


@pytest.mark.ranks
def test_multi_token_prediction_equals_counted(tiny_checkpoint) -> None:
    hf = tiny_checkpoint("qwen3_5_moe", dtype=torch.float32)
    full, head, whole = {"language": "full"}, MtpConfig(loss=0.1), MtpConfig(loss=0.1, trains="all")
    runs = [({}, {}), (full, {}), ({}, vars(head)), ({}, vars(whole)), (full, vars(whole))]
    none, none_full, *with_layer, whole_full = call(counted_flops, hf=str(hf), runs=runs)

    spec = read_spec(hf)
    samples = [make_sample("mixed", spec, seed) for seed in (0, 1)]
    where, with_mtp = lengths(samples, spec), spec.with_mtp()
    # The last token of a row is listed too.
    sizes = row_sizes(*where, LOSS_INDEX_MULTIPLE + 1)
    squares = max(attention_flops(spec, where[0]))
    without = needed_flops(spec, TrainConfig(), sizes).total
    for mtp, count in zip((head, whole), with_layer, strict=True):
        ours = needed_flops(with_mtp, TrainConfig(mtp=mtp), sizes).total
        assert count - none == ours - without + 3 * squares
    recompute = RecomputeConfig(**full)
    again = again_flops(with_mtp, recompute, where).total - again_flops(spec, recompute, where).total
    expert_layers = sum(map(spec.language.has_experts, range(spec.language.num_layers)))
    unread = unread_flops(spec, where[0]) / expert_layers
    assert whole_full - none_full == count - none + again + unread + squares


@pytest.mark.parametrize("family", HYBRID)
def test_delta_rule_has_the_flops_of_the_recurrence(tiny_checkpoint, family: str) -> None:
    """As matrix products: S^T k, k d^T and S^T q of each value head."""
    spec = read_spec(tiny_checkpoint(family))
    m, a = spec.language, spec.language.linear_attention
    assert a is not None
    state, k, v = (torch.ones(a.value_heads, *shape) for shape in ((24, 12), (24, 1), (12, 1)))
    with FlopCounterMode(display=False) as counter:
        held = state.mT @ k
        state = state + k @ (v - held).mT
        _ = state.mT @ k
    tokens, layers = 7, sum(m.has_linear_attention(layer) for layer in range(m.num_layers))
    assert layers == 3
    counted = layers * tokens * counter.get_total_flops()
    assert sum(attention_flops(spec, [3, 4], linear=True)) == counted
