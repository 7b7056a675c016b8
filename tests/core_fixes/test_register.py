"""What reaches into Megatron-core and its kin is in one register, whose entries are true and still needed."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vl.config import TrainConfig
from megatron_vl.core_fixes.core_version import (
    TESTED_CORE_VERSIONS,
    UNTESTED_CORE_VARIABLE,
    CoreVersionError,
    check_core_version,
)
from megatron_vl.core_fixes.expert_swiglu import use_fused_swiglu
from megatron_vl.core_fixes.silenced_messages import IGNORED_WARNINGS, QUIET_LOGGERS
from megatron_vl.core_fixes.wgrad_fusion import fuse_weight_gradients
from megatron_vl.platform import get_platform
from megatron_vl.training.resolve import resolve_run
from tests.core_fixes import scan
from tests.support.expert_config import expert_config
from tests.support.ranks import call, in_ranks
from tests.support.tiny_trainer import join

REGISTER = tomllib.loads((scan.ROOT / "megatron_vl/core_fixes/register.toml").read_text())
FIXES: dict[str, dict[str, Any]] = {fix["code"]: fix for fix in REGISTER["fix"]}
PUBLIC_BASE_CLASSES = REGISTER["public_base_classes"]
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize("code", FIXES)
def test_register_entry_is_true(code: str) -> None:
    fix = FIXES[code]
    module, _, name = code.partition(":")
    assert hasattr(importlib.import_module(module), name)
    assert [target for target in fix["touches"] if installed(target) and not exists(target)] == []
    assert fix["touches"] and fix["why"] and fix["until"]
    assert fix.get("package", "megatron-core") in REGISTER["versions"]
    path, _, test = fix["test"].partition("::")
    tree = ast.parse((scan.ROOT / path).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def installed(target: str) -> bool:
    """Whether the package is; core's own modules for Transformer Engine and APEX are empty without them."""
    if target.endswith("fused_weight_gradient_mlp_cuda"):
        return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    te_modules = ("transformer_engine.", "megatron.core.extensions.transformer_engine.")
    needs_te = target.startswith(te_modules) or target.endswith(".get_dummy_wgrad")
    return not needs_te or importlib.util.find_spec("transformer_engine") is not None


def exists(target: str) -> bool:
    """Whether a dotted name is a module, or something in one; attributes that objects get count as well."""
    try:
        pkgutil.resolve_name(target)
        return True
    except (AttributeError, ImportError):
        owner, _, name = target.rpartition(".")
        found = pkgutil.resolve_name(owner)
        return inspect.isclass(found) and any(sets(kind, name) for kind in found.__mro__[:-1])


def sets(kind: type, name: str) -> bool:
    """Whether objects of a class get an attribute of this name."""
    in_init = rf"\bself\.{name}\b[^=\n]*="
    return name in vars(kind).get("__annotations__", ()) or bool(re.search(in_init, inspect.getsource(kind)))


def test_register_entry_names_its_thread_or_has_a_report_to_file() -> None:
    reports = (scan.ROOT / "docs/upstream.md").read_text()
    named = set(re.findall(r"`([\w.]+:\w+)`", reports))
    assert named == {code for code, fix in FIXES.items() if "issue" not in fix}
    threads = [fix["issue"] for fix in FIXES.values() if "issue" in fix]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", thread) for thread in threads)
    assert len(FIXES) == len(REGISTER["fix"]) and not FIXES.keys() & PUBLIC_BASE_CLASSES.keys()
    assert REGISTER["versions"]["megatron-core"] == TESTED_CORE_VERSIONS[-1]


def unlisted(reaches: list[scan.Reach]) -> list[str]:
    """Those that no entry of the same module names. Classes may be named where they are defined instead of
    where they are imported from; of an object that is not known, the attribute counts."""
    listed = [(code.partition(":")[0], name.split(".")) for code in FIXES for name in FIXES[code]["touches"]]

    def is_listed(reach: scan.Reach) -> bool:
        end = reach.target.split(".")[-2:]
        return any(module == reach.module and parts[-len(end) :] == end for module, parts in listed)

    return [str(reach) for reach in reaches if not is_listed(reach)]


