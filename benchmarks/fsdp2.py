"""Times the Hugging Face model under FSDP2, or LoRA by PEFT, on the random rows of ``megatron-vl bench``.

    torchrun --nproc-per-node 8 -m benchmarks.fsdp2 --model.hf HF_DIR --data.seq_len 8192 \\
        --global_batch_size 32 --ours bench.json --out fsdp2.json

It takes the options of ``bench`` that concern random rows. ``--gradient-sync last`` reduces gradients only
after the last row of a step, which needs more memory than ``every`` row, the default. ``--ours`` names the
figures that ``megatron-vl bench --out`` wrote with the same options, to print how they compare.
``--platform cpu`` tries it with small models.

The recipe is ``transformers`` from the same config with random weights, ``fully_shard`` on each decoder layer
and vision block, bf16 mixed precision over fp32 shards, full activation checkpointing, fused AdamW and packed
variable-length attention. If ``liger-kernel`` is installed, its ``apply_liger_kernel_to_FAMILY`` installs its
kernels. FlashAttention is torch's (``torch.nn.attention.varlen``) instead of the package's, and is registered
in transformers' registry of attention functions. On CPU, for dry runs, attention is SDPA for each segment.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_vl.config import ModelConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.sample.pixel_settings import PixelNorm
from megatron_vl.data.synthetic import draw_rows
from megatron_vl.estimate.flops import needed_flops, row_sizes
from megatron_vl.models.attention import make_backend
from megatron_vl.models.batch import Segments
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import fused_lora
from megatron_vl.system.errors import UsageError, UserError
from megatron_vl.training.report.metrics import StepMetrics
from toolkit.bench import measure as bench
from toolkit.bench.options import WARM_UP, BenchRun, parse_bench_options
from toolkit.parity.reference import hf_pixels

ATTENTION = "packed_flash"
"""The name under which the attention function is registered. Vision towers pass ``cu_seqlens`` only to a
function with ``flash`` in its name. No mask is made for a function without a mask function."""
IGNORED = -100


@dataclass
class HfRow:
    """A packed row in the form that the Hugging Face model takes, on the host."""

    inputs: dict[str, Tensor]
    """input_ids [1, S], position_ids [3, 1, S], shift_labels [1, S], pixel_values [P, patch_dim],
    image_grid_thw [images, 3]."""
    cu_seqlens: Tensor
    max_seqlen: int
    loss_tokens: int
    lengths: tuple[list[int], list[int], list[int]]
    """Lengths of documents, frames and windows."""
    images: int

    def keywords(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the model, on ``device``.

        The model passes ``row_segments`` on to the attention function of the decoder layers.
        """
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        segments = Segments(self.cu_seqlens.to(device, non_blocking=True), self.max_seqlen)
        return inputs | {"labels": inputs["shift_labels"], "row_segments": segments, "use_cache": False}


def hf_row(samples: list[TokenizedSample], spec: ModelSpec, seq_len: int) -> HfRow:
    """Packs samples as our loader does. Pixels are float patches, as from the Hugging Face processor."""
    row = pack_row(samples, spec, seq_len)
    labels = torch.where(row.loss_mask > 0, row.labels, IGNORED)
    inputs = {
        "input_ids": row.tokens[None],
        "position_ids": row.position_ids[:, None],
        "shift_labels": labels[None],
    }
    media = [item for sample in samples for item in sample.media_items]
    if media:
        norm = PixelNorm(mean=(0.5,) * 3, std=(0.5,) * 3)
        inputs["pixel_values"] = torch.cat([hf_pixels(item, spec, norm) for item in media])
        inputs["image_grid_thw"] = torch.tensor(
            [[item.grid_thw.t, item.grid_thw.h, item.grid_thw.w] for item in media]
        )

    vision = (
        [t.diff().tolist() for t in (row.vision.cu_seqlens, row.vision.cu_window_seqlens)]
        if media
        else [[], []]
    )
    if torch.cuda.is_available():
        inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
    return HfRow(
        inputs=inputs,
        cu_seqlens=row.cu_seqlens,
        max_seqlen=row.max_seqlen,
        loss_tokens=int((labels != IGNORED).sum()),
        lengths=([len(sample) for sample in samples], vision[0], vision[1]),
        images=len(media),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    row_segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, h, S, d], key and value [1, g, S, d] -> [1, S, h, d].

    Vision towers pass the segments as ``cu_seq_lens_q``; the decoder layers pass on those of the row.
    """
    segments = row_segments if cu_seq_lens_q is None else Segments(cu_seq_lens_q, int(max_length_q or 0))
    assert segments is not None
    attend = make_backend("torch_varlen" if query.is_cuda else "sdpa")
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    return attend(query, key, value, segments, cu_seq_lens_q is None)[None], None


def hf_config(options: BenchRun) -> Any:
    """The Hugging Face config, with the numbers of layers that the options give."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**options.spec.hf_config)


