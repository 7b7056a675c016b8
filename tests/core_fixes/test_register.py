"""What reaches into Megatron-core and its kin is in one register, whose entries are true and still needed."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_vl.config import TrainConfig
from megatron_vl.core_fixes.register import (
    DEPENDENCY_FIXES,
    NOT_REPORTED,
    PUBLIC_BASE_CLASSES,
    TESTED_CORE_VERSIONS,
    UNTESTED_CORE_VARIABLE,
    CoreVersionError,
    DependencyFix,
    check_core_version,
)
from megatron_vl.core_fixes.silenced_messages import IGNORED_WARNINGS, QUIET_LOGGERS
from megatron_vl.core_fixes.wgrad_fusion import fuse_weight_gradients
from megatron_vl.training.resolve import resolve_run
from tests.core_fixes import scan
from tests.core_fixes.programs import (
    core_here,
    counts_brought_to_the_host,
    linear_with_fused_weight_gradients,
    nodes_of_experts,
)
from tests.support.ranks import call

by_place = pytest.mark.parametrize("fix", DEPENDENCY_FIXES, ids=lambda fix: fix.fix_location)


# --- Entries are true


@by_place
def test_what_an_entry_names_is_there(fix: DependencyFix) -> None:
    module, _, name = fix.fix_location.partition(":")
    assert hasattr(importlib.import_module(module), name)
    for target in fix.touched_names:
        assert not installed(target) or exists(target), target


def installed(target: str) -> bool:
    """Whether the package of a dotted name is; core's own modules for Transformer Engine and APEX are empty
    without them."""
    if target.endswith("fused_weight_gradient_mlp_cuda"):
        return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    te_modules = ("transformer_engine.", "megatron.core.extensions.transformer_engine.")
    needs_te = target.startswith(te_modules) or target.endswith(".get_dummy_wgrad")
    return not needs_te or importlib.util.find_spec("transformer_engine") is not None


def exists(target: str) -> bool:
    """Whether a dotted name is a module, or something in one; attributes that objects get count as well."""
    parts = target.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        return all_there(found, parts[split:])
    return False


def all_there(found: Any, names: list[str]) -> bool:
    for name in names:
        if not hasattr(found, name):
            return inspect.isclass(found) and any(sets(kind, name) for kind in found.__mro__)
        found = getattr(found, name)
    return True


def sets(kind: type, name: str) -> bool:
    """Whether objects of a class get an attribute of this name."""
    if name in vars(kind).get("__annotations__", ()):
        return True
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return re.search(rf"\bself\.{name}\b[^=\n]*=", source) is not None


def test_a_name_that_is_gone_is_noticed() -> None:
    assert exists("megatron.core.transformer.moe.router.TopKRouter.routing")
    assert exists("megatron.core.tensor_parallel.ColumnParallelLinear.allreduce_dgrad")
    assert not exists("megatron.core.transformer.moe.router.TopKRouter.gone")
    assert not exists("megatron.core.gone.TopKRouter")


@by_place
def test_the_test_of_an_entry_is_there(fix: DependencyFix) -> None:
    path, _, name = fix.guarding_test.partition("::")
    tree = ast.parse((scan.ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@by_place
def test_an_entry_says_all(fix: DependencyFix) -> None:
    assert fix.touched_names and fix.fix_reason.strip() and fix.removal_condition.strip()
    assert re.fullmatch(
        r"(megatron-core|megatron-energon|ms-vlmeval|torch|transformer-engine|transformers) \d+(\.\d+)+",
        fix.written_for,
    )


def test_an_entry_names_its_thread_or_has_a_report_to_file() -> None:
    reports = (scan.ROOT / "docs/upstream.md").read_text()
    named = set(re.findall(r"`([\w.]+:\w+)`", reports))
    assert named == {fix.fix_location for fix in DEPENDENCY_FIXES if fix.upstream_issue == NOT_REPORTED}
    for fix in DEPENDENCY_FIXES:
        assert fix.upstream_issue == NOT_REPORTED or re.fullmatch(r"[\w-]+/[\w-]+#\d+", fix.upstream_issue), (
            fix.fix_location
        )


def test_entries_are_unique() -> None:
    assert len({fix.fix_location for fix in DEPENDENCY_FIXES}) == len(DEPENDENCY_FIXES)
    assert not {fix.fix_location for fix in DEPENDENCY_FIXES} & set(PUBLIC_BASE_CLASSES)


@pytest.mark.ranks
def test_ranks_run_the_core_that_is_tested() -> None:
    """Also where `make test-next` has put another one in front of the installed one."""
    assert call(core_here) == core_here()


# --- None is missing


def entries_of(module: str) -> list[DependencyFix]:
    return [fix for fix in DEPENDENCY_FIXES if fix.fix_location.startswith(f"{module}:")]


def is_touched(reach: scan.Reach) -> bool:
    """Whether an entry of the same module names the target. Classes may be named where they are defined
    instead of where they are imported from; of an object that is not known, the attribute counts."""
    names = 2 if "." in reach.target else 1
    end = reach.target.split(".")[-names:]
    touched = [target for fix in entries_of(reach.module) for target in fix.touched_names]
    return reach.target in touched or any(target.split(".")[-names:] == end for target in touched)


def test_every_subclass_has_an_entry() -> None:
    found = {f"{reach.module}:{reach.scope}": str(reach) for reach in scan.subclasses()}
    assert len(found) >= 15
    known = {fix.fix_location for fix in DEPENDENCY_FIXES} | set(PUBLIC_BASE_CLASSES)
    assert {text for place, text in found.items() if place not in known} == set()
    assert set(PUBLIC_BASE_CLASSES) <= set(found)


def test_every_replaced_attribute_has_an_entry() -> None:
    found = scan.assignments()
    assert {"torch.compile", "megatron.core.parallel_state.create_group"} <= {r.target for r in found}
    assert [str(reach) for reach in found if not is_touched(reach)] == []


def test_every_private_name_has_an_entry() -> None:
    found = scan.private_names()
    assert len(found) > 8
    assert [str(reach) for reach in found if not is_touched(reach)] == []


def test_every_filter_has_an_entry() -> None:
    """Of warnings and of loggers; ``toolkit`` and ``tests`` may silence what they start."""
    found = [reach for reach in scan.silenced() if reach.module.startswith("megatron_vl")]
    assert found
    assert [str(reach) for reach in found if not entries_of(reach.module)] == []


def test_the_scan_sees_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron_vl").mkdir()
    (tmp_path / "megatron_vl" / "new.py").write_text(
        "from megatron.core.transformer.mlp import MLP\n"
        "from megatron.core import parallel_state as mpu\n"
        "class Other(MLP):\n"
        "    def run(self, part):\n"
        "        mpu.create_group = None\n"
        "        setattr(mpu, 'create_group', None)\n"
        "        return part._hidden\n"
    )

    (tmp_path / "megatron_vl" / "heir.py").write_text(
        "from megatron_vl.base import Base\n"
        "class Heir(Base):\n"
        "    def run(self, part):\n"
        "        return self._ours, self._foreign, part._ours\n"
    )
    (tmp_path / "megatron_vl" / "base.py").write_text("class Base:\n    _ours = 1\n")

    monkeypatch.setattr(scan, "ROOT", tmp_path)
    assert [str(reach) for reach in scan.subclasses()] == [
        "megatron_vl.new:3 (Other): megatron.core.transformer.mlp.MLP"
    ]
    assert [reach.target for reach in scan.assignments()] == [
        "megatron.core.parallel_state.create_group",
        "megatron.core.parallel_state",
    ]
    assert [reach.target for reach in scan.private_names()] == ["_foreign", "_ours", "_hidden"]


# --- Versions


@pytest.fixture
def core_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``core_is(version)``: what the installed Megatron-core says it is."""

    def set_version(number: str) -> None:
        # Where it is used: the register has imported the function.
        monkeypatch.setattr("megatron_vl.core_fixes.register.version", lambda package: number)

    monkeypatch.delenv(UNTESTED_CORE_VARIABLE, raising=False)
    return set_version


