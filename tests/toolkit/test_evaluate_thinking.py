"""`megatron-vl evaluate` with models that think: prompts, answers, and answers that never came."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_vl.data.sample.thinking import GeneratedAnswer
from megatron_vl.errors import UsageError
from tests.tiny import tiny_checkpoint, write_tiny_checkpoint
from toolkit.evaluate import gates
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.evaluation import run_evaluation as compare_checkpoints
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.vlmevalkit_adapter import VlmEvalKitModel, read_answers

HF_CONFIGS = Path(__file__).resolve().parents[1] / "hf_configs"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Path:
    """A tiny Qwen3.5 with the chat template of 9B, as released."""
    hf = write_tiny_checkpoint(tmp_path_factory.mktemp("thinking") / "hf", "qwen3_5")
    (hf / "chat_template.json").unlink()
    shutil.copy(HF_CONFIGS / "Qwen3.5-9B.chat_template.jinja", hf / "chat_template.jinja")
    return hf


GREEDY = {"dtype": "float32", "device": "cpu", "largest_picture": 10**6}
GREEDY |= {"min_pixels": None, "max_pixels": None}
WHO = [{"type": "text", "value": "Who?"}]


OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(("switch", "end"), [(None, OPENED), ("off", CLOSED), ("on", OPENED)])
def test_the_model_of_evaluate_thinks_as_asked(thinking, switch, end):
    """Prompt and answer are those of the released template and of transformers; a dozen tokens are too few to
    think."""
    limits = {"max_new_tokens": 12, "max_new_tokens_thinking": 13}
    model = CheckpointModel(thinking, GREEDY | limits | {"thinking": switch}, [])
    inputs = model.model_inputs(WHO)
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert model.processor.decode(inputs["input_ids"][0]) == prompt + end

    thinks = switch != "off"
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 12 + thinks}
    tokens = model.model.generate(**inputs, **greedy)
    text = model.processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert model.generate_answer(WHO) == (
        GeneratedAnswer("", text.strip(), is_block_closed=False) if thinks else GeneratedAnswer(text)
    )


def test_what_a_model_thinks_is_not_its_answer(thinking, tmp_path, monkeypatch):
    """The tokens are made by hand; a later turn of a dialogue is asked without what was thought before."""
    (tmp_path / "original").mkdir()
    job = {"work": str(tmp_path), "logit_questions": 0}
    adapter = VlmEvalKitModel(
        job, "original", None, [{"index": 7, "answer": "B"}, {"index": 8, "answer": "A"}]
    )
    model = adapter.checkpoint_model = CheckpointModel(thinking, GREEDY | {"max_new_tokens": 2}, [])
    outputs = ["A? No.\n</think>\n\nB", "Well, A or"]
    seen = []

    def generated(input_ids, **_):
        seen.append(model.processor.decode(input_ids[0]))
        new = model.processor.tokenizer(outputs[len(seen) - 1], return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, new], dim=1)

    monkeypatch.setattr(model.model, "generate", generated)
    turns = [{"role": "user", "content": "One?"}]
    turns.append({"role": "assistant", "content": adapter.chat(turns)})
    assert adapter.chat([*turns, {"role": "user", "content": "Two?"}]) == ""
    assert "assistant\nB<|im_end|>" in seen[1] and "A? No." not in seen[1]
    seen.clear()
    assert adapter.generate(WHO) == "B"

    lines = read_answers(tmp_path / "original")
    names = ("index", "question", "expected", "answer", "thinking", "unanswered")
    assert [tuple(line[name] for name in names) for line in lines] == [
        ("7", "One?", "B", "B", "A? No.", 0),
        ("7", "Two?", "B", "", "Well, A or", 1),
        ("8", "Who?", "A", "B", "A? No.", 0),
    ]


def test_answers_that_never_came_are_told_apart():
    """Two empty answers differ if their thoughts do; a question without an answer is counted."""
    cut = {"index": "1", "answer": "", "thinking": "A or", "unanswered": 1}
    assert gates.compare_answers([cut], [cut], 1).passed
    gate = gates.compare_answers([cut], [cut | {"thinking": "B or"}], 1)
    assert not gate.passed and gate.details == ["1: 'A or' against 'B or'"]
    assert gates.compare_answers([cut], [cut | {"answer": "A"}], 1).details == ["1: '' against 'A'"]


def test_a_switch_that_a_template_does_not_have_is_refused(tmp_path):
    hf = tiny_checkpoint("qwen2_5_vl")
    options = EvaluateOptions(
        original=hf, converted=hf, data="set", lmu_data=tmp_path, out=tmp_path, thinking="off"
    )
    with pytest.raises(UsageError, match="--thinking off: the chat template of .* has no switch"):
        compare_checkpoints(options, lambda line: None)