def test_register_has_every_subclass() -> None:
    found = {f"{reach.module}:{reach.scope}": str(reach) for reach in scan.reaches(scan.foreign_bases)}
    assert len(found) >= 14
    known = FIXES.keys() | PUBLIC_BASE_CLASSES.keys()
    assert {text for place, text in found.items() if place not in known} == set()
    assert PUBLIC_BASE_CLASSES.keys() <= found.keys()


def test_register_has_every_replaced_attribute_and_private_name() -> None:
    replaced, private = scan.reaches(scan.assigned), scan.reaches(scan.private_names)
    assert {"torch.compile", "megatron.core.parallel_state.create_group"} <= {r.target for r in replaced}
    assert len(private) > 8 and unlisted(replaced + private) == []


def test_register_has_every_filter() -> None:
    """Of warnings and of loggers; ``toolkit`` and ``tests`` may silence what they start."""
    modules = {reach.module for reach in scan.reaches(scan.silenced)}
    assert modules and modules <= {code.partition(":")[0] for code in FIXES}


def test_core_of_an_unknown_version_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run and by a platform, unless a variable lets it through."""
    from megatron_vl import platform

    version = Mock(return_value=TESTED_CORE_VERSIONS[-1])
    monkeypatch.setattr("megatron_vl.core_fixes.core_version.version", version)
    monkeypatch.setattr(platform, "_process_platform", None)
    monkeypatch.delenv(UNTESTED_CORE_VARIABLE, raising=False)
    check_core_version()
    version.return_value = "99.1.0"
    for refused in (lambda: resolve_run(TrainConfig(), 1), lambda: platform.get_platform("cpu")):
        with pytest.raises(CoreVersionError):
            refused()
    assert platform._process_platform is None
    monkeypatch.setenv(UNTESTED_CORE_VARIABLE, "1")
    check_core_version()
    monkeypatch.setenv(UNTESTED_CORE_VARIABLE, "0")
    with pytest.raises(CoreVersionError, match=r"megatron-core 99\.1\.0 .*MEGATRON_VL_UNTESTED_CORE=1"):
        check_core_version()
    version.side_effect = importlib.metadata.PackageNotFoundError("megatron-core")
    with pytest.raises(CoreVersionError, match="megatron-core is not installed; pip install"):
        check_core_version()


class PlainGroupedLinear(nn.Module):
    """What core asks of Transformer Engine's grouped linears, one product after another."""

    def __init__(self, experts: int, features_in: int, features_out: int, **unused: object) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(features_out, features_in) for _ in range(experts))

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(counts), self.weights, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts]), None


def autograd_nodes(out: Tensor) -> list[str]:
    found, left = [], [out.grad_fn]
    while left:
        if (node := left.pop()) is not None:
            found.append(node.name())
            left += [following for following, _ in node.next_functions]
    return found


def check_swiglu_of_experts() -> None:
    get_platform("cpu")
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    torch.manual_seed(0)
    experts = TEGroupedMLP(
        2,
        expert_config(8, 6, 2, bias_activation_fusion=True),
        submodules=GroupedMLPSubmodules(linear_fc1=PlainGroupedLinear, linear_fc2=PlainGroupedLinear),
        pg_collection=SimpleNamespace(ep=None, expt_tp=None),
    )
    counts, x, probs = [3, 2], torch.randn(5, 8), torch.rand(5)
    before = experts(x, torch.tensor(counts), probs)[0]
    assert not any("_SwiGLU" in node for node in autograd_nodes(before))
    use_fused_swiglu()
    out = experts(x, torch.tensor(counts), probs)[0]
    assert any(node.startswith("_SwiGLU") for node in autograd_nodes(out))
    gate, up = experts.linear_fc1(x, counts)[0].chunk(2, -1)
    expected = experts.linear_fc2(F.silu(gate) * up * probs[:, None], counts)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.ranks