def use_liger(family: str) -> list[str]:
    """Installs Liger's kernels in transformers' module of the family, as Liger documents it.

    Liger assigns to names of the module. Assignments to names that this version of transformers does not have
    change nothing (with Liger 0.8.5 and transformers 5.17: the rotary embedding of Qwen2-VL and Qwen2.5-VL).

    Returns:
        Notes on what was replaced.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        return ["liger-kernel is not installed: using plain transformers modules"]
    from importlib.metadata import PackageNotFoundError, version

    name = f"apply_liger_kernel_to_{family}"
    apply = getattr(importlib.import_module("liger_kernel.transformers"), name, None)
    try:
        number = version("liger-kernel")
    except PackageNotFoundError:  # a bare folder on the path
        number = "of unknown version"

    if apply is None:
        return [f"liger-kernel {number} has no {name}: using plain transformers modules"]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    before = dict(vars(modeling))
    apply()
    after = vars(modeling)
    replaced = sorted(key for key, value in before.items() if after[key] is not value)
    unused = sorted(after.keys() - before.keys())

    return [
        f"liger-kernel {number}: {name}() replaced {', '.join(replaced)} and the loss; without effect: "
        f"{', '.join(unused)}"
    ]


def linear_attention_notes(spec: ModelSpec) -> list[str]:
    """Notes on the software that computes linear attention, for families that have it."""
    if spec.language.linear_attention is None:
        return []
    if problem := _why_not("fla.ops.gated_delta_rule"):
        return [
            f"flash-linear-attention {problem}: linear attention runs in transformers' plain torch,"
            " which does not keep the samples of a row apart; compare its speed, not its loss"
        ]
    convolution = "plain torch" if _why_not("causal_conv1d") else "causal_conv1d"
    return [f"linear attention: flash-linear-attention; its convolution: {convolution}"]


def _why_not(module: str) -> str:
    """Why transformers does not use a package; empty if it does. It takes any error for a missing package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return "is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"does not load ({type(error).__name__}: {error})"
    return ""


def keep_samples_apart(model: nn.Module) -> None:
    """Gives each layer of linear attention the bounds of the samples, in the form that its kernels need.

    They cannot be arguments of the model, because it would also pass them to its vision tower.
    """

    def bounds(module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keywords = dict(keywords)
        cu_seqlens = keywords.pop("row_segments").cu_seqlens
        tokens = torch.arange(keywords["hidden_states"].shape[1], device=cu_seqlens.device)
        numbers = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)
        return args, keywords | {"cu_seq_lens_q": cu_seqlens, "seq_idx": numbers[None]}

    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            module.register_forward_pre_hook(bounds, with_kwargs=True)


