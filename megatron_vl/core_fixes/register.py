"""Lists everything in this project that replaces or uses internals of Megatron-core,
Transformer Engine or torch.

Each entry says what is touched, why, for which version it was written, when it can go, and which test fails
if it is removed or no longer needed. ``tests/core_fixes/test_register.py`` checks that the entries are true
and that none is missing.

A new version of Megatron-core may silently break any of them, so unknown versions are refused at the start
(:func:`check_core_version`). ``make test-next`` runs the tests with the newest released version.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_vl.errors import UserError

CORE = "megatron-core"
TESTED_CORE = ("0.19.2",)
"""The versions of Megatron-core with which the whole test suite and the GPU runs have passed."""

AT_OWN_RISK = "MEGATRON_VL_UNTESTED_CORE"
"""Environment variable: if it is 1, any version of Megatron-core is accepted."""


class CoreVersionError(UserError):
    """This version of Megatron-core was never tested with this toolkit."""


def check_core_version() -> None:
    """Refuses a version of Megatron-core that the fixes below were not written for.

    Raises:
        CoreVersionError: no version is installed, or another one without ``MEGATRON_VL_UNTESTED_CORE=1``.
    """
    try:
        installed = version(CORE)
    except PackageNotFoundError:
        raise CoreVersionError(f"{CORE} is not installed; pip install {CORE}=={TESTED_CORE[-1]}") from None
    if installed in TESTED_CORE or os.environ.get(AT_OWN_RISK) == "1":
        return
    raise CoreVersionError(
        f"{CORE} {installed} was never tested with this toolkit, which replaces parts of it; "
        f"pip install {CORE}=={TESTED_CORE[-1]}, or set {AT_OWN_RISK}=1 to go on at your own risk"
    )


@dataclass(frozen=True)
class Fix:
    """One place where this project changes a dependency or uses its internals."""

    ours: str
    """The code of the fix, as ``module:name``."""
    touches: tuple[str, ...]
    """Dotted names of what is replaced, subclassed because of its internals,
    or read although it is private."""
    why: str
    written_for: str
    """The package and version that the fix was written for."""
    goes_when: str
    test: str
    """The ``file::test`` that fails if the fix is removed or no longer needed."""


_CORE = f"{CORE} {TESTED_CORE[-1]}"
_TE = "transformer-engine 2.20.2"
_PARITY = "tests/distributed/test_parity.py::test_parity"

FIXES: tuple[Fix, ...] = (
    Fix(
        ours="megatron_vl.core_fixes.compile_on_cpu:install",
        touches=("torch.compile",),
        why=(
            "Core wraps some forty small functions in torch.compile while it is imported: two seconds of"
            " every start on CPU."
        ),
        written_for=_CORE,
        goes_when="core compiles when a function is first called",
        test="tests/test_start.py::test_core_is_imported_without_inductor",
    ),
    Fix(
        ours="megatron_vl.core_fixes.expert_swiglu:use_fused_swiglu",
        touches=("megatron.core.transformer.moe.experts.weighted_bias_swiglu_impl",),
        why=(
            "The backward pass of core's jitted SwiGLU of experts is several times slower than memory allows."
        ),
        written_for=_CORE,
        goes_when="core has a kernel of its own on this path",
        test="tests/core_fixes/test_register.py::test_experts_take_our_swiglu",
    ),
    Fix(
        ours="megatron_vl.core_fixes.gloo_threads:use_one_worker",
        touches=("torch.distributed.distributed_c10d.ProcessGroupGloo.__init__",),
        why=(
            "Two worker threads of a gloo group write one string without a lock, and the rank dies of a"
            " damaged heap."
        ),
        written_for="torch 2.11.0",
        goes_when="torch assigns the name under a lock, or no longer keeps it",
        test="tests/parallel/test_groups.py::test_gloo_groups_have_one_worker",
    ),
    Fix(
        ours="megatron_vl.core_fixes.wgrad_fusion:fuse_weight_gradients",
        touches=(
            "transformer_engine.pytorch.module.base.TransformerEngineBaseModule.fuse_wgrad_accumulation",
        ),
        why=(
            "Core's switch applies to all linears, and its own output layer then needs a CUDA extension"
            " of APEX."
        ),
        written_for=_CORE,
        goes_when="GPTModel takes a Transformer Engine output layer",
        test="tests/core_fixes/test_register.py::test_the_fusion_of_weight_gradients_needs_apex_in_core",
    ),
    Fix(
        ours="megatron_vl.platform.cpu:install",
        touches=(
            "torch.cuda",
            "megatron.core.tensor_parallel.random._get_cuda_rng_state",
            "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        ),
        why=(
            "Core asks torch.cuda for devices, streams and generators, and creates tensors on device 'cuda',"
            " even on CPU."
        ),
        written_for=_CORE,
        goes_when="core runs without a GPU",
        test=_PARITY,
    ),
    Fix(
        ours="megatron_vl.parallel.groups:kept_group",
        touches=("torch.distributed.new_group",),
        why=(
            "Successive layouts in one process share their groups; core makes some thirty for"
            " each layout and keeps them."
        ),
        written_for=_CORE,
        goes_when="core ends the groups of a layout with it",
        test="tests/parallel/test_groups.py::test_layouts_share_groups",
    ),
    Fix(
        ours="megatron_vl.parallel.ddp:ReplicaDDP",
        touches=("megatron.core.distributed.DistributedDataParallel",),
        why=(
            "Gradients are scaled only in the rank's own slice; reductions start in one order on all ranks,"
            " so that a row without pictures may skip the tower; gathers are found by bucket instead of by"
            " parameter."
        ),
        written_for=_CORE,
        goes_when="core reduces in a fixed order and scales its slice",
        test="tests/parallel/test_ddp.py::test_modules_wait_for_their_parameters_as_in_core",
    ),
    Fix(
        ours="megatron_vl.training.weight_copy:copy_weights_together",
        touches=(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._copy_main_params_to_model_params",
        ),
        why="Core copies the weights of each parameter in its own launch: 1,650 per step with experts.",
        written_for=_CORE,
        goes_when="core copies them together",
        test="tests/training/test_optimizer.py::test_weights_copied_together_are_those_that_core_copies_one_by_one",
    ),
    Fix(
        ours="megatron_vl.training.optimizer_state:optimizer_slices",
        touches=("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",),
        why=(
            "Core writes optimizer state without bucket padding but slices it with padding, so moments"
            " silently get wrong offsets; its files are pickled."
        ),
        written_for=_CORE,
        goes_when="core's checkpoints hold every moment and need no pickle",
        test="tests/training/test_run.py::test_moments_in_the_checkpoint_are_of_every_trained_parameter",
    ),
    Fix(
        ours="megatron_vl.parallel.tp_overlap:paused",
        touches=("transformer_engine.pytorch.module.linear.Linear.ub_overlap_ag_fprop",),
        why="Userbuffers always move a whole buffer, whatever the length of the row.",
        written_for=_TE,
        goes_when="Transformer Engine checks the length",
        test="tests/training/test_generate_rows.py::test_collectives_beside_products_pause",
    ),
)
