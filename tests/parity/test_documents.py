"""Loss and gradients of documents equal those of transformers on the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_weights
from tests.data.media import encoded, write
from tests.tiny import tiny_checkpoint
from toolkit.parity.case import ParityCase, encode_conversations
from toolkit.parity.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE

from .test_parity import run_cases

TALK = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
ROWS = [["sample:0"], ["sample:1", "sample:3"], ["sample:2"], ["sample:1", "sample:2"]]
"""Of text alone, with images between texts, a caption, and a conversation in the same row as a document."""


def write_samples(folder: Path) -> Path:
    image = write(folder / "a.png", encoded(56, 84, "png", seed=1))

    def document(*parts: str) -> dict[str, Any]:
        items = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
        return {"document": items, "images": [str(image)] * parts.count("")}

    samples = [document("Only text. " * 6), document("First ", "", " then this:", "", "the end.")]
    samples += [document("", "A thing."), {"messages": TALK, "images": []}]
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder / "samples.json"


@pytest.mark.ranks
def test_documents_have_the_loss_and_gradients_of_transformers(tmp_path):
    samples = write_samples(tmp_path)
    hf, weights = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32), tmp_path / "weights"
    convert_weights(hf, weights)
    case = ParityCase("CP2", str(hf), str(weights), samples=str(samples), steps=[ROWS], seq_len=128, cp=2)
    masks = [one.loss_mask for one in encode_conversations(samples, case.hf)]
    assert masks[0][1:].all() and masks[1].sum() > 10 and masks[1].sum() < len(masks[1]) - 10

    results = run_cases([case], 2, tmp_path / "results")
    assert "error" not in results.get("CP2", results), results
    [step] = results["CP2"]["steps"]
    assert step["loss_error"] <= LOSS_TOLERANCE and step["gradient_error"] <= GRADIENT_TOLERANCE, step
    assert step["compared"] > 0 and not step["unexpected"]
