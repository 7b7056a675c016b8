"""Exports name the limits of pixels and frames of training, and say where the processor config has others."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoProcessor, AutoTokenizer

from converters.convert import convert_weights, export_weights, reshard_weights
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import PROBE_TURNS, ChatEncoder
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE, read_run_template
from megatron_vl.data.sample.pixel_settings import media_limits_note
from megatron_vl.spec.families import hf_folder, read_spec
from megatron_vl.spec.families.hf_folder import chat_template_note, read_chat_template, text_digests
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.trained_media import exported_media
from tests.security.payload import edit
from tests.support.run_json import write_run_json
from tests.tiny import tiny_checkpoint
from toolkit.cli import main

TRAINED = {"min_pixels": 3136, "max_pixels": 200704, "video_max_pixels": 100352}
TRAINED |= {"video_fps": 1.0, "video_max_frames": 8}
RUN_FIELDS = {f"data.{name}": value for name, value in TRAINED.items()} | {"data.seq_len": 128}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf")


@pytest.fixture
def step(hf: Path, tmp_path: Path) -> Path:
    """A saved step of a run that was trained with other limits than its folder names."""
    step = tmp_path / "run" / "step_00000004"
    convert_weights(hf, step / "weights")
    write_run_json(step, {"fields": RUN_FIELDS})
    return step


def test_media_command_writes_the_limits_and_notes_others(
    hf: Path, step: Path, tmp_path: Path, capsys
) -> None:
    words = ["export", "--checkpoint", str(step), "--hf", str(hf), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert exported_media(tmp_path / "out") == TRAINED
    said = capsys.readouterr().out
    assert "note: training saw media with" in said and "max_pixels 200704 (processor config: " in said
    assert "video_fps" not in said  # the folder does not say how it samples videos

    edit(hf / "preprocessor_config.json", min_pixels=3136, max_pixels=200704)
    assert main([*words, "--force"]) == 0
    said = capsys.readouterr().out
    assert "note: training saw media with video_max_pixels 100352 (processor config: 200704)" in said


def there_and_back(hf: Path, step: Path, folder: Path) -> list[Path]:
    """Exports of a step that was split and merged, and of that export after another conversion."""
    reshard_weights(step, folder / "split", {"tp": 2, "pp": 1})
    reshard_weights(folder / "split", folder / "merged")
    export_weights(folder / "merged", hf, folder / "out")
    convert_weights(folder / "out", folder / "again")
    export_weights(folder / "again", hf, folder / "back")
    return [folder / "out", folder / "back"]


def released_again(hf: Path, folder: Path) -> Path:
    """An export of released weights to a folder that another export wrote."""
    convert_weights(hf, folder / "released")
    export_weights(folder / "released", hf, folder / "back", force=True)
    return folder / "back"


def test_media_limits_stay_with_the_weights(hf: Path, step: Path, tmp_path: Path) -> None:
    assert all(exported_media(folder) == TRAINED for folder in there_and_back(hf, step, tmp_path))
    assert not (released_again(hf, tmp_path) / EXPORT_FACTS_FILE).exists()


def test_given_template_is_the_only_one_of_the_export(hf: Path, step: Path, tmp_path: Path) -> None:
    template = read_run_template(hf, TOOLS_TEMPLATE)
    edit(hf / "tokenizer_config.json", chat_template="that of a text model")  # as the released Qwen2.5-VL
    digests = text_digests(hf) | {"chat template": "CRC-32 of the given one"}
    write_run_json(step, {"fields": RUN_FIELDS | {"data.chat_template": template} | digests})
    turns = [{"role": "user", "content": "?"}, PROBE_TURNS[1]]
    encoder = ChatEncoder(hf, read_spec(hf), DataConfig(chat_template=TOOLS_TEMPLATE))
    expected = encoder.render_conversation(turns)
    assert '<tool_call>\n{"name": "look_up_the_weather", "arguments": {"city": "Oslo"}}' in expected
    for folder in there_and_back(hf, step, tmp_path):
        for serving_class in (AutoTokenizer, AutoProcessor):
            served = serving_class.from_pretrained(folder)
            assert served.apply_chat_template(turns, tokenize=False) == expected
        assert read_chat_template(folder) == template and not chat_template_note(folder)
        assert json.loads((folder / "chat_template.json").read_text())["chat_template"] == template

    # The template of an earlier export does not stay in its folder.
    assert read_chat_template(released_again(hf, tmp_path)) == read_chat_template(hf) != template


def test_export_compares_a_tokenizer_without_tokenizer_json(hf: Path, step: Path, tmp_path: Path) -> None:
    """Its vocab.json and merges.txt are read as a start reads them; then two tokens change their ids."""
    model = json.loads((hf / "tokenizer.json").read_text())["model"]
    (hf / "tokenizer.json").unlink()
    (hf / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (hf / "merges.txt").write_text("\n".join(merges) + "\n")
    digest = hf_folder.compute_tokenizer_digest(ChatEncoder(hf, read_spec(hf)).tokenizer.backend_tokenizer)
    write_run_json(step, {"fields": RUN_FIELDS | {"tokenizer": digest}})
    export_weights(step, hf, tmp_path / "out")

    edit(hf / "vocab.json", a=model["vocab"]["b"], b=model["vocab"]["a"])
    with pytest.raises(WeightsError, match=r"was trained with another tokenizer than that in .*hf, although"):
        export_weights(step, hf, tmp_path / "other")


@pytest.mark.parametrize("damage", ["edited", "cut"])
def test_damaged_run_json_is_refused(hf: Path, step: Path, tmp_path: Path, damage: str) -> None:
    """Without it, a folder would be exported whose images are resized in another way than in training."""
    text = (step / "run.json").read_text()
    changed = text.replace("200704", "200705") if damage == "edited" else text[:-20]
    (step / "run.json").write_text(changed)
    for write in (export_weights, reshard_weights):
        arguments = (step, hf) if write is export_weights else (step,)
        with pytest.raises(WeightsError, match=r"run\.json was changed after it was written"):
            write(*arguments, tmp_path / "refused")

    write_run_json(step, {"weights": "those of another step"})
    with pytest.raises(WeightsError, match=r"manifest\.json does not belong to .*run\.json"):
        reshard_weights(step, tmp_path / "refused")

    # The weights alone are whole.
    shutil.copytree(step / "weights", tmp_path / "weights")
    export_weights(tmp_path / "weights", hf, tmp_path / "out")
    assert exported_media(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("changes", "trained", "named"),
    [
        ({"max_pixels": 401408}, {"max_pixels": 200704}, "max_pixels 200704 (processor config: 401408)"),
        ({"min_pixels": 50176}, {"min_pixels": 3136}, "min_pixels 3136 (processor config: 50176)"),
        ({"max_frames": 768}, {"video_max_frames": 8}, "video_max_frames 8 (processor config: 768)"),
        ({"fps": 2}, {"video_fps": 0.5}, "video_fps 0.5 (processor config: 2)"),
        ({"size": {"shortest_edge": 3136, "longest_edge": 401408}, "max_pixels": None, "min_pixels": None},
         {"min_pixels": 3136, "max_pixels": 802816}, "max_pixels 802816 (processor config: 401408)"),
        ({"max_pixels": 200704}, {"max_pixels": 200704}, ""),
        ({"fps": 2.0, "max_frames": 32}, {"video_fps": 2, "video_max_frames": 32}, ""),
        ({"fps": None}, {"video_fps": 1.0}, ""),
        ({"max_pixels": 200704}, {}, ""),
    ],
)  # fmt: skip
def test_media_limits_note_names_what_differs(hf: Path, changes: dict, trained: dict, named: str) -> None:
    edit(hf / "preprocessor_config.json", **changes)
    note = media_limits_note(hf, trained)
    assert named in note and bool(named) == bool(note)
