"""Shows that the other tests of this folder can fail: each executed payload leaves its mark."""

import pickle
import runpy

import jinja2
import pytest
import torch

from .payload import Mark


@pytest.mark.parametrize("kind", ["pickle", "torch", "python", "template"])
def test_payload_leaves_its_mark(kind, tmp_path):
    mark = Mark(tmp_path / "executed")
    if kind == "pickle":
        pickle.loads(mark.pickle())
    elif kind == "torch":
        mark.torch(tmp_path / "weights.pt")
        torch.load(tmp_path / "weights.pt", weights_only=False)
    elif kind == "python":
        (tmp_path / "evil.py").write_text(mark.python)
        runpy.run_path(str(tmp_path / "evil.py"))
    else:
        jinja2.Template(mark.template).render()
    with pytest.raises(AssertionError, match="executed"):
        mark.check()
