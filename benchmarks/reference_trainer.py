"""Trains a Hugging Face checkpoint in plain ``transformers``, as the trainer would."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import OptimizerConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.spec.families import read_spec
from toolkit.parity.reference import backward_mean_loss, load_hf_for_training


class ReferenceTrainer:
    """A training of a Hugging Face checkpoint.

    AdamW works on float32 weights and gradients, as in the trainer. A model of another ``dtype`` has float32
    copies of its weights, and its own weights are rounded from them after each step. A forward pass has
    ``batch_size`` samples.
    """

    def __init__(
        self,
        hf_dir: str | Path,
        optimizer_config: OptimizerConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        batch_size: int = 1,
        attention: str = "sdpa",
    ) -> None:
        self.spec, self.pixel_norm, self.batch_size = read_spec(hf_dir), read_pixel_norm(hf_dir), batch_size
        self.max_gradient_norm = optimizer_config.clip_grad or math.inf
        self.model = load_hf_for_training(hf_dir, dtype, device)
        self.model.set_attn_implementation(attention)

        self.main_weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            self.main_weights[name] = parameter
            if parameter.dtype != torch.float32:
                self.main_weights[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self.main_weights[name]))

        # As in the trainer, biases and norms do not decay.
        weights, decay = self.main_weights.values(), optimizer_config.weight_decay
        weight_groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": decay},
            {"params": [weight for weight in weights if weight.dim() == 1], "weight_decay": 0.0},
        ]
        self.adam_optimizer = torch.optim.AdamW(
            weight_groups,
            lr=optimizer_config.lr,
            betas=(optimizer_config.beta1, optimizer_config.beta2),
            eps=optimizer_config.eps,
            # One kernel, where float32 copies take much memory.
            fused=self.model.dtype != torch.float32 or None,
        )

    def train_step(self, samples: list[TokenizedSample], learning_rate: float) -> tuple[float, float]:
        """Trains on one global batch. Returns (its mean loss over loss tokens, the gradient norm)."""
        self.adam_optimizer.zero_grad(set_to_none=True)
        loss = backward_mean_loss(self.model, samples, self.spec, self.pixel_norm, batch_size=self.batch_size)
        for weight in self.main_weights.values():
            if weight.grad is None:
                # In a step without images, torch skips the vision tower, while Megatron-core's optimizer
                # continues with its moments.
                weight.grad = torch.zeros_like(weight)

        gradient_norm = torch.nn.utils.clip_grad_norm_(self.main_weights.values(), self.max_gradient_norm)
        for weight_group in self.adam_optimizer.param_groups:
            weight_group["lr"] = learning_rate
        self.adam_optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter is not self.main_weights[name]:
                    parameter.copy_(self.main_weights[name])
        return loss, float(gradient_norm)


def _move_gradient(main_weight: Tensor, parameter: Tensor) -> None:
    """Adds a parameter's gradient to the one of its float32 copy, and frees it."""
    assert parameter.grad is not None
    if main_weight.grad is None:
        main_weight.grad = parameter.grad.float()
    else:
        main_weight.grad += parameter.grad
    parameter.grad = None