def build(config: Any, device: torch.device, *, seed: int = 1234, dtype: torch.dtype = torch.float32) -> Any:
    """Builds the model with random weights. In fp32, every rank holds only its shards. Collective."""
    from transformers import AttentionInterface, AutoModelForImageTextToText

    AttentionInterface.register(ATTENTION, packed_attention)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    # The name is set in the config, because the check at construction would look for a downloadable kernel of
    # this name.
    model.config._attn_implementation = ATTENTION
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    keep_samples_apart(model)
    if dtype == torch.float32:
        shard(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.to_empty(device=device)
    torch.manual_seed(seed + dist.get_rank())
    initialise(model, config)
    return model


def build_with_adapters(options: BenchRun, spec: ModelSpec, device: torch.device) -> Any:
    """Builds the model in bf16 with the adapters of ``lora`` by PEFT, on one GPU.

    PEFT's adapters are bf16 here. Its default, fp32 with a cast of every input, is slower.
    """
    import peft

    lora = options.config.lora
    if dist.get_world_size() > 1:
        raise UsageError("lora is timed on one GPU here: start one process")
    target_names = []
    for adapter in fused_lora(spec, lora).values():
        if adapter.kind == "experts":
            raise UsageError("lora.targets: leave out experts, for which PEFT has no fast products")
        target_names += [part.hf_name for part in adapter.parts if part.rank]

    model = build(hf_config(options), device, dtype=torch.bfloat16)
    peft_config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, target_modules=target_names
    )
    return peft.get_peft_model(model, peft_config, autocast_adapter_dtype=False)


def shard(model: Any, dtype: torch.dtype) -> None:
    """Applies FSDP2 to each vision block, each decoder layer, and the remaining modules."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),)
    )
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def initialise(model: Any, config: Any) -> None:
    """Sets matrices to random values, norms to one and biases to zero.

    Buffers (rotary frequencies) get the values that the modules' constructors give them.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if name.endswith(".bias"):
            local.zero_()
        elif parameter.dim() == 1:
            local.fill_(1.0)
        else:
            local.normal_(0.0, getattr(config.text_config, "initializer_range", 0.02))

    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            made = type(module)(module.config)
            for name, buffer in buffers.items():
                buffer.copy_(getattr(made, name))


