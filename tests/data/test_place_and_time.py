"""A clip, times of images, limits of one medium, a template argument, a call, late system turns, two turns of
a role in a row, boxes and a point: from records through the loader to a step of training, with what the model
sees written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_tools.sample_sources import open_encoder
from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.spec.families import FAMILIES, read_spec
from tests.support.tiny_run import metrics, prepare, trained
from tests.tiny import tiny_checkpoint
from toolkit.parity.reference import backward_mean_loss, load_hf_for_training

from .datasets import converted, open_loader
from .helpers import assistant, system, text, user
from .media import encoded, video_of, write
from .test_boxes import raw_samples
from .test_qwen3_5_prompts import Run, Unit, written

WORDS = (
    *("system user assistant What? Look. A cat. And? seen ),(".split()),
    *("A cat.", "You are a helpful assistant.", "It gets brighter.", "Video 1: <0.2 seconds>", "Be brief."),
    '<tool_call>\n{"name": "look", "arguments": {"zoom": 0.10}}\n</tool_call>\n<tool_response>\n',
)
"""The vocabulary has each of them as one token."""
LIST = [f"{number}.png" for number in range(4)]
"""Of 70 x 100 pixels (height x width)."""


def asked(part: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [user([part, text("What?")]), assistant("It gets brighter.")], **fields}


CALL = {"type": "function", "function": {"name": "look", "arguments": '{"zoom": 0.10}'}}
# 10 frames a second: 10 to 52 are 4.3 s, of which 1 a second are 4, every 14th. They are at 0, 1.4, 2.8 and
# 4.2 s, and a group covers 2.15 s. Of 64 x 96 pixels, each side is divided by sqrt(64 * 96 / 3136) = 1.4.
CLIP = {"type": "video", "video": "a.mkv", "video_start": 1, "video_end": 5.2, "fps": 1, "max_pixels": 3136}
# Groups at 11 and 23 s. An image comes every 5.33 s, so a group covers 10.67 s.
TIMED = {"type": "video", "video": LIST, "timestamps": [10, 12, 20, 26]}
TIMED |= {"resized_height": 56, "resized_width": 56}
# At 0, 0.4, 2 and 2.8 s; a group covers 1.87 s. Each side is divided by 1.49.
NUMBERED = {"type": "video", "video": LIST, "frames_indices": [0, 12, 60, 84], "fps": 30, "max_pixels": 3136}
# 200 x 100 pixels when it is upright, divided by 1.26.
TURNED = {"type": "image", "image": "turned.jpg", "max_pixels": 12544}
PLACES = {"pixels": "(10,20),(50,150)", "thousandths": "(100,100),(500,750)", "resized": "(14,35),(28,70)"}
"""Boxes on it by what a record's ``boxes`` says."""


def placed(frame: str) -> dict[str, Any]:
    answer = assistant(f"<|box_start|>{PLACES[frame]}<|box_end|>")
    return {"messages": [user([TURNED, text("What?")]), user("And?"), answer], "boxes": frame}


RECORDS = [
    asked(CLIP),
    asked(TIMED),
    asked(NUMBERED, chat_template_kwargs={"add_vision_id": True}),
    {
        "messages": [
            user("Look."),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": [TURNED, text("seen")]},
            *(assistant("A cat."), assistant("Look."), system("Be brief."), system("Be brief.")),
            *(user("And?"), assistant("<bbox><point>"), user("What?")),  # the last is left out
        ],
        "objects": {"bbox": [[10, 20, 50, 150]], "points": [[90, 100]]},
    },
    *map(placed, PLACES),
]
SHADES = [[40, 96, 152, 208], [0, 50, 100, 150], [0, 50, 100, 150]]
"""Of the frames that the videos' samples have: frame ``i`` of the file is of shade 4 i."""

# --- By hand ------------------------------------------------------------------------------------------------

START, STOP = "<|im_start|>", "<|im_end|> Ċ"
USER = f"{START} system Ċ You Ġare Ġa Ġhelpful Ġassistant . {STOP} {START} user Ċ"  # to 13
BEGIN, END = "<|vision_start|>", "<|vision_end|>"


