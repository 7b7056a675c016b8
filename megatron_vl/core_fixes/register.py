"""Lists all code of this project that replaces or uses internals of its dependencies.

Each entry says what is touched, why, for which version it was written, when it can go, and which test fails
if it is removed or no longer needed. The code that it names gives the reason in full.
``tests/core_fixes/test_register.py`` checks that the entries are true and that none is missing.

A new version of Megatron-core may silently break any of these fixes, so unknown versions are refused at the
start (:func:`check_core_version`). ``make test-next`` runs the tests with the newest released version.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_vl.system.errors import UserError

CORE_PACKAGE = "megatron-core"
TESTED_CORE_VERSIONS = ("0.19.2",)
"""The versions of Megatron-core with which the whole test suite and the GPU runs have passed."""

UNTESTED_CORE_VARIABLE = "MEGATRON_VL_UNTESTED_CORE"
"""Environment variable: if it is 1, any version of Megatron-core is accepted."""


class CoreVersionError(UserError):
    """This version of Megatron-core was never tested with this toolkit."""


def check_core_version() -> None:
    """Raises CoreVersionError for a version of Megatron-core for which the fixes below were not written.

    ``MEGATRON_VL_UNTESTED_CORE=1`` lets it through.
    """
    try:
        installed_version = version(CORE_PACKAGE)
    except PackageNotFoundError:
        raise CoreVersionError(
            f"{CORE_PACKAGE} is not installed; pip install {CORE_PACKAGE}=={TESTED_CORE_VERSIONS[-1]}"
        ) from None

    if installed_version in TESTED_CORE_VERSIONS or os.environ.get(UNTESTED_CORE_VARIABLE) == "1":
        return
    raise CoreVersionError(
        f"{CORE_PACKAGE} {installed_version} was never tested with this toolkit, which replaces parts of it; "
        f"pip install {CORE_PACKAGE}=={TESTED_CORE_VERSIONS[-1]}, or set {UNTESTED_CORE_VARIABLE}=1 to"
        " continue at your own risk"
    )


NOT_REPORTED = "not reported"
"""No thread about the fault was found when the entry was written."""

_CORE = f"{CORE_PACKAGE} {TESTED_CORE_VERSIONS[-1]}"
_TE = "transformer-engine 2.20.2"
_TORCH = "torch 2.11.0"
_ENERGON = "megatron-energon 7.4.1"
_TRANSFORMERS = "transformers 5.17.0"
_PARITY = "tests/parity/test_parity.py::test_parity"
_WEIGHT_COPY = (
    "tests/training/test_optimizer.py::test_weights_copied_together_are_those_that_core_copies_one_by_one"
)
_TE_BASE = "transformer_engine.pytorch.module.base"
_BUCKET_GROUP = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_FLOAT16_OPTIMIZER = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
_EXPERTS = "megatron.core.transformer.moe"


@dataclass(frozen=True)
class DependencyFix:
    """One place where this project changes a dependency or uses its internals."""

    fix_location: str
    """The code of the fix, as ``module:name``."""
    touched_names: tuple[str, ...]
    """Dotted names of what is replaced, of what is subclassed because of its internals, and of private names
    that are used."""
    fix_reason: str
    removal_condition: str
    guarding_test: str
    """The ``file::test`` that fails if the fix is removed or no longer needed."""
    written_for: str = _CORE
    """The package and version that the fix was written for."""
    upstream_issue: str = NOT_REPORTED
    """The thread that reports the fault, as ``owner/repository#number``. Without one, ``docs/upstream.md``
    has the text of a report, which names ``fix_location``."""


DEPENDENCY_FIXES: tuple[DependencyFix, ...] = (
    # Whole processes
    DependencyFix(
        fix_location="megatron_vl.core_fixes.compile_on_cpu:install_finders",
        touched_names=("torch.compile",),
        fix_reason="Core calls torch.compile while it is imported: two seconds of every start on CPU.",
        removal_condition="core compiles when a function is first called",
        guarding_test="tests/test_start.py::test_core_is_imported_without_inductor",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.compile_on_cpu:_NoSklearnLoader",
        touched_names=("transformers.utils.is_sklearn_available",),
        fix_reason="transformers imports scikit-learn, which is not used here: two seconds of a process.",
        written_for=_TRANSFORMERS,
        removal_condition="transformers imports it when it is used",
        guarding_test="tests/test_start.py::test_transformers_is_imported_without_scikit_learn",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.default_store:default_store",
        touched_names=("torch.distributed.distributed_c10d._get_default_store",),
        fix_reason="Failures and messages to rank 0 are sent without a collective or another connection.",
        written_for=_TORCH,
        removal_condition="torch has a public function for the default store",
        guarding_test="tests/parallel/test_groups.py::test_ranks_begin_a_layout_together",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.expert_swiglu:use_fused_swiglu",
        touched_names=(f"{_EXPERTS}.experts.weighted_bias_swiglu_impl",),
        fix_reason="The backward pass of core's jitted SwiGLU is far slower than memory bandwidth allows.",
        removal_condition="core has its own kernel on this path",
        guarding_test="tests/core_fixes/test_register.py::test_experts_take_our_swiglu",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.gloo_threads:use_one_gloo_worker",
        touched_names=(
            "torch.distributed.distributed_c10d.ProcessGroupGloo.__init__",
            "torch.distributed.distributed_c10d.ProcessGroupGloo._Options",
            "torch.distributed.distributed_c10d.ProcessGroupGloo._Options._threads",
            "torch.distributed.distributed_c10d.ProcessGroupGloo._Options._devices",
            "torch.distributed.distributed_c10d.ProcessGroupGloo._Options._timeout",
        ),
        fix_reason="Two threads of a gloo group write one string without a lock, and the rank dies.",
        written_for=_TORCH,
        removal_condition="torch assigns the name under a lock, or no longer keeps it",
        guarding_test="tests/parallel/test_groups.py::test_gloo_groups_have_one_worker",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.silenced_messages:silence_messages",
        touched_names=(
            "megatron.core.models.gpt.gpt_model",
            "megatron.core.distributed.distributed_data_parallel",
            "torch.utils.cpp_extension",
        ),
        fix_reason="Every rank would print these lines, and real problems would be overlooked.",
        removal_condition="a run starts without these lines",
        guarding_test="tests/core_fixes/test_register.py::test_what_is_silenced_is_still_said",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.bias_gradients:use_column_sums",
        touched_names=(f"{_TE_BASE}.TransformerEngineBaseModule.grad_output_preprocess",),
        fix_reason="cuBLASLt reads the output's gradient once more for a bias gradient, and slowly.",
        written_for=_TE,
        removal_condition="the weight gradient's product takes no longer with a bias gradient",
        guarding_test="tests/kernels/test_triton_kernels.py::test_kernels_on_a_gpu",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.wgrad_fusion:fuse_weight_gradients",
        touched_names=(f"{_TE_BASE}.TransformerEngineBaseModule.fuse_wgrad_accumulation",),
        fix_reason="Core's switch is for all linears, and its own output layer then needs APEX.",
        removal_condition="GPTModel takes a Transformer Engine output layer",
        guarding_test="tests/core_fixes/test_register.py::test_the_fusion_of_weight_gradients_needs_apex_in_core",
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.wgrad_fusion:fuse_output_layer",
        touched_names=(
            "megatron.core.tensor_parallel.layers.fused_weight_gradient_mlp_cuda",
            "megatron.core.tensor_parallel.layers.get_dummy_wgrad",
        ),
        fix_reason="Without APEX, core's output layer writes a gradient as large as its weight per row.",
        removal_condition="GPTModel takes a Transformer Engine output layer",
        guarding_test="tests/core_fixes/test_register.py::test_the_fusion_of_weight_gradients_needs_apex_in_core",
    ),
    DependencyFix(
        fix_location="megatron_vl.platform.cpu:install_cpu_platform",
        touched_names=(
            "torch.cuda",
            "megatron.core.tensor_parallel.random._get_cuda_rng_state",
            "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        ),
        fix_reason="Even on CPU, core asks torch.cuda for devices, streams and generators.",
        removal_condition="core runs without a GPU",
        guarding_test=_PARITY,
    ),
    DependencyFix(
        fix_location="megatron_vl.platform.cpu:_avoid_transformer_engine",
        touched_names=(
            "megatron.core.optimizer.Adam",
            "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",
            "megatron.core.optimizer.clip_grads.multi_tensor_applier",
            "megatron.core.optimizer.clip_grads.l2_norm_impl",
            "megatron.core.optimizer.clip_grads.multi_tensor_scale_impl",
            "megatron.core.optimizer.clip_grads.multi_tensor_scale_tensor_impl",
            "megatron.core.optimizer.optimizer.multi_tensor_applier",
            "megatron.core.optimizer.optimizer.multi_tensor_scale_impl",
            f"{_EXPERTS}.moe_utils.te_general_gemm",
        ),
        fix_reason="If Transformer Engine is installed, core takes its kernels for CPU tensors too.",
        removal_condition="core chooses these functions by the device of the tensors",
        guarding_test="tests/test_start.py::test_a_run_on_cpu_calls_no_kernel_of_transformer_engine",
    ),
    DependencyFix(
        fix_location="megatron_vl.launch:main",
        touched_names=(
            "torch.distributed.run.run",
            "torch.distributed.elastic",
            "torch.multiprocessing.spawn",
        ),
        fix_reason="torchrun kills ranks 30 s after SIGTERM and prints its own report after ours.",
        written_for=_TORCH,
        upstream_issue="pytorch/pytorch#119856",
        removal_condition="torchrun can wait for ranks that save",
        guarding_test="tests/training/test_signals.py::test_the_launcher_saves_at_ctrl_c_and_ends_when_a_rank_dies",
    ),
    # Process groups, data parallelism and overlap
    DependencyFix(
        fix_location="megatron_vl.parallel.process_groups:cache_core_groups",
        touched_names=("megatron.core.parallel_state.create_group",),
        fix_reason="Core makes some thirty groups for each layout and keeps them; here layouts share them.",
        upstream_issue="NVIDIA/Megatron-LM#6897",
        removal_condition="core ends the groups of a layout when the layout ends",
        guarding_test="tests/parallel/test_groups.py::test_layouts_share_groups",
    ),
    DependencyFix(
        fix_location="megatron_vl.parallel.process_groups:destroy_groups",
        touched_names=(
            "megatron.core.parallel_state",
            "megatron.core.parallel_state.destroy_model_parallel",
        ),
        fix_reason="Core keeps some groups, and a gloo group held at Python's exit can abort the process.",
        upstream_issue="NVIDIA/Megatron-LM#6897",
        removal_condition="core's destroy_model_parallel drops every group that it made",
        guarding_test="tests/parallel/test_groups.py::test_nothing_holds_a_group_after_the_end",
    ),
    DependencyFix(
        fix_location="megatron_vl.parallel.ddp:ReplicaDDP",
        touched_names=(
            "megatron.core.distributed.DistributedDataParallel",
            "megatron.core.distributed.DistributedDataParallel._make_forward_pre_hook",
        ),
        fix_reason="Core looks gathers up by parameter at each call, and not once per module.",
        removal_condition="core looks gathers up once per module",
        guarding_test="tests/parallel/test_ddp.py::test_modules_wait_for_their_parameters_as_in_core",
    ),
    DependencyFix(
        fix_location="megatron_vl.parallel.ddp:_OrderedGradSync",
        touched_names=(f"{_BUCKET_GROUP}.start_grad_sync",),
        fix_reason="Ranks that run different graphs would start reductions in different orders.",
        removal_condition="core starts reductions in a fixed order",
        guarding_test=_PARITY,
    ),
    DependencyFix(
        fix_location="megatron_vl.parallel.ddp:AbsentTower",
        touched_names=(
            f"{_BUCKET_GROUP}.param_gather_dispatched",
            f"{_BUCKET_GROUP}.register_grad_ready",
        ),
        fix_reason="A row without pictures skips the tower, but takes part in the tower's collectives.",
        upstream_issue="NVIDIA/Megatron-LM#1150",
        removal_condition="core lets a rank report parameters that its graph does not reach",
        guarding_test=_PARITY,
    ),
    DependencyFix(
        fix_location="megatron_vl.parallel.tp_overlap:start_overlap",
        touched_names=(
            f"{_TE_BASE}.initialize_ub",
            f"{_TE_BASE}.destroy_ub",
        ),
        fix_reason="Core starts userbuffers only in its own training program.",
        written_for=_TE,
        removal_condition="core starts them with its modules",
        guarding_test="tests/core_fixes/test_register.py::test_core_does_not_start_userbuffers",
    ),
    # Modules
    DependencyFix(
        fix_location="megatron_vl.models.attention:PackedRow",
        touched_names=("megatron.core.packed_seq_params.PackedSeqParams.qkv_format",),
        fix_reason="Core's packed path restarts rotary angles at each sequence, or makes the host wait.",
        removal_condition="core's packed path takes rotary angles by token, without the host",
        guarding_test="tests/core_fixes/test_register.py::test_cores_packed_rotary_waits_for_the_host",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.build:_ModelBuilder",
        touched_names=("megatron.core.models.gpt.gpt_model.GPTModel.rotary_pos_emb",),
        fix_reason="Core has no interleaved M-RoPE, and TF32 settings affect its angles.",
        upstream_issue="NVIDIA/Megatron-LM#4853",
        removal_condition="core's MultimodalRotaryEmbedding interleaves and is exact in fp32",
        guarding_test="tests/models/test_qwen3_vl.py::test_frequencies_take_turns_as_in_transformers",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.deepstack:DeepStackLayer",
        touched_names=("megatron.core.transformer.transformer_layer.TransformerLayer.forward",),
        fix_reason="Levels of visual features travel with the hidden state, of which core knows only one.",
        removal_condition="core's decoder takes features to add after a layer, on any pipeline stage",
        guarding_test=_PARITY,
    ),
    DependencyFix(
        fix_location="megatron_vl.models.fused_layers:TowerSelfAttention",
        touched_names=(
            "megatron.core.transformer.attention.SelfAttention.forward",
            "megatron.core.transformer.attention.SelfAttention.linear_qkv",
            "megatron.core.transformer.attention.SelfAttention.linear_proj",
        ),
        fix_reason="Towers' layers run our kernels from linear_qkv to linear_proj, including RoPE.",
        removal_condition="core's attention lets core_attention take the fused QKV",
        guarding_test="tests/kernels/test_tower_attention.py::test_a_step_with_the_kernels_is_the_step_without",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.fused_layers:FusedMLP",
        touched_names=(
            "megatron.core.transformer.mlp.MLP.forward",
            "megatron.core.transformer.mlp.MLP.linear_fc1",
            "megatron.core.transformer.mlp.MLP.linear_fc2",
        ),
        fix_reason="Bias and activation are one kernel here, which dense layers can recompute.",
        removal_condition="core recomputes the activation of a dense MLP with fused activations",
        guarding_test="tests/kernels/test_triton_kernels.py::test_fused_layers_train_as_plain_ones",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.fused_layers:postpone_addition",
        touched_names=("megatron.core.transformer.transformer_layer.TransformerLayer.forward",),
        fix_reason="Core adds attention's output to the residual in a kernel before that of the norm.",
        removal_condition="core's layer has one place for the sum after attention and the norm of it",
        guarding_test="tests/kernels/test_triton_kernels.py::test_fused_layers_train_as_plain_ones",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.layer_specs:local_norm_class",
        touched_names=("megatron.core.transformer.torch_norm.WrappedTorchNorm",),
        fix_reason="Without Transformer Engine, core's norm refuses sequence parallelism.",
        upstream_issue="NVIDIA/Megatron-LM#1448",
        removal_condition="WrappedTorchNorm supports sequence parallelism",
        guarding_test="tests/core_fixes/test_register.py::test_cores_norm_refuses_sequence_parallelism",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.head:_accept_whole_row",
        touched_names=(
            "megatron.core.tensor_parallel.ColumnParallelLinear.sequence_parallel",
            "megatron.core.tensor_parallel.ColumnParallelLinear.allreduce_dgrad",
        ),
        fix_reason="Logits are computed for loss tokens only, which are not spread evenly over ranks.",
        removal_condition="core's output layer takes a selection of tokens under sequence parallelism",
        guarding_test=_PARITY,
    ),
    # Experts
    DependencyFix(
        fix_location="megatron_vl.models.moe.router:CountingRouter",
        touched_names=(
            f"{_EXPERTS}.router.TopKRouter.routing",
            f"{_EXPERTS}.router.TopKRouter._apply_aux_loss",
        ),
        fix_reason="Padding goes to no expert, and the balancing loss is divided as gradients are.",
        upstream_issue="NVIDIA/Megatron-LM#5542",
        removal_condition="core's load-balancing loss supports loss masks and uneven padding",
        guarding_test="tests/models/moe/test_router.py::test_balancing_loss_of_one_layer_is_that_of_transformers",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.router:moe_layer",
        touched_names=(
            "megatron.core.extensions.transformer_engine.TEColumnParallelGroupedLinear",
            "megatron.core.extensions.transformer_engine.TERowParallelGroupedLinear",
        ),
        fix_reason="Transformer Engine launches one product per expert, and waits for counts on the host.",
        written_for=_TE,
        upstream_issue="NVIDIA/TransformerEngine#2360",
        removal_condition="Transformer Engine's grouped linears take row counts on the device",
        guarding_test="tests/models/moe/test_experts.py::test_grouped_experts_equal_one_expert_after_another",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.experts:GroupedExperts",
        touched_names=(
            f"{_EXPERTS}.experts.TEGroupedMLP.forward",
            f"{_EXPERTS}.experts.TEGroupedMLP.activation_recompute",
        ),
        fix_reason="Row counts stay on the device, and DDP is notified of all weights of a layer at once.",
        removal_condition="core's grouped experts take counts on the device and report gradients together",
        guarding_test="tests/models/moe/test_experts.py::test_grouped_experts_equal_one_expert_after_another",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.dispatch:ExpertsLayer",
        touched_names=(
            f"{_EXPERTS}.moe_layer.MoELayer.token_dispatcher",
            f"{_EXPERTS}.moe_layer.MoELayer.route",
        ),
        fix_reason="Ours depends on the experts' support and on padding; core chooses one by name.",
        removal_condition="core takes the class of a dispatcher in its spec",
        guarding_test=_PARITY,
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.dispatch:OncePerRankDispatcher",
        touched_names=(f"{_EXPERTS}.token_dispatcher.MoETokenDispatcher",),
        fix_reason="Core's alltoall sends a token once for each of its experts; here, once to each rank.",
        removal_condition="core has a dispatcher without DeepEP that sends a token to each rank once",
        guarding_test="tests/models/moe/test_experts.py::test_dispatched_tokens_come_back_as_if_they_had_stayed",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.dispatch:PaddingDispatcher",
        touched_names=(
            f"{_EXPERTS}.token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess",
            f"{_EXPERTS}.token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_update_cuda_sync_point",
        ),
        fix_reason="Core assumes that every token has experts; padding has none.",
        upstream_issue="NVIDIA/Megatron-LM#5542",
        removal_condition="core's alltoall supports a padding mask",
        guarding_test="tests/models/moe/test_experts.py::test_dispatched_tokens_come_back_as_if_they_had_stayed",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.moe.dispatch:DeviceCountsDispatcher",
        touched_names=(
            f"{_EXPERTS}.token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        ),
        fix_reason="Core copies the experts' token counts to the host, where our products do not need them.",
        removal_condition="core can leave them on the device",
        guarding_test="tests/core_fixes/test_register.py::test_core_brings_counts_of_experts_to_the_host",
    ),
    # Optimizer
    DependencyFix(
        fix_location="megatron_vl.training.optimizer:clip_and_update",
        touched_names=(
            "megatron.core.optimizer.optimizer.ChainedOptimizer.prepare_grads",
            "megatron.core.optimizer.optimizer.ChainedOptimizer.step_with_ready_grads",
        ),
        fix_reason="Core's step updates weights even if the gradient norm is NaN.",
        removal_condition="core's step skips a norm that is not finite",
        guarding_test="tests/training/test_optimizer.py::test_non_finite_step_is_skipped_and_the_next_one_taken",
    ),
    DependencyFix(
        fix_location="megatron_vl.training.optimizer:_scale_gradients",
        touched_names=("torch._foreach_mul_",),
        fix_reason="It multiplies many tensors in one launch, and torch has no public name for it.",
        written_for=_TORCH,
        upstream_issue="pytorch/pytorch#145355",
        removal_condition="torch has a public name for it",
        guarding_test=(
            "tests/training/test_optimizer.py::test_gradients_are_divided_and_clipped_in_one_multiplication"
        ),
    ),
    DependencyFix(
        fix_location="megatron_vl.training.weight_copy:copy_weights_together",
        touched_names=(
            f"{_DISTRIBUTED_OPTIMIZER}._copy_main_params_to_model_params",
            f"{_DISTRIBUTED_OPTIMIZER}._get_model_param_range_map",
        ),
        fix_reason="Core copies each parameter's weights in a separate launch: 1,650 per step with experts.",
        removal_condition="core copies them together",
        guarding_test=_WEIGHT_COPY,
    ),
    DependencyFix(
        fix_location="megatron_vl.training.weight_copy:_BatchedWeightCopy",
        touched_names=("torch._foreach_copy_",),
        fix_reason="It makes many copies in one launch, and torch has no public name for it.",
        written_for=_TORCH,
        upstream_issue="pytorch/pytorch#145355",
        removal_condition="torch has a public name for it",
        guarding_test=_WEIGHT_COPY,
    ),
    DependencyFix(
        fix_location="megatron_vl.core_fixes.mixed_dtype_groups:renumber_mixed_groups",
        touched_names=(f"{_DISTRIBUTED_OPTIMIZER}.model_param_group_index_map",),
        fix_reason="In groups of two types, core saves optimizer state under other parameters' names.",
        upstream_issue="NVIDIA/Megatron-LM#2777",
        removal_condition="core numbers the parameters of a group in the order in which it lists them",
        guarding_test="tests/training/test_mixed_types.py::test_state_is_filed_under_its_own_parameter",
    ),
    DependencyFix(
        fix_location="megatron_vl.training.offload.build:move_state_to_chunks",
        touched_names=(
            "torch.optim.Optimizer.step",
            f"{_FLOAT16_OPTIMIZER}.float16_groups",
            f"{_FLOAT16_OPTIMIZER}.fp32_from_float16_groups",
        ),
        fix_reason="Core updates offloaded state on the CPU, which is slow, and does not save its moments.",
        upstream_issue="NVIDIA/Megatron-LM#2811",
        removal_condition="core streams offloaded state through the GPU and saves it",
        guarding_test="tests/training/test_offload.py::test_all_shares_give_the_same_bits",
    ),
    DependencyFix(
        fix_location="megatron_vl.training.offload.build:DeferredMasterWeights",
        touched_names=(
            f"{_DISTRIBUTED_OPTIMIZER}._build_model_and_main_param_groups",
            "torch.Tensor.float",
        ),
        fix_reason="Core makes all master weights on the device before any of them can be moved.",
        removal_condition="core makes master weights where they are kept",
        guarding_test="tests/training/test_offload.py::test_master_weights_that_leave_the_device_are_never_all_on_it",
    ),
    DependencyFix(
        fix_location="megatron_vl.training.offload.build:_skip_in_core_copy",
        touched_names=(f"{_FLOAT16_OPTIMIZER}._get_model_and_main_params_data_float16",),
        fix_reason="Core would copy master weights that are not on the device into the model.",
        upstream_issue="NVIDIA/Megatron-LM#2811",
        removal_condition="core streams offloaded state through the GPU and saves it",
        guarding_test="tests/training/test_offload.py::test_a_state_that_is_not_spread_gives_the_same_bits",
    ),
    DependencyFix(
        fix_location="megatron_vl.training.weight_copy:shard_destinations",
        touched_names=(
            f"{_DISTRIBUTED_OPTIMIZER}._get_model_param_range_map",
            f"{_DISTRIBUTED_OPTIMIZER}.model_param_gbuf_map",
        ),
        fix_reason="Only core's optimizer knows which part of the model's buffers a shard belongs to.",
        removal_condition="core has a public function for this",
        guarding_test=_WEIGHT_COPY,
    ),
    DependencyFix(
        fix_location="megatron_vl.training.state.optimizer_state:optimizer_slices",
        touched_names=(
            f"{_DISTRIBUTED_OPTIMIZER}._get_model_param_range_map",
            f"{_DISTRIBUTED_OPTIMIZER}.model_param_gbuf_map",
            f"{_DISTRIBUTED_OPTIMIZER}.model_param_group_index_map",
        ),
        fix_reason="Core's checkpoints hold moments at wrong offsets without a message, and pickles.",
        upstream_issue="NVIDIA/Megatron-LM#5077",
        removal_condition="core's checkpoints hold every moment and need no pickle",
        guarding_test="tests/training/test_run.py::test_moments_in_the_checkpoint_are_of_every_trained_parameter",
    ),
    # Loader
    DependencyFix(
        fix_location="megatron_vl.data.sample.tokenizer:load_tokenizer",
        touched_names=("transformers.PreTrainedTokenizerFast._tokenizer",),
        fix_reason="Classes of transformers replace rules of tokenizer.json, and have no public setter.",
        written_for=_TRANSFORMERS,
        upstream_issue="huggingface/transformers#44297",
        removal_condition="transformers keeps the rules of the file",
        guarding_test="tests/data/test_tokenizer_file.py::test_token_ids_are_those_of_the_file",
    ),
    DependencyFix(
        fix_location="megatron_vl.launch:_meet_nodes",
        touched_names=("torch.distributed.elastic.rendezvous.utils._matches_machine_hostname",),
        fix_reason="torch waits for its meeting point in native code, silent and deaf to signals.",
        written_for=_TORCH,
        removal_condition="torch's wait says who is missing, and ends at a signal",
        guarding_test="tests/parallel/test_joining.py::test_a_node_that_waits_for_others_says_so_and_ends_at_a_signal",
    ),
    DependencyFix(
        fix_location="megatron_vl.models.fused_layers:recompute_in_backward",
        touched_names=("torch.Tensor._version",),
        fix_reason="A tensor that was written in place must not be taken for the recomputed one.",
        written_for=_TORCH,
        removal_condition="torch has a public count of a tensor's writes",
        guarding_test="tests/models/test_recompute.py::test_other_values_in_its_memory_are_kept",
    ),
    DependencyFix(
        fix_location="megatron_vl.data.planned_rows:_end_processes",
        touched_names=(
            "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown",
            "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._worker_pids_set",
            "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers",
            "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._index_queues",
            "torch.utils.data._utils.signal_handling._remove_worker_pids",
        ),
        fix_reason="Torch does not end loader processes on request, and waits for one after the other.",
        written_for=_TORCH,
        upstream_issue="pytorch/pytorch#64766",
        removal_condition="torch's iterator has a close()",
        guarding_test="tests/data/test_row_loader.py::test_loader_closes_at_once_while_its_planner_works",
    ),
    DependencyFix(
        fix_location="megatron_vl.data.source.tolerant_reader:ShardReader",
        touched_names=(
            "megatron.energon.flavors.webdataset.itar_reader.ShardInfosITarReader",
            "megatron.energon.flavors.webdataset.itar_reader.ShardInfosITarReader._open_itarfile",
        ),
        fix_reason="Energon's open tar files keep a description of each member that was read.",
        written_for=_ENERGON,
        removal_condition="Energon's reader does not grow with the samples that it reads",
        guarding_test="tests/data/test_damage.py::test_reader_keeps_memory_flat",
    ),
    DependencyFix(
        fix_location="megatron_vl.data.source.store_reading:StoreReader",
        touched_names=(
            "megatron.energon.flavors.webdataset.itar_reader.ShardInfosITarReader",
            "megatron.energon.flavors.webdataset.itar_reader.ShardInfosITarReader._get_item_by_sample_pointer",
        ),
        fix_reason="Energon reads each sample with requests of its own; here blocks are read ahead.",
        written_for=_ENERGON,
        removal_condition="Energon's reader takes the bytes of a sample from its caller",
        guarding_test="tests/data/test_object_store.py::test_block_is_read_with_one_request",
    ),
    # Commands
    DependencyFix(
        fix_location="toolkit.bench.step_parts:PartTimer",
        touched_names=("torch.autograd.Variable._execution_engine",),
        fix_reason="Only autograd's engine knows when a backward pass ends.",
        written_for=_TORCH,
        upstream_issue="pytorch/pytorch#66199",
        removal_condition="torch has a public call for the end of a backward pass",
        guarding_test="tests/toolkit/test_bench.py::test_parts_add_up_to_the_step",
    ),
    DependencyFix(
        fix_location="toolkit.evaluate.vlmevalkit_adapter:run_vlmevalkit",
        touched_names=("torch.distributed.init_process_group",),
        fix_reason="VLMEvalKit asks for NCCL, but its processes only wait for each other; gloo needs no GPU.",
        written_for="ms-vlmeval 0.0.20",
        removal_condition="VLMEvalKit takes the backend from its caller",
        guarding_test=("tests/toolkit/test_evaluate.py::test_script_scores_original_round_trip_and_training"),
    ),
    DependencyFix(
        fix_location="data_tools.shards:index_shard",
        touched_names=("megatron.energon.flavors.webdataset.prepare.WebdatasetPreparator._preprocess_tar",),
        fix_reason="Energon prepares a whole folder at once; here each shard when it is written.",
        written_for=_ENERGON,
        removal_condition="Energon can prepare one shard",
        guarding_test=(
            "tests/data/test_description.py::test_shard_limit_is_the_same_for_loader_and_converter"
        ),
    ),
)

PUBLIC_BASE_CLASSES = {
    "megatron_vl.models.vision_language:VisionLanguageModel": (
        "MegatronModule is the base class that core requires of every model"
    ),
    "megatron_vl.models.vision_language:TowerEverywhere": (
        "MegatronModule is the base class that core requires of every model"
    ),
}
"""Subclasses of classes that are documented as base classes. They need no entry; the text says why."""