def test_the_installed_core_is_one_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTESTED_CORE_VARIABLE, raising=False)
    if importlib.metadata.version("megatron-core") in TESTED_CORE_VERSIONS:
        check_core_version()
    else:
        with pytest.raises(CoreVersionError):
            check_core_version()


def test_an_unknown_core_is_refused_by_name(core_is, monkeypatch: pytest.MonkeyPatch) -> None:
    core_is("99.1.0")
    with pytest.raises(CoreVersionError, match=r"megatron-core 99\.1\.0 .*MEGATRON_VL_UNTESTED_CORE=1"):
        check_core_version()
    monkeypatch.setenv(UNTESTED_CORE_VARIABLE, "1")
    check_core_version()
    monkeypatch.setenv(UNTESTED_CORE_VARIABLE, "0")
    with pytest.raises(CoreVersionError):
        check_core_version()


def test_a_core_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("megatron_vl.core_fixes.register.version", missing)
    with pytest.raises(CoreVersionError, match="megatron-core is not installed; pip install"):
        check_core_version()


def test_a_run_and_a_platform_ask_for_the_version_first(core_is, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_vl import platform

    core_is("99.1.0")
    with pytest.raises(CoreVersionError):
        resolve_run(TrainConfig(), 1)
    monkeypatch.setattr(platform, "_process_platform", None)
    with pytest.raises(CoreVersionError):
        platform.get_platform("cpu")
    assert platform._process_platform is None


# --- Fixes are there, and still needed


@pytest.mark.ranks
def test_experts_take_our_swiglu() -> None:
    """Core's own experts, when Transformer Engine's linears compute them (FP8), run our kernel."""
    out = call(nodes_of_experts, environment={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert not any("_SwiGLU" in node for node in out["before"])
    assert any(node.startswith("_SwiGLU") for node in out["after"])
    assert out["error"] < 1e-5


@pytest.mark.ranks
@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="APEX is installed"
)
def test_the_fusion_of_weight_gradients_needs_apex_in_core() -> None:
    """Ours sets the linears of Transformer Engine alone, and no other module that has such a switch."""
    assert "install APEX" in call(linear_with_fused_weight_gradients)

    class Linear(nn.Module):
        fuse_wgrad_accumulation = False

    class Fused(Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    model = nn.Sequential(Linear(), Fused())
    assert fuse_weight_gradients(model) == 1
    assert [module.fuse_wgrad_accumulation for module in model] == [False, True]


@pytest.mark.ranks
def test_core_brings_counts_of_experts_to_the_host() -> None:
    core, ours = call(counts_brought_to_the_host)
    assert core and not ours


def test_cores_packed_rotary_waits_for_the_host() -> None:
    """Tensors without data can be computed with as long as nobody reads them."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    query, angles = torch.empty(8, 1, 2, 4, device="meta"), torch.empty(8, 1, 1, 4, device="meta")
    bounds = torch.empty(3, dtype=torch.int32, device="meta")

    assert apply_rotary_pos_emb(query, angles, config, cp_group=group).shape == query.shape
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        apply_rotary_pos_emb(query[:, 0], angles, config, cu_seqlens=bounds, cp_group=group)


def test_cores_norm_refuses_sequence_parallelism() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vl.models.layer_specs import local_norm_class

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        normalization="RMSNorm",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)
    norm = local_norm_class(config)(config=config, hidden_size=8)
    assert norm.weight.sequence_parallel


def sources_of(package: str) -> str:
    """The source text of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")))


def test_core_does_not_start_userbuffers() -> None:
    assert "initialize_ub" not in sources_of("megatron.core")


def test_what_is_silenced_is_still_said() -> None:
    """By the source of core; the last sentence of torch's is in its compiled part."""
    text = re.sub(r'"\s*f?"', "", sources_of("megatron.core")).replace("{world_size}", "1")
    missing = [pattern for pattern in IGNORED_WARNINGS if not re.search(pattern.strip(".*"), text)]
    assert missing == [".*attribute of a Tensor that is not a leaf.*"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (torch.ones(1, requires_grad=True) * 2).grad  # noqa: B018
    assert "attribute of a Tensor that is not a leaf" in str(said[0].message)

    for name in QUIET_LOGGERS:
        source = inspect.getsource(importlib.import_module(name))
        assert re.search(r"\b(log_single_rank|logger\.(info|warning|debug))\(", source), name
