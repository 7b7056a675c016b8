"""Multi-token prediction in plain torch, on the outputs of the ``transformers`` model.

Written from what the serving engines compute: ``qwen3_5_mtp.py`` of vLLM (01d99805d1ef) and SGLang
(008b79d2358b). At token t, they concatenate the normalised embedding of token t + 1 and the normalised last
hidden state of t, in this order, and run one layer with full attention at the position of t, a norm, and the
model's output layer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.convert import _write_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.spec.families import read_spec
from toolkit.parity.case import draw_samples
from toolkit.parity.reference import gradients_by_name, hf_inputs, load_hf_for_training


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rotate(x: Tensor, position_ids: Tensor, rope: dict[str, Any]) -> Tensor:
    """Rotates the first elements of heads [S, heads, d] at positions [3, S]."""
    rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
    half, section = rotated // 2, rope["mrope_section"]
    angles = []
    for i in range(half):
        axis = next((a for a in (1, 2) if i % 3 == a and i < 3 * section[a]), 0)
        angles.append(position_ids[axis].float() * rope["rope_theta"] ** (-2 * i / rotated))
    angle = torch.stack(angles, -1)[:, None]
    first, second = x[..., :half], x[..., half:rotated]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat((*turned, x[..., rotated:]), -1)


def attention(x: Tensor, w: dict[str, Tensor], position_ids: Tensor, text: dict[str, Any]) -> Tensor:
    d, length = text["head_dim"], len(x)
    query, gate = (x @ w["self_attn.q_proj.weight"].T).unflatten(1, (-1, 2 * d)).chunk(2, -1)
    key, value = ((x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, d)) for name in "kv")
    query, key = norm(query, w["self_attn.q_norm.weight"]), norm(key, w["self_attn.k_norm.weight"])
    query, key = (rotate(each, position_ids, text["rope_parameters"]) for each in (query, key))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * d**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return (mixed * gate.sigmoid()).flatten(1) @ w["self_attn.o_proj.weight"].T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def feed_forward(x: Tensor, w: dict[str, Tensor], text: dict[str, Any]) -> Tensor:
    names = ("gate_proj", "up_proj", "down_proj")
    if "mlp.gate.weight" not in w:
        return swiglu(x, *(w[f"mlp.{name}.weight"] for name in names))
    probabilities = (x @ w["mlp.gate.weight"].T).softmax(-1)
    chosen, experts = probabilities.topk(text["num_experts_per_tok"], -1)
    chosen = torch.zeros_like(probabilities).scatter(1, experts, chosen / chosen.sum(-1, keepdim=True))
    output = swiglu(x, *(w[f"mlp.shared_expert.{name}.weight"] for name in names))
    output = output * (x @ w["mlp.shared_expert_gate.weight"].T).sigmoid()
    for expert in range(text["num_experts"]):
        matrices = (w[f"mlp.experts.{expert}.{name}.weight"] for name in names)
        output = output + chosen[:, expert, None] * swiglu(x, *matrices)
    return output


def predict(
    weights: dict[str, Tensor], embeddings: Tensor, hidden: Tensor, positions: Tensor, text: dict[str, Any]
) -> Tensor:
    """The layer's output for the tokens of one sample but its last: [S, h] each -> [S - 1, h]."""
    w = {name.removeprefix("mtp."): weight for name, weight in weights.items()}
    layer = {name.removeprefix("layers.0."): weight for name, weight in w.items() if "layers.0." in name}
    parts = (
        norm(embeddings[1:], w["pre_fc_norm_embedding.weight"]),
        norm(hidden[:-1], w["pre_fc_norm_hidden.weight"]),
    )
    x = torch.cat(parts, -1) @ w["fc.weight"].T
    x = x + attention(norm(x, layer["input_layernorm.weight"]), layer, positions[:, :-1], text)
    x = x + feed_forward(norm(x, layer["post_attention_layernorm.weight"]), layer, text)
    return norm(x, w["norm.weight"])


class Reference:
    """The ``transformers`` model and the layer's weights, in float32."""

    def __init__(self, hf: str | Path) -> None:
        self.hf, self.spec = Path(hf), read_spec(hf)
        self.model = load_hf_for_training(hf)
        self.text = json.loads((self.hf / "config.json").read_text())["text_config"]
        self.weights = {
            name: tensor.float().requires_grad_()
            for file in sorted(self.hf.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
            if name.startswith("mtp.")
        }

    def outputs(self, sample: TokenizedSample, trains: str) -> dict[str, Tensor]:
        """Of one sample: losses of its tokens (S - 1) and of those two ahead (S - 2), whether the layer ranks
        the latter first, and its hidden states."""
        inputs = hf_inputs([sample], self.spec, read_pixel_norm(self.hf))
        seen: dict[str, Any] = {}
        language_model = self.model.model.language_model
        hook = language_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
        )
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state[0]
        hook.remove()
        ids, output = inputs["input_ids"][0], self.model.lm_head.weight
        losses = F.cross_entropy(hidden[:-1] @ output.T, ids[1:], reduction="none")

        embeddings, positions = seen["inputs_embeds"][0], torch.arange(len(ids)).expand(3, -1)
        if seen["position_ids"] is not None:  # a sample with media
            positions = seen["position_ids"][-3:, 0]
        if trains == "head":
            embeddings, hidden, output = embeddings.detach(), hidden.detach(), output.detach()
        states = predict(self.weights, embeddings, hidden, positions, self.text)
        logits = states[:-1] @ output.T
        mtp_losses = F.cross_entropy(logits, ids[2:], reduction="none")
        return {
            "losses": losses,
            "mtp_losses": mtp_losses,
            "is_first": logits.argmax(-1) == ids[2:],
            "states": states,
        }

    def gradients(self, samples: list[TokenizedSample], factor: float, trains: str) -> list[float]:
        """Runs the backward pass of the whole loss. Returns [loss, loss of the layer, targets, first]."""
        count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
        targets = sum(int(sample.loss_mask[2:].sum()) for sample in samples)
        sums = torch.zeros(3, dtype=torch.float64)
        for sample in samples:
            found = self.outputs(sample, trains)
            loss = (found["losses"] * sample.loss_mask[1:]).sum()
            mtp_loss = (found["mtp_losses"] * sample.loss_mask[2:]).sum()
            (loss / count + factor * mtp_loss / targets).backward()
            first = (found["is_first"] & sample.loss_mask[2:].bool()).sum()
            sums += torch.stack((loss.detach(), mtp_loss.detach(), first)).double()
        return [float(sums[0]) / count, float(sums[1]) / targets, targets, int(sums[2])]


def write_reference(hf: str, kinds: list[list[str]], factor: float, trains: str, out: str) -> list[float]:
    """Writes the gradients of the samples as Megatron weights to ``out``/gradients."""
    torch.set_num_threads(1)
    reference = Reference(hf)
    samples = [sample for row in draw_samples(kinds, reference.spec, 0) for sample in row]
    numbers = reference.gradients(samples, factor, trains)
    found = gradients_by_name(reference.model) | {n: w.grad for n, w in reference.weights.items()}
    if reference.spec.language.tied_embeddings:
        found.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(hf) / "config.json", folder)
        save_file({name: g.contiguous() for name, g in found.items()}, Path(folder) / "model.safetensors")
        gradients = HfCheckpoint(folder, has_mtp=True)
        _write_weights(gradients, [Path(folder)], Path(out) / "gradients", None, "convert", 0, False, {})
    return numbers
