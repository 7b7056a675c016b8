"""`megatron-vl evaluate` on VLMEvalKit's sets of dialogues, several tables and videos."""

import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import av
import pytest
import torch
from pandas import DataFrame

from tests.toolkit.evaluation import photographs, write_video
from toolkit.common.hf_loading import load_hf_processor
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.vlmevalkit_adapter import (
    NO_JUDGE,
    QUESTION_COUNT_FILE,
    VlmEvalKitModel,
    _read_dataset,
    run_vlmevalkit,
)


def test_limit_takes_the_same_number_of_questions_from_each_table():
    """A set of several tables, such as MMMB, scores each of them by itself."""
    tables = ["ar"] * 3 + ["cn"] * 3 + ["en"] * 3
    rows = DataFrame({"index": range(9), "question": "What is this?", "SUB_DATASET": tables})
    job = {"data": "MMMB", "settings": {"limit": 5}}
    dataset = _read_dataset(job, lambda name: SimpleNamespace(data=rows))
    assert dataset.data["SUB_DATASET"].tolist() == ["ar", "ar", "cn", "cn", "en", "en"]


@pytest.mark.parametrize("judge", [NO_JUDGE, "mine"])
def test_vlmevalkit_gets_models_judge_and_counted_questions(judge: str, tmp_path: Path, monkeypatch) -> None:
    """Instead of VLMEvalKit, modules with the names that the program takes from it."""
    dialogues = DataFrame({"index": [1, 2], "question": [["a", "b"], ["c", "d", "e"]]})
    dataset = SimpleNamespace(data=dialogues, TYPE="MT", build_prompt=lambda row: 2 * row["question"])
    api, config = SimpleNamespace(OpenAIWrapper=str), SimpleNamespace(supported_VLM={})
    asked: list[object] = []
    build = {"MMDU": dataset}.get
    run = SimpleNamespace(build_dataset=build, main=lambda: asked.append(run.build_dataset("x", fps=1)))
    package = ModuleType("vlmeval")
    vars(package).update(api=api, config=config, run=run)
    monkeypatch.setitem(sys.modules, "vlmeval", package)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = "" if judge == NO_JUDGE else "http://localhost:8000/v1"
    run_vlmevalkit(
        {"data": "MMDU", "work": str(tmp_path), "checkpoints": {"original-1": "hf", "converted-2": "back"},
         "settings": {"judge": judge, "limit": None}, "judge_url": url}
    )  # fmt: skip
    assert asked == [dataset] and (tmp_path / QUESTION_COUNT_FILE).read_text() == "5"
    words = "--data MMDU --model original-1 converted-2 --work-dir ../results --judge".split()
    of_judge = ["--judge-base-url", url, "--judge-key", "none"] if url else []
    assert sys.argv[1:] == [*words, judge, *of_judge] and list(config.supported_VLM) == words[3:5]
    if not url:
        with pytest.raises(RuntimeError, match="--judge NAME@http://localhost"):
            api.OpenAIWrapper("gpt")
    assert random.random() == random.Random(0).random(), "sets that draw give all checkpoints the same"


def test_videos_have_the_frames_that_their_set_names() -> None:
    model = VlmEvalKitModel.__new__(VlmEvalKitModel)
    text, video, own = {"type": "text"}, {"type": "video"}, {"type": "video", "fps": 1.0}
    for given in ({"nframes": 8}, {"fps": 2.0}, {}):
        model.nframe, model.fps = given.get("nframes"), given.get("fps")
        assert [model._with_frame_settings(part) for part in (text, video, own)] == [text, video | given, own]


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
)
def test_videos_are_encoded_as_by_the_checkpoints_processor(family, tmp_path):
    """Compares frames, grids, times and tokens for a number of frames and for frames per second."""
    from transformers.video_utils import VideoMetadata

    hf = write_tiny_checkpoint(tmp_path / "hf", family)
    write_video(tmp_path / "a.mp4", photographs()[1], 29)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = torch.stack(
            [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        )

    model = CheckpointModel(hf, {"dtype": "float32", "max_new_tokens": (1, 1)}, [tmp_path])
    processor = load_hf_processor(hf)
    size = {name: processor.video_processor.size[name] for name in ("shortest_edge", "longest_edge")}
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if family in ("qwen3_vl", "qwen3_5"):
        # The pair around the whole video, which the released model does not know.
        text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    for own, theirs in (
        ({"nframes": 8}, {"num_frames": 8, "fps": None}),
        ({"fps": 2.0}, {"fps": 2.0}),
        ({}, {"fps": 2.0}),
    ):
        prompt = [
            {"type": "video", "value": str(tmp_path / "a.mp4")} | own,
            {"type": "text", "value": "Who?"},
        ]
        found = model.answerer.model_inputs(model.encode(prompt))
        wanted = processor(
            text=[text],
            videos=[frames.permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(total_num_frames=len(frames), fps=8.0)],
            do_sample_frames=True,
            cap_pixels_per_frame=False,
            size=size,
            return_tensors="pt",
            **theirs,
        )
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
