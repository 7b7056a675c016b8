from __future__ import annotations

import pytest

from tests.support import ranks

COMMANDS = ("toolkit.bench.command", "toolkit.parity.compare")


@pytest.fixture
def forked_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a command starts are forks of the server. A launcher of their own would import the stack
    first, for ten seconds of processor time. One test of each command has the launcher."""
    for command in COMMANDS:
        monkeypatch.setattr(f"{command}.run_group", ranks.run_group)
