"""Settings that must be made before torch is imported, and fixtures for all tests."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

# Importing the stack makes no garbage, but collections take a third of its time; enabled again below.
gc.disable()
# Groups of processes share the machine's cores: one thread each, or they fight.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is downloaded in a test.
os.environ["HF_HUB_OFFLINE"] = "1"
# Shells start background jobs with SIGINT ignored, and processes inherit that. Tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support import ranks  # noqa: E402

# The same examples each time, however busy the machine is.
settings.register_profile("tests", derandomize=True, deadline=None, database=None)
settings.load_profile("tests")


LONGEST = """
training/test_lora parity/test_parity training/test_run training/test_faults kernels/test_triton_kernels
training/test_mtp training/test_resume training/test_export_hf models/test_mtp toolkit/test_parity
toolkit/test_train test_docs training/test_context_parallel estimate/test_flops
kernels/test_shard_exchange training/test_offload training/test_signals test_start models/moe/test_experts
converters/test_restart test_examples data/test_row_loader toolkit/test_bench converters/test_round_trip
converters/test_lora training/test_optimizer kernels/test_gated_delta_rule toolkit/test_plan
core_fixes/test_register parallel/test_joining
""".split()
"""Files with 20 seconds or more of processor time, the longest first. A file runs in one process: if a long
one came last, the other core would be idle at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; the order within a file stays."""
    order = {REPOSITORY / "tests" / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes the stack out of the sight of the garbage collector, which would go through it for a third of a
    second each time. Processes forked from here also share its pages."""
    gc.collect()
    gc.freeze()
    gc.enable()

    # Energon's loader collects garbage every few samples, and thaws what is frozen.
    energon = sys.modules.get("megatron.energon.wrappers.gc_dataset")
    if energon:
        nothing = {"collect": lambda: 0, "freeze": lambda: None, "unfreeze": lambda: None}
        energon.gc = SimpleNamespace(get_objects=gc.get_objects, **nothing)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """``make quick`` leaves out the tests marked ``ranks``; a test that starts ranks without
    the mark fails. Without VLMEvalKit the tests marked ``eval`` are skipped."""
    ranks.allowed = item.get_closest_marker("ranks") is not None
    if item.get_closest_marker("eval") and importlib.util.find_spec("vlmeval") is None:
        pytest.skip("VLMEvalKit is not installed: make eval")


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the folder of a small checkpoint, written once per session."""
    from tests.tiny import tiny_checkpoint as cached

    return cached


@pytest.fixture
def hf(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A float32 checkpoint of the test's parameter ``family``, with its parameter ``sizes``."""
    import torch

    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return tiny_checkpoint(params.get("family", "qwen2_5_vl"), dtype=torch.float32, **params.get("sizes", {}))


@pytest.fixture
def repository() -> Path:
    return REPOSITORY