class Trainer:
    """Runs training steps.

    Args:
        sync_every_row: whether gradients are reduced after each row, or after the last one of a step.
    """

    def __init__(self, options: BenchRun, model: Any, device: torch.device, sync_every_row: bool) -> None:
        o = options.config.optimizer
        self.options, self.sync_every_row = options, sync_every_row
        self.model = model
        self.device = device
        self.clip = o.clip_grad or math.inf
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )

    def step(self, rows: list[HfRow]) -> float:
        """Does one optimizer step. Collective.

        Returns:
            The mean loss over the loss tokens of the global batch.
        """
        loss = self.backward(rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def backward(self, rows: list[HfRow]) -> Tensor:
        """Computes the gradients of the mean loss over the global batch's loss tokens. Collective.

        Returns:
            That loss.
        """
        tokens = torch.tensor(float(sum(row.loss_tokens for row in rows)), device=self.device)
        dist.all_reduce(tokens)
        # FSDP averages gradients over ranks. A sum divided by the global count and multiplied by the number
        # of ranks gives each token the same weight.
        count = tokens / dist.get_world_size()
        total = torch.zeros((), device=self.device)
        for i, row in enumerate(rows):
            if isinstance(self.model, FSDPModule):
                last = i == len(rows) - 1
                self.model.set_requires_gradient_sync(last or self.sync_every_row)
            loss = self.model(**row.keywords(self.device), num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def read_options(argv: list[str]) -> tuple[BenchRun, argparse.Namespace]:
    """The options of ``bench``, and those of this script alone.

    Raises:
        UsageError: an option does not apply here.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--gradient-sync", choices=("every", "last"), default="every")
    own.add_argument("--ours", type=Path)
    given, words = own.parse_known_args(argv)
    options = parse_bench_options(words)
    if "data" in options.workloads or options.options.even_routing:
        raise UsageError("only random rows are timed here: leave out --data.path and --even-routing")
    return options, given


def run(options: BenchRun, given: argparse.Namespace) -> None:
    """Measures the random workloads and reports them on rank 0. Collective."""
    config, spec, device = options.config, options.spec, _init_distributed()
    world = dist.get_world_size()
    if config.global_batch_size % world:
        raise UsageError(f"global_batch_size {config.global_batch_size} is no multiple of the {world} ranks")
    notes = use_liger(spec.family) + linear_attention_notes(spec)
    has_lora = bool(config.lora.rank)
    model = build_with_adapters(options, spec, device) if has_lora else build(hf_config(options), device)
    trainer = Trainer(options, model, device, given.gradient_sync == "every")
    import transformers

    settings = f"fully_shard over {world} ranks, gradients reduced {given.gradient_sync} row"
    shape = f"{config.global_batch_size} rows of {config.data.seq_len} tokens per step"
    notes = [f"{settings}, {shape}, full activation checkpointing", *notes]
    system = f"transformers {transformers.__version__} + {'PEFT' if has_lora else 'FSDP2'}"
    figures = bench.describe_run(options, device.type, system, notes)
    workloads = {name: measure(trainer, name, figures["machine"]) for name in options.workloads}
    if dist.get_rank() == 0:
        bench.report_figures(options, figures | {"workloads": workloads})
    if given.ours and dist.get_rank() == 0:
        ours = json.loads(given.ours.read_text())["workloads"]
        for name, mine in workloads.items():
            if name in ours:
                ratio = ours[name]["tokens_per_s_per_rank"] / mine["tokens_per_s_per_rank"]
                print(f"{name}: {ratio:.2f} x the tokens/s of {system}")


def _init_distributed() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


def measure(trainer: Trainer, workload: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Measures one workload. The figures have the trainer's keys, as far as these apply. Collective."""
    run, timed = trainer.options, trainer.options.options.timed
    cuda = trainer.device.type == "cuda"
    rank, per_step = dist.get_rank(), run.config.global_batch_size // dist.get_world_size()
    config = dataclasses.replace(run.config, model=ModelConfig())  # nothing is frozen here
    rows = [
        hf_row(samples, run.spec, config.data.seq_len)
        for samples in draw_rows(run.workloads[workload], run.spec)
    ]

    def step_rows(step: int) -> list[HfRow]:
        first = step * config.global_batch_size + rank * per_step
        return [rows[number % len(rows)] for number in range(first, first + per_step)]

    for step in range(WARM_UP):
        loss = trainer.step(step_rows(step))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    metrics, loss_tokens = StepMetrics(), 0
    dist.barrier()
    clock = [time.perf_counter()]
    for step in range(WARM_UP, WARM_UP + timed):
        loss = trainer.step(step_rows(step))  # reads the loss from the device
        clock.append(time.perf_counter())
        for row in step_rows(step):
            sizes = row_sizes(*row.lengths, row.loss_tokens)
            flops = needed_flops(run.spec, config, sizes)
            metrics.language_flops += flops.language
            metrics.vision_flops += flops.tower
            metrics.num_real_tokens += sum(row.lengths[0])
            metrics.samples += len(row.lengths[0])
            metrics.patches += sum(row.lengths[1])
            metrics.images += row.images
            loss_tokens += row.loss_tokens

    metrics.memory_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    totals = metrics.reduce_over_ranks(trainer.device)
    all_loss_tokens = torch.tensor(loss_tokens, device=trainer.device)
    dist.all_reduce(all_loss_tokens)
    seconds = [end - begin for begin, end in itertools.pairwise(clock)]
    run = run._replace(config=config)
    return bench.speed_figures(run, totals, int(all_loss_tokens), seconds, machine) | {"loss": loss}


def main() -> int:
    """Returns exit code 0, or 2 for invalid options."""
    # Without it, packed rows of changing sizes fragment the GPU's memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        run(*read_options(sys.argv[1:]))
    except UserError as error:
        print(f"benchmarks.fsdp2: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
