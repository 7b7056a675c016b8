"""`megatron-vl evaluate` with models that think: prompts, answers, and answers that never came."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_vl.data.sample.thinking import GeneratedAnswer
from megatron_vl.system.errors import UsageError
from megatron_vl.system.json_files import write_json
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.trained_media import ARGUMENTS_KEY, MEDIA_KEY
from tests.tiny import tiny_checkpoint, write_tiny_checkpoint
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.evaluation import folder_hash, read_answers, run_evaluation
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.vlmevalkit_adapter import VlmEvalKitModel

HF_CONFIGS = Path(__file__).resolve().parents[1] / "hf_configs"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Path:
    """A tiny Qwen3.5 with the chat template of 9B, as released."""
    hf = write_tiny_checkpoint(tmp_path_factory.mktemp("thinking") / "hf", "qwen3_5")
    (hf / "chat_template.json").unlink()
    shutil.copy(HF_CONFIGS / "Qwen3.5-9B.chat_template.jinja", hf / "chat_template.jinja")
    return hf


GREEDY = {"dtype": "float32", "limit": None}
WHO = [{"type": "text", "value": "Who?"}]


OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(("switch", "end"), [(None, OPENED), ("off", CLOSED)])
def test_evaluated_model_thinks_as_asked(thinking, switch, end):
    """Prompt and answer are those of the released template and of transformers; a dozen tokens are too few to
    think."""
    limits = {"max_new_tokens": (12, 13)}
    model = CheckpointModel(thinking, GREEDY | limits | {"thinking": switch}, [])
    inputs = model.answerer.model_inputs(model.encode(WHO))
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert model.answerer.encoder.chat_encoder.tokenizer.decode(inputs["input_ids"][0]) == prompt + end

    thinks = switch != "off"
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 12 + thinks}
    tokens = model.answerer.model.generate(**inputs, **greedy)
    text = model.answerer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    assert model.generate_answer(WHO) == (
        GeneratedAnswer("", text.strip(), is_block_closed=False) if thinks else GeneratedAnswer(text)
    )


def test_exported_model_is_asked_as_it_was_trained(thinking, tmp_path):
    """With the limits of pixels and the arguments of the template that ``megatron_vl.json`` names."""
    hf = shutil.copytree(thinking, tmp_path / "hf")
    released_hash = folder_hash(hf)
    media = {"min_pixels": 1024, "max_pixels": 4096, "video_max_pixels": 0, "video_fps": 1.0}
    media["video_max_frames"] = 6
    write_json(hf / EXPORT_FACTS_FILE, {MEDIA_KEY: media, ARGUMENTS_KEY: {"enable_thinking": False}})
    Image.new("RGB", (320, 320)).save(tmp_path / "square.png")
    prompt = [{"type": "image", "value": str(tmp_path / "square.png")}, *WHO]
    for switch, end in ((None, CLOSED), ("on", OPENED)):
        model = CheckpointModel(hf, GREEDY | {"max_new_tokens": (1, 1), "thinking": switch}, [tmp_path])
        encoded = model.encode(prompt)
        assert model.answerer.decode(encoded.token_ids).endswith(f"assistant\n{end}")
        # 64 x 64 pixels are the most: four patches of 16 a side.
        [grid] = [item.grid_thw for item in encoded.media_items]
        assert (grid.t, grid.h, grid.w) == (1, 4, 4)
    assert model.answerer.encoder.pixel_settings.video_max_frames == 6
    assert folder_hash(hf) != released_hash, "answers of another encoding would be taken for its own"


def test_thinking_is_not_part_of_the_answer(thinking, tmp_path, monkeypatch):
    """The tokens are made by hand; a later turn of a dialogue is asked without what was thought before."""
    job = {"work": str(tmp_path), "checkpoints": {"original": thinking}, "roots": []}
    adapter = VlmEvalKitModel(job | {"settings": GREEDY | {"max_new_tokens": (2, 2)}}, "original")
    answerer = adapter.model.answerer
    outputs = ["A? No.\n</think>\n\nB", "Well, A or"]
    seen = []

    def generated(input_ids, **_):
        seen.append(answerer.encoder.chat_encoder.tokenizer.decode(input_ids[0]))
        new = answerer.encoder.chat_encoder.tokenizer(outputs[len(seen) - 1], return_tensors="pt")[
            "input_ids"
        ]
        return torch.cat([input_ids, new], dim=1)

    monkeypatch.setattr(answerer.model, "generate", generated)
    turns = [{"role": "user", "content": "One?"}]
    turns.append({"role": "assistant", "content": adapter.chat(turns)})
    assert adapter.chat([*turns, {"role": "user", "content": "Two?"}]) == ""
    assert "assistant\nB<|im_end|>" in seen[1] and "A? No." not in seen[1]
    seen.clear()
    assert adapter.generate(WHO) == "B"

    names = ("question", "answer", "thinking", "unanswered")
    assert [
        tuple(line[name] for name in names) for line in read_answers(tmp_path / "results" / "original")
    ] == [
        ("One?", "B", "A? No.", 0),
        ("Two?", "", "Well, A or", 1),
        ("Who?", "B", "A? No.", 0),
    ]


def test_evaluate_refuses_a_switch_that_the_template_lacks(tmp_path):
    hf = tiny_checkpoint("qwen2_5_vl")
    options = EvaluateOptions(original=hf, converted=hf, data="set", out=tmp_path, thinking="off")
    with pytest.raises(UsageError, match="--thinking off: the chat template of .* has no switch"):
        run_evaluation(options, "set", tmp_path)