def talk(before: str, *media: Run, at: int) -> list[Run]:
    """A video and its answer; what follows the video begins at ``at``."""
    answer = f"{END} What ? {STOP} {START} assistant Ċ It Ġgets Ġbrighter . {STOP}"
    return [(0, f"{USER} {before} {BEGIN}".split()), *media, (at, answer.split())]


CALLED = '<tool _call >Ċ {" name ": Ġ" look ", Ġ" arguments ": Ġ{" zoom ": Ġ 0 . 1 0 }}Ċ </ tool _call >'
CALLED += " <|im_end|>"


def trace(rows: int, answer: str) -> list[Run]:
    """The call and what follows; its image has so many rows of two."""
    before = f"{USER} Look . {STOP} {START} assistant Ċ {CALLED} Ċ {START} user Ċ <tool _response >Ċ {BEGIN}"
    after = f"{END} seen Ċ </ tool _response > {STOP} {START} assistant Ċ A Ġcat . {STOP}"
    after += f" {START} assistant Ċ Look . {STOP}" + f" {START} system Ċ Be Ġbrief . {STOP}" * 2
    after += f" {START} user Ċ And ? {STOP} {START} assistant Ċ {answer} {STOP}"
    return [(0, before.split()), Unit(55, rows, 2, "<|image_pad|>"), (55 + rows, after.split())]


def turns_with_a_box(rows: int, answer: str) -> list[Run]:
    after = f"{END} What ? {STOP} {START} user Ċ And ? {STOP} {START} assistant Ċ {answer} {STOP}"
    return [(0, [*USER.split(), BEGIN]), Unit(15, rows, 2, "<|image_pad|>"), (15 + rows, after.split())]


# What the image's box is by all frames but that of the resized image, what it is by that one, and the point.
BOXES = {
    "": (
        "<|box_start|> ( 1 0 0 , 1 0 0 ),( 5 0 0 , 7 5 0 ) <|box_end|>",
        "<|box_start|> ( 2 5 0 , 2 5 0 ),( 5 0 0 , 5 0 0 ) <|box_end|>",  # 56 x 140 pixels
        "<|box_start|> ( 9 0 0 , 5 0 0 ) <|box_end|>",
    ),
    "positions": ("[ 6 , Ġ 1 4 , Ġ 2 8 , Ġ 1 0 5 ]", "[ 1 4 , Ġ 3 5 , Ġ 2 8 , Ġ 7 0 ]", "[ 5 0 , Ġ 7 0 ]"),
    "text": (
        "[ 1 0 0 , Ġ 1 0 0 , Ġ 5 0 0 , Ġ 7 5 0 ]",
        "[ 2 1 9 , Ġ 2 7 3 , Ġ 4 3 8 , Ġ 5 4 7 ]",  # 64 x 128 pixels: 218.75, 273.4, 437.5 and 546.9
        "[ 9 0 0 , Ġ 5 0 0 ]",
    ),
}


def at_time(position: int, digits: str) -> Run:
    return position, f"{END} < {digits} Ġseconds > {BEGIN}".split()


# By what says the time: nothing, the positions (two a second) or the text.
GOLDEN: dict[str, list[list[Run]]] = {
    "": [
        talk("", Unit(15, 1, 2), Unit(15, 1, 2, later=1), at=17),
        talk("", Unit(15, 2, 2), Unit(15, 2, 2, later=1), at=17),
        talk("Video Ġ 1 : Ġ", Unit(20, 1, 2), Unit(20, 1, 2, later=1), at=22),
    ],
    "positions": [
        talk("", Unit(15, 1, 2), Unit(15, 1, 2, later=4), at=20),  # 2 * 2.15
        talk("", Unit(15, 2, 2), Unit(15, 2, 2, later=21), at=37),  # 2 * 10.67
        talk("Video Ġ 1 : Ġ", Unit(20, 1, 2), Unit(20, 1, 2, later=3), at=24),  # 2 * 1.87
    ],
    "text": [  # The times before the two units end at 20 and 30, 21 and 32, 24 and 34.
        talk("< 0 . 7 Ġseconds >", Unit(21, 1, 2), at_time(23, "3 . 5"), Unit(31, 1, 2), at=33),
        talk("< 1 1 . 0 Ġseconds >", Unit(22, 2, 2), at_time(24, "2 3 . 0"), Unit(33, 2, 2), at=35),
        talk("Video Ġ 1 : Ġ< 0 . 2 Ġseconds >", Unit(25, 1, 2), at_time(27, "2 . 4"), Unit(35, 1, 2), at=37),
    ],
}
ANSWERS: dict[str, list[list[str]]] = {}
for key, (box, resized, point) in BOXES.items():
    rows, said = 4 if key == "text" else 5, [box, box, resized]
    GOLDEN[key] += [trace(rows, f"{box} {point}"), *(turns_with_a_box(rows, answer) for answer in said)]
    called = f"{CALLED} A Ġcat . <|im_end|> Look . <|im_end|> {box} {point}"
    said = ["It Ġgets Ġbrighter ."] * 3 + [called, *said]
    ANSWERS[key] = [f"{answer} <|im_end|>".split() for answer in said]


