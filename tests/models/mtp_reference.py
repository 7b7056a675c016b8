"""Multi-token prediction in plain torch, on the outputs of the ``transformers`` model, and how a layout is
compared with it.

Written from what the serving engines compute: ``qwen3_5_mtp.py`` of vLLM (01d99805d1ef) and SGLang
(008b79d2358b). At token t, they concatenate the normalised embedding of token t + 1 and the normalised last
hidden state of t, in this order, and run one layer with full attention at the position of t, a norm, and the
model's output layer. Norms, softmax, rotation and losses are computed in float32.
"""

import functools
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
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.lora import trained_table
from megatron_vl.weights.weight_reader import WeightReader
from tests.support.tiny_trainer import run_passes
from toolkit.parity.case import ParityCase, build_case, draw_samples
from toolkit.parity.errors import relative_error
from toolkit.parity.reference import gradients_by_name, hf_inputs, load_hf_for_training
from toolkit.parity.tolerances import BF16_LOSS_TOLERANCE, LOSS_TOLERANCE
from toolkit.parity.worker import compare_one_pass, gradient_errors


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * scale * (1 + weight.float())).type_as(x)


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
    return torch.cat((*turned, x[..., rotated:]), -1).type_as(x)


def attention(x: Tensor, w: dict[str, Tensor], position_ids: Tensor, text: dict[str, Any]) -> Tensor:
    d, length = text["head_dim"], len(x)
    query, gate = (x @ w["self_attn.q_proj.weight"].T).unflatten(1, (-1, 2 * d)).chunk(2, -1)
    key, value = ((x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, d)) for name in "kv")
    query, key = norm(query, w["self_attn.q_norm.weight"]), norm(key, w["self_attn.k_norm.weight"])
    query, key = (rotate(each, position_ids, text["rope_parameters"]) for each in (query, key))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * d**-0.5
    is_later = torch.ones(length, length, device=x.device).triu(1).bool()
    weights = scores.float().masked_fill(is_later, float("-inf")).softmax(-1).type_as(x)
    mixed = torch.einsum("hqk,khd->qhd", weights, value)
    return (mixed * gate.sigmoid()).flatten(1) @ w["self_attn.o_proj.weight"].T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def feed_forward(x: Tensor, w: dict[str, Tensor], text: dict[str, Any]) -> Tensor:
    names = ("gate_proj", "up_proj", "down_proj")
    if "mlp.gate.weight" not in w:
        return swiglu(x, *(w[f"mlp.{name}.weight"] for name in names))
    probabilities = (x @ w["mlp.gate.weight"].T).float().softmax(-1)
    chosen, experts = probabilities.topk(text["num_experts_per_tok"], -1)
    chosen = torch.zeros_like(probabilities).scatter(1, experts, chosen / chosen.sum(-1, keepdim=True))
    chosen = chosen.type_as(x)
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
    """The ``transformers`` model and the layer's weights."""

    def __init__(self, hf: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.hf, self.spec, self.device = Path(hf), read_spec(hf), device
        self.model = load_hf_for_training(hf, dtype, device)
        self.text = json.loads((self.hf / "config.json").read_text())["text_config"]
        self.weights = {
            name: tensor.to(device, dtype).requires_grad_()
            for file in sorted(self.hf.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
            if name.startswith("mtp.")
        }

    def losses(self, sample: TokenizedSample, trains: str) -> tuple[Tensor, Tensor, int]:
        """Of one sample: the losses of its tokens (S - 1) and of those two ahead (S - 2), which are 0 if they
        do not count, and how many of the latter the layer ranks first."""
        inputs = hf_inputs([sample], self.spec, read_pixel_norm(self.hf), self.device)
        seen: dict[str, Any] = {}
        language_model = self.model.model.language_model
        hook = language_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
        )
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state[0]
        hook.remove()
        ids, output = inputs["input_ids"][0], self.model.lm_head.weight
        losses = F.cross_entropy((hidden[:-1] @ output.T).float(), ids[1:], reduction="none")

        embeddings, positions = seen["inputs_embeds"][0], torch.arange(len(ids)).expand(3, -1)
        if seen["position_ids"] is not None:  # a sample with media
            positions = seen["position_ids"][-3:, 0]
        if trains == "head":
            embeddings, hidden, output = embeddings.detach(), hidden.detach(), output.detach()
        states = predict(self.weights, embeddings, hidden, positions.to(self.device), self.text)
        logits = (states[:-1] @ output.T).float()
        mtp_losses = F.cross_entropy(logits, ids[2:], reduction="none")
        is_first = (logits.argmax(-1) == ids[2:]).cpu() & sample.loss_mask[2:].bool()
        masked = losses.cpu() * sample.loss_mask[1:], mtp_losses.cpu() * sample.loss_mask[2:]
        return *masked, int(is_first.sum())

    def run(self, samples: list[TokenizedSample], factor: float, trains: str) -> list[float]:
        """Runs forward and backward passes of the whole loss. Returns the loss, the loss of the layer, the
        number of its targets, and of those that it ranks first."""
        count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
        targets = sum(int(sample.loss_mask[2:].sum()) for sample in samples)
        loss_sum, mtp_loss_sum, num_first = 0.0, 0.0, 0
        for sample in samples:
            losses, mtp_losses, first = self.losses(sample, trains)
            (losses.sum() / count + factor * mtp_losses.sum() / targets).backward()
            loss_sum += float(losses.double().sum())
            mtp_loss_sum += float(mtp_losses.double().sum())
            num_first += first
        return [loss_sum / count, mtp_loss_sum / targets, targets, num_first]

    def write_gradients(self, out: Path) -> None:
        found = gradients_by_name(self.model) | {n: w.grad for n, w in self.weights.items()}
        if self.spec.language.tied_embeddings:
            found.pop("lm_head.weight", None)
        stored = {name: gradient.float().cpu().contiguous() for name, gradient in found.items()}
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self.hf / "config.json", folder)
            save_file(stored, Path(folder) / "model.safetensors")
            gradients = HfCheckpoint(folder, has_mtp=True)
            _write_weights(gradients, [Path(folder)], out, None, "convert", 0, False, {})


