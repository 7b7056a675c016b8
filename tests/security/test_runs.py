"""Untrusted checkpoints of runs: no pickle is opened, no name leaves its folder, no state names a class."""

from __future__ import annotations

import json

import pytest

from megatron_vl.data.state_json import LoaderStateError, state_from_json, state_to_json
from tests.support.ranks import run_module

WEIGHTS = ("merge", "export", "load", "resume")
EXPECTED = {
    "pickles beside": ((), ""),
    "optimizer is a pickle": (("resume",), "rank_00000.safetensors"),
    "loader is a pickle": (("resume",), ""),
    "optimizer above": (("resume",), "not a file name"),
    "optimizer absolute": (("resume",), "not a file name"),
    "optimizer of another kind": (("resume",), "not a file name"),
    "loader above": (("resume",), "not a file name"),
    "weights above": (WEIGHTS, "not a file name"),
    "weights absolute": (WEIGHTS, "not a file name"),
    "weights of another kind": (WEIGHTS, "not a file name"),
    "layers without end": (WEIGHTS, "num_hidden_layers"),
}
"""Hostile change -> the uses that must refuse it, and part of their message."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = run_module("tests.security.runs", [tmp_path_factory.mktemp("runs")])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == EXPECTED.keys()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", EXPECTED)
def test_hostile_checkpoints_are_refused_or_read_without_harm(outcomes, kind):
    refusing, said = EXPECTED[kind]
    assert not outcomes[kind].pop("executed")
    for action, outcome in outcomes[kind].items():
        if action in refusing:
            assert outcome.startswith("refused: ") and said in outcome, (action, outcome)
        else:
            assert outcome == "same", (action, outcome)


@pytest.mark.parametrize(
    "value",
    [
        {"object": "Popen", "fields": {"args": ["true"]}},
        {"object": "os.system", "fields": {}},
        {"object": "__import__", "fields": {"name": "os"}},
        {"array": "AAAAAAAAAAA=", "dtype": "O", "shape": [1]},
        {"pickle": "gASVIAAA"},
    ],
    ids=["class", "function", "import", "objects", "pickle"],
)
def test_loader_state_names_no_class_of_its_own(value):
    """At any depth of what a loader writes."""
    assert state_from_json(state_to_json({"a": [1, [2.5, "x"]]})) == {"a": [1, [2.5, "x"]]}
    with pytest.raises((LoaderStateError, ValueError)):
        state_from_json(state_to_json({"a": 1})["dict"] + [value])