def test_experts_take_our_swiglu() -> None:
    """Core's own experts, when Transformer Engine's linears compute them (float32), run our kernel."""
    call(check_swiglu_of_experts, environment={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="APEX is installed"
)
@in_ranks()
def test_fusion_of_weight_gradients_needs_apex_in_core() -> None:
    """Ours sets the linears of Transformer Engine alone, and no other module that has such a switch."""
    join()
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(**SIZES, gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="install APEX"):
        ColumnParallelLinear(8, 8, config=config, init_method=config.init_method)

    class Linear(nn.Module):
        fuse_wgrad_accumulation = False

    class Fused(Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    model = nn.Sequential(Linear(), Fused())
    fuse_weight_gradients(model)
    assert [module.fuse_wgrad_accumulation for module in model] == [False, True]


@in_ranks()
def test_core_brings_counts_of_experts_to_the_host() -> None:
    get_platform("cpu")
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_vl.models.moe.dispatch import DeviceCountsDispatcher

    moved: list[Any] = []
    # Nothing moves where there is no device.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, *_, **__: moved.append(tensor) or tensor
    counts = torch.tensor([3, 2])
    for kind in (token_dispatcher.MoEAlltoAllTokenDispatcher, DeviceCountsDispatcher):
        moved.clear()
        dispatcher = kind.__new__(kind)
        fields = dict.fromkeys(("input_splits", "output_splits", "output_splits_tp", "num_out_tokens"))
        fields |= {"drop_and_pad": False, "cuda_dtoh_point": "here", "cuda_sync_point": "later"}
        vars(dispatcher).update(fields, cuda_dtoh_stream=torch.cuda.Stream(), num_local_experts=1)
        assert dispatcher._maybe_dtoh_and_synchronize("here", counts) is counts
        assert any(tensor is counts for tensor in moved) == (kind is not DeviceCountsDispatcher)


def test_cores_packed_rotary_waits_for_the_host() -> None:
    """Tensors without data can be computed with as long as nobody reads them."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    switches = ("apply_rope_fusion", "rotary_interleaved", "multi_latent_attention")
    config: Any = SimpleNamespace(**dict.fromkeys(switches, False))
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

    two_ranks = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = TransformerConfig(**SIZES, **two_ranks, normalization="RMSNorm")
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)
    norm = local_norm_class(config)(config=config, hidden_size=8)
    assert norm.weight.sequence_parallel


def test_silenced_warnings_are_those_that_core_still_writes() -> None:
    """By the source of core; the last sentence of torch's is in its compiled part."""
    folder = Path(importlib.import_module("megatron.core").__path__[0])
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")))
    text = re.sub(r'"\s*f?"', "", text).replace("{world_size}", "1")
    missing = [pattern for pattern in IGNORED_WARNINGS if not re.search(pattern.strip(".*"), text)]
    assert missing == [".*attribute of a Tensor that is not a leaf.*"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (torch.ones(1, requires_grad=True) * 2).grad  # noqa: B018
    assert "attribute of a Tensor that is not a leaf" in str(said[0].message)

    for name in QUIET_LOGGERS:
        source = inspect.getsource(importlib.import_module(name))
        assert re.search(r"\b(log_single_rank|logger\.(info|warning|debug))\(", source), name


@in_ranks()
def test_cpu_platform_redirects_gpus_and_no_other_device() -> None:
    get_platform("cpu")
    made = [torch.zeros(1, device="cuda"), torch.ones(1).to("cuda:0"), torch.ones(1).cuda()]
    with torch.device("meta"):
        made.append(torch.empty(1))
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu", "cpu", "meta"]
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