@functools.cache
def write_reference(
    hf: str, kinds_json: str, factor: float, trains: str, dtype: str = "float32", device: str = "cpu"
) -> str:
    """Returns a new folder with gradients in float32, and ``reference.json``: the numbers of the step and the
    errors of bf16, as in :func:`toolkit.parity.reference_job.write_reference`."""
    torch.set_num_threads(1)
    out, spec = Path(tempfile.mkdtemp(prefix="mtp_")), read_spec(hf)
    samples = [sample for row in draw_samples(json.loads(kinds_json), spec, 0) for sample in row]
    exact = Reference(hf, device=device)
    numbers = exact.run(samples, factor, trains)
    exact.write_gradients(out / "gradients")
    facts: dict[str, Any] = {"gradient_noise": {}}
    if dtype == "bfloat16":
        rounded = Reference(hf, torch.bfloat16, device)
        numbers = rounded.run(samples, factor, trains)
        rounded.write_gradients(out / "bf16")
        readers = [WeightReader(out / name) for name in ("gradients", "bf16")]
        for name in readers[0].tensor_names():
            expected, found = (reader.read_shard(name) for reader in readers)
            facts["gradient_noise"][name] = relative_error(found, expected)
    facts |= dict(zip(("loss", "mtp_loss", "targets", "first"), numbers, strict=True))
    (out / "reference.json").write_text(json.dumps(facts))
    return str(out)


def run_case(case: ParityCase, platform: Platform) -> dict[str, Any]:
    """Like :func:`toolkit.parity.worker.run_case`, with the layer's numbers as ``mtp``. Collective."""
    [kinds] = case.steps
    trainer = build_case(case, platform)
    make_reference = functools.partial(
        write_reference,
        *(case.hf, json.dumps(kinds), trainer.config.mtp.loss, trainer.config.mtp.trains),
        *(case.dtype, str(platform.device)),
    )
    reference_dir = Path(case.reference or broadcast_from_rank_0(make_reference))
    facts = json.loads((reference_dir / "reference.json").read_text())
    loss, mtp_loss, targets, first = run_passes(trainer, kinds)

    is_bf16, departs = case.dtype == "bfloat16", []
    if not abs(mtp_loss / facts["mtp_loss"] - 1) <= (BF16_LOSS_TOLERANCE if is_bf16 else LOSS_TOLERANCE):
        departs.append("the mean loss of multi-token prediction")
    if targets != facts["targets"] or not is_bf16 and first != facts["first"]:
        departs.append("targets of multi-token prediction, or those ranked first")

    table = trained_table(trainer.spec, trainer.config.lora)
    if case.lora:  # new adapters add nothing, and the reference has none
        table = [name for name in table if name.startswith("mtp.")]
        trainer.live_tensors = [live for live in trainer.live_tensors if live.tensor_name in table]
    result = compare_one_pass(case, table, loss, gradient_errors(trainer, reference_dir), reference_dir)
    result["departs"] = result["departs"] or ", ".join(departs)
    result |= {"ok": result["ok"] and not departs, "mtp": [mtp_loss, targets, first]}
    return {"ok": result["ok"], "steps": [result]}
