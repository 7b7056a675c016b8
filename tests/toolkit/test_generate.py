"""`generate` answers as `transformers` does after its own processor, token for token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_adapter, convert_weights, export_weights
from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import UserError
from tests.converters.peft_models import all_targets, peft_folder
from tests.tiny import with_released_template
from toolkit.cli import main
from toolkit.data.statistics import escape_unprintable
from toolkit.demo.demo_data import write_raw_data
from toolkit.demo.reference import DemoReference, read_sharegpt_sample
from toolkit.generate.answers import Answerer, exported_folder, split_at_answer

TOKENS = 12
IDS = ("astronaut", "two_images", "text_only", "video")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the media, and the first question of some conversations with its answer."""
    folder = tmp_path_factory.mktemp("raw")
    conversations = json.loads(write_raw_data(folder).read_text())
    chosen = [next(record for record in conversations if record["id"] == name) for name in IDS]
    return folder / "media", [each | {"conversations": each["conversations"][:2]} for each in chosen]


def greedy_answer(reference: DemoReference, record: dict[str, Any], media: Path, **template: bool) -> str:
    asked = record | {"conversations": record["conversations"][:1]}
    messages, images, videos = read_sharegpt_sample(asked, media)
    text = reference.processor.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **template
    )
    batch = reference.processor_batch(text, images, videos)
    # Like released checkpoints, this one sets sampling and a repetition penalty in its generation_config.
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": TOKENS}
    tokens = reference.model.generate(**batch, **greedy)[0, batch["input_ids"].shape[1] :]
    return reference.processor.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.full), "qwen3_5"]
)
def test_generate_equals_transformers_with_its_own_processor(
    family: str, records: Any, tiny_checkpoint: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """An image, two images, text alone and a video, from a data set."""
    # As in a process that uses the platform of the CPU. It is float32 there too.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    media, conversations = records
    hf = tiny_checkpoint(family, dtype=torch.float32, max_pixels=252 * 252)
    (tmp_path / "data.json").write_text(json.dumps(conversations))
    convert = ["--input", tmp_path / "data.json", "--media-root", media, "--out", tmp_path / "set"]
    assert main(["data", "convert", *map(str, convert)]) == 0
    asked = ["--data.path", tmp_path / "set", "--eval.split", "train", "--out", tmp_path / "answers.jsonl"]
    limits = ["--data.video_max_frames", 8, "--max-new-tokens", TOKENS]
    assert main(["generate", "--checkpoint", str(hf), *map(str, (*asked, *limits))]) == 0
    assert "0 of 4 answers (0.0%) equal their reference" in capsys.readouterr().out

    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    reference = DemoReference(hf, video_fps=2.0, video_max_frames=8)
    wanted = {
        each["conversations"][1]["value"]: greedy_answer(reference, each, media) for each in conversations
    }
    assert {line["reference"].strip(): line["answer"] for line in lines} == wanted
    assert all(line["key"] and line["prompt"] for line in lines)


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_generate_thinks_as_the_template_is_asked_to(
    thinking: str, records: Any, tiny_checkpoint: Any, tmp_path: Path, capsys: Any
) -> None:
    """With the chat template of Qwen3.5-9B, which writes the block of thinking into the prompt."""
    hf = tiny_checkpoint("qwen3_5", dtype=torch.float32, max_pixels=252 * 252)
    hf = with_released_template(shutil.copytree(hf, tmp_path / "hf"))
    media, conversations = records
    image = media / conversations[0]["image"]
    asked = ["--prompt", "Who?", "--image", image, "--max-new-tokens", TOKENS, "--thinking", thinking]
    assert main(["generate", "--checkpoint", *map(str, (hf, *asked))]) == 0
    printed = capsys.readouterr()
    assert f"the answer was cut after {TOKENS} tokens; raise --max-new-tokens" in printed.err

    reference = DemoReference(hf, video_fps=2.0, video_max_frames=8)
    asked = [{"from": "human", "value": "<image>Who?"}]
    record = {"image": conversations[0]["image"], "conversations": asked}
    answer = greedy_answer(reference, record, media, enable_thinking=thinking == "on")
    # No tiny model closes the block within a few tokens.
    shown = escape_unprintable(answer)
    assert printed.out == ("\n" if thinking == "on" else f"{shown}\n")
    assert (f"<think>\n{shown.strip()}\n</think>\n" in printed.err) == (thinking == "on")


def test_spaces_of_other_scripts_are_shown_as_they_are() -> None:
    shown = "你好\u3000Ça va\u202f?\u00a0"
    assert escape_unprintable(f"{shown}\x1b\u202e") == f"{shown}\\u001b\\u202e"


def folder_tensors(hf: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in hf.glob("*.safetensors")}


def test_generate_exports_a_run_once(tiny_checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    """Found again by the digest of the weights; other weights of the step replace it."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    step = tmp_path / "run" / "step_00000004"
    convert_weights(hf, step / "weights", {"tp": 2})
    for _ in range(2):
        assert exported_folder(step, str(hf)) == tmp_path / "run" / "hf" / step.name
    assert capsys.readouterr().err.count("exporting step 4 to") == 1
    assert folder_tensors(tmp_path / "run" / "hf" / step.name) == folder_tensors(hf)

    other = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32, seed=1)
    shutil.rmtree(step / "weights")
    convert_weights(other, step / "weights")
    exported = exported_folder(step, str(hf))
    assert folder_tensors(exported) == folder_tensors(other)

    with pytest.raises(UserError, match="give --model.hf"):
        exported_folder(step, "")
    convert_weights(hf, tmp_path / "weights")
    with pytest.raises(UserError, match="Megatron weights of no run"):
        exported_folder(tmp_path / "weights", str(hf))


def test_generate_merges_the_adapters_of_a_run(tiny_checkpoint: Any, tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen3_vl", dtype=torch.float32)
    peft_folder(tmp_path / "adapter", hf, lora_alpha=40, **all_targets(hf))
    step = tmp_path / "run" / "step_00000004"
    convert_adapter(tmp_path / "adapter", hf, step / "weights", {"tp": 2})
    merged = exported_folder(step, str(hf))
    export_weights(tmp_path / "adapter", hf, tmp_path / "merged", merges_adapter=True)
    assert folder_tensors(merged) == folder_tensors(tmp_path / "merged") != folder_tensors(hf)


def test_prompt_ends_before_the_first_answer(tiny_checkpoint: Any) -> None:
    spec = read_spec(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    image, text = spec.image_token_id, 5
    grids = [GridTHW(1, 2, 4, "image"), GridTHW(1, 2, 2, "image")]  # 2 tokens and 1 token
    media = [MediaItem(grid, torch.zeros(1, 1, 1, dtype=torch.uint8)) for grid in grids]
    tokens = torch.tensor([text, image, image, text, 7, 8, image, 9])
    mask = torch.tensor([0, 0, 0, 0, 1, 0.5, 0, 1])
    prompt, answer = split_at_answer(TokenizedSample(tokens, mask, media), spec)
    assert prompt.token_ids.tolist() == [text, image, image, text] and prompt.media_items == media[:1]
    assert answer.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", " "], "give either --prompt"),
        (["--data.path", "tests"], "or --out FILE for the answers to the data set --data.path"),
        (["--data.path", "tests", "--out", "README.md"], "--out README.md exists"),
        (["--out", "new.jsonl", "--prompt", "Hi"], "give either --prompt"),
        (["--out", "new.jsonl"], "--out needs --data.path"),
        (["--prompt", "Hi", "--lora.adapter", "tests"], "lora.adapter is for training: merge it first"),
    ],
)
def test_generate_refuses_contradicting_options(options, message, tiny_checkpoint, capsys) -> None:
    hf = str(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    assert main(["generate", "--checkpoint", hf, *options]) != 0
    assert message in capsys.readouterr().err


def test_answer_ends_with_the_turn(tiny_checkpoint: Any) -> None:
    answerer = Answerer(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32), DataConfig(), (4, 4))
    tokens = answerer.encoder.encode_prompt([{"role": "user", "content": "Hi"}], [])
    _, shortcoming = answerer.answer(tokens)
    assert "cut after 4 tokens" in shortcoming
    first = int(answerer.model(**answerer.model_inputs(tokens)).logits[0, -1].argmax())
    answerer.stop_token_ids = [*answerer.stop_token_ids, first]
    answer, shortcoming = answerer.answer(tokens)
    assert (answer.answer_text, shortcoming) == (answerer.decode([first]), "")
