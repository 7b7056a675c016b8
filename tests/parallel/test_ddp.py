"""Our DDP gathers parameters when Megatron-core's does."""

from __future__ import annotations

import pytest

from tests.parallel.programs import order_of_gathers
from tests.support.ranks import call

pytestmark = pytest.mark.ranks


def test_modules_wait_for_their_parameters_as_in_core() -> None:
    """The same gathers start in the same order, and as many are under way when each module runs."""
    out = call(order_of_gathers)
    assert out["ReplicaDDP"] == out["DistributedDataParallel"]
    starts = [event for event in out["ReplicaDDP"] if event[0] == "start"]
    groups = out["ReplicaDDP"][-1][1]
    assert groups > 3
    assert len(starts) == 2 * groups