CHECKED = ["qwen2_5_vl", "qwen3_vl"]
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name not in CHECKED]


@pytest.mark.ranks
@pytest.mark.parametrize("family", [*CHECKED, *OTHERS])
def test_step_trains_on_what_records_say(family: str, tmp_path: Path) -> None:
    """The step has the loss of transformers on the tokens, positions and grids that are written above."""
    shades = (np.full((64, 96, 3), 4 * i, np.uint8) for i in range(60))
    write(tmp_path / "media/a.mkv", video_of(shades, "matroska", "ffv1", rate=10, pixels="bgr0"))
    for number, name in enumerate(LIST):
        Image.new("RGB", (100, 70), (50 * number,) * 3).save(tmp_path / "media" / name)
    write(tmp_path / "media/turned.jpg", encoded(100, 200, "exif"))
    path, report = converted(tmp_path, RECORDS)
    assert (report.samples, report.unfinished_turns, report.ignored) == (7, 1, {})

    hf = tiny_checkpoint(family, dtype=torch.float32, texts=WORDS, text_vocab_size=800)
    spec = read_spec(hf)
    says_time = "text" if spec.vision.video_timestamps else "positions" if family == "qwen2_5_vl" else ""
    data = DataConfig(path=str(path), seq_len=1024, num_workers=0, chat_template=TOOLS_TEMPLATE)
    [row] = open_loader(data, hf, epochs=1)
    encoder = open_encoder(data, spec, hf)
    tokenizer, samples = encoder.chat_encoder.tokenizer, []
    golden, answers = GOLDEN[says_time], ANSWERS[says_time]
    for number, (runs, raw) in enumerate(zip(golden, raw_samples(encoder, path), strict=True)):
        tokens, positions = written(runs)
        place = row.sample_keys.index(f"{number:09d}")
        part = slice(*row.cu_seqlens[place : place + 2].tolist())
        assert tokenizer.convert_ids_to_tokens(row.tokens[part]) == tokens
        assert torch.equal(row.position_ids[:, part], positions)
        mask = row.loss_mask[part].roll(1).bool()  # of the tokens, not of those before them
        assert [token for token, wanted in zip(tokens, mask, strict=True) if wanted] == answers[number]
        (medium,) = encoder.postencode_sample(raw).media_items
        if number < len(SHADES):
            assert medium.planes.float().mean((1, 2)).tolist() == SHADES[number]
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(tokens))
        samples.append(TokenizedSample(ids, mask, [medium]))

    options = f"--data.path {path} --data.seq_len 1024 --data.chat_template {TOOLS_TEMPLATE}"
    options += " --log.samples true --global_batch_size 1 --optimizer.warmup_steps 0 --data.num_workers 0"
    trained(prepare(tmp_path / "prepared", hf, 4), tmp_path / "run", *options.split(), ranks=1, steps=1)
    [step], [rows] = metrics(tmp_path / "run"), metrics(tmp_path / "run", "samples.jsonl")
    seen = [samples[int(key)] for key in rows["rows"][0]]  # of several passes
    assert {*rows["rows"][0]} == {*row.sample_keys}
    assert step["loss_tokens"] == sum(len(answers[int(key)]) for key in rows["rows"][0])
    expected = backward_mean_loss(load_hf_for_training(hf), seen, spec, read_pixel_norm(hf))
    assert step["loss"] == pytest.approx(expected, rel=1e-5)
