"""Boxes and points: golden values by hand, and boxes drawn on images as each family sees them."""

import base64
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_tools.convert import DataReport
from data_tools.formats import RecordError, read_conversation
from data_tools.sample_sizes import index_datasets
from data_tools.sample_sources import SampleReader, open_encoder, read_sources
from megatron_vl.config import DataConfig, EvalConfig, TrainConfig
from megatron_vl.data.row_encoder import RawSample, RowEncoder
from megatron_vl.data.sample.boxes import SampleObjects, boxes_in_text, compare_boxes
from megatron_vl.data.sample.grids import image_grid
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.thinking import GeneratedAnswer, split_thinking
from megatron_vl.data.source.dataset_description import METADATA_DIR
from megatron_vl.data.source.sample_sizes import SampleSizeCounter, compute_tokenization_id, open_stored_sizes
from megatron_vl.spec.families import FAMILIES, read_spec
from tests.tiny import tiny_checkpoint
from toolkit.cli import main
from toolkit.common.tiny_checkpoint import DEFAULT_TEXTS, TinySizes, write_small_files
from toolkit.data.sample_view import planes_to_pixels
from toolkit.generate.answers import Answerer, answer_dataset

from .datasets import converted
from .helpers import assistant, spec_of, text, user
from .media import write
from .test_chat import released_tokenizer_folder

SIZE = {"height": 200, "width": 400}
"""Of the stored image in the golden values. Qwen2.5-VL resizes it to 392 x 196, multiples of 28."""


def written(family: str, objects: Sequence[dict[str, Any]], answer: Any, **turn: Any) -> Any:
    spec = spec_of(family)
    settings = PixelSettings(spec.vision.patch_size)
    grid = image_grid(200, 400, settings)
    record = {"messages": [assistant(answer, **turn)], "media": [SIZE], "objects": list(objects)}
    return SampleObjects(record, [grid], spec.vision).written_messages()[0]


def box(*numbers: float, frame: str = "pixels", medium: int = 0) -> dict[str, Any]:
    return {"box": list(numbers), "medium": medium, "frame": frame}


thousandths = partial(box, frame="thousandths")


JSON_ANSWER = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}, {"point_2d": <point>}]'
OBJECTS = [box(10, 20, 100, 200), {"ref": 'a "big" cat'}, box(390, 5)]
GOLDEN = {
    # 10 / 400, 20 / 200, 100 / 400 and 200 / 200 in thousandths.
    "qwen2_vl": ("[25, 100, 250, 1000]", "[975, 25]"),
    # 10 * 392 / 400 = 9.8, 20 * 196 / 200 = 19.6, 98, and 196, of which 195 is the last pixel; 382.2 and 4.9.
    "qwen2_5_vl": ("[10, 20, 98, 195]", "[382, 5]"),
    "qwen3_vl": ("[25, 100, 250, 1000]", "[975, 25]"),
    "qwen3_5": ("[25, 100, 250, 1000]", "[975, 25]"),
}


@pytest.mark.parametrize("family", GOLDEN)
def test_boxes_in_json_and_in_prose_have_the_form_of_the_family(family: str) -> None:
    first, point = GOLDEN[family]
    expected = f'[{{"bbox_2d": {first}, "label": "a \\"big\\" cat"}}, {{"point_2d": {point}}}]'
    assert written(family, OBJECTS, JSON_ANSWER)["content"] == expected

    prose = "The <ref-object>: <bbox>, click(start_box='<bbox>')"
    objects = [{"ref": "cat"}, box(10, 20, 100, 200), box(390, 5)]
    expected = f"The cat: {first}, click(start_box='{point}')"
    if family == "qwen2_vl":
        expected = "The <|object_ref_start|>cat<|object_ref_end|>: "
        expected += "<|box_start|>(25,100),(250,1000)<|box_end|>, "
        expected += "click(start_box='<|box_start|>(975,25)<|box_end|>')"
    assert written(family, objects, [text(prose)])["content"] == [text(expected)]


def test_boxes_of_calls_and_of_reasoning_are_written_in_the_order_of_the_template() -> None:
    function = {"name": "click", "arguments": {"at": "<point>", "why": "<bbox>!"}}
    call = {"type": "function", "function": function}
    objects = [box(40, 20), box(0, 0, 400, 200), box(390, 5), box(80, 40)]
    turn = written("qwen3_vl", objects, "<bbox>", reasoning_content="<point>", tool_calls=[call])
    assert (turn["reasoning_content"], turn["content"]) == ("[100, 100]", "[0, 0, 1000, 1000]")
    assert turn["tool_calls"][0]["function"]["arguments"] == {"at": [975, 25], "why": "[200, 200]!"}


# --- Records ------------------------------------------------------------------------------------------------


def record_of(answer: str, question: str = "<image>Where?", **fields: Any) -> dict[str, Any]:
    return {"messages": [user(question), assistant(answer)], "images": ["a.png"], **fields}


def test_objects_are_stored_in_the_order_of_their_markers() -> None:
    objects = {"ref": ["cat", "dog"], "bbox": [[1, 2, 3, 4], [5, 6]], "points": [[0.5, 0.25]]}
    objects |= {"bbox_type": "norm1", "image_id": [1, 0, 1]}
    record = record_of("<bbox> <ref-object><point>", "<image><image><ref-object><bbox>", objects=objects)
    record["images"] = ["a.png", "b.png"]
    for written_objects in (objects, json.dumps(objects)):  # text, as tables hold it
        found = read_conversation(record | {"objects": written_objects}).objects
        boxes = thousandths(1000, 2000, 3000, 4000, medium=1), thousandths(5000, 6000)
        assert found == [{"ref": "cat"}, *boxes, {"ref": "dog"}, thousandths(500, 250, medium=1)]


def test_written_boxes_become_objects() -> None:
    answer = '{"bbox_2d": [1, 2.5, 3, 4]} <|box_start|>(1,2),(3,4)<|box_end|> {"point_2d":[7,8]}'
    question = '<image>Answer with {"bbox_2d": [x1, y1, x2, y2]}'
    record = record_of(answer, question, boxes="resized")
    arguments = {"bbox_2d": [5, 6, 7, 8], "points": [1, 2]}
    record["messages"][1]["tool_calls"] = [{"function": {"name": "zoom", "arguments": arguments}}]
    conversation = read_conversation(record)
    numbers = [[1, 2.5, 3, 4], [1, 2, 3, 4], [7, 8], [5, 6, 7, 8]]
    assert conversation.objects == [box(*each, frame="resized") for each in numbers]
    assert conversation.messages[0]["content"][1]["text"] == question.removeprefix("<image>")
    assert conversation.messages[1]["content"] == '{"bbox_2d": <bbox>} <bbox> {"point_2d":<bbox>}'
    call = conversation.messages[1]["tool_calls"][0]["function"]
    assert call["arguments"] == {"bbox_2d": "<bbox>", "points": [1, 2]}
    assert conversation.unsaid_boxes == 0 and not conversation.ignored_keys


def test_objects_stay_with_their_turns() -> None:
    """Results are put into the order of their calls, and turns after the last answer are left out."""
    calls = [{"id": name, "function": {"name": "look", "arguments": {}}} for name in "ab"]
    turns = [
        *(user("<image>Where?"), assistant("", tool_calls=calls)),
        *({"role": "tool", "tool_call_id": name, "content": f"{name} at <bbox>"} for name in "ba"),
        *(assistant("At <point>."), user("<image>And <ref-object> at <bbox>?")),
    ]
    objects = {"ref": ["dog"], "bbox": [[2, 2, 4, 4], [1, 1, 3, 3], [0, 0, 9, 9]], "points": [[5, 6]]}
    objects["image_id"] = [0, 0, 1, 0]
    record = {"messages": turns, "images": ["a.png", "b.png"], "objects": objects}
    read = read_conversation(record)
    assert [turn["content"] for turn in read.messages[2:]] == ["a at <bbox>", "b at <bbox>", "At <point>."]
    assert read.objects == [box(1, 1, 3, 3), box(2, 2, 4, 4), box(5, 6)]
    assert (read.media_references, read.unfinished_turns) == ([("image", "a.png")], 1)
    with pytest.raises(RecordError, match="on an image of a turn that is left out"):
        read_conversation(record | {"objects": objects | {"image_id": [1, 0, 1, 0]}})

    written = record_of('{"bbox_2d": [1, 2, 3, 4]}', boxes="pixels")
    written["images"].append("b.png")
    written["messages"].append(user("<image>And here?"))
    assert read_conversation(written).objects == [box(1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("answer", "fields", "unsaid"),
    [
        ("<|box_start|>(1,2),(3,4)<|box_end|> and <|box_start|>(1,2),(3,4)<|box_end|>", {}, 1),
        ("<bbox>", {"objects": {"ref": [], "bbox": []}}, 1),
        ("[1, 2, 3, 4]", {}, 0),
        ('"bbox_2d" means box', {}, 0),
        ('<bbox> {"point_2d": [1, 2]}', {"objects": {"bbox": [[1, 2, 3, 4]]}}, 1),
        ('{"bbox_2d": [1, <point>]}', {"objects": {"points": [[1, 2]]}}, 1),
        ("none here", {"boxes": "pixels"}, 0),
    ],
)
def test_answers_with_boxes_of_an_unsaid_frame_are_counted(answer, fields, unsaid) -> None:
    read = read_conversation(record_of(answer, **fields))
    assert (read.unsaid_boxes, read.messages[1]["content"]) == (unsaid, answer)


def test_boxes_of_documents_become_objects() -> None:
    caption = {"image": "a.png", "caption": "A <ref-object> at <bbox>."}
    objects = {"ref": ["cat"], "bbox": [[0.1, 0.2, 0.5, 1]], "bbox_type": "norm1"}
    read = read_conversation(caption | {"objects": objects})
    assert read.objects == [{"ref": "cat"}, thousandths(100, 200, 500, 1000)]
    assert read.document[1]["text"] == caption["caption"] and not read.ignored_keys
    answer = read_conversation(caption | {"objects": objects}, caption_prompt="?")
    assert answer.objects == read.objects and not answer.document

    places = {"texts": [None, "<bbox>", None, "<point>"], "images": ["a.png", None, "b.png", None]}
    objects = {"bbox": [[1, 2, 3, 4]], "points": [[5, 6]], "image_id": [1, 0]}
    found = read_conversation(places | {"objects": objects}).objects
    assert [item["medium"] for item in found] == [1, 0]

    written = {"image": "a.png", "text": '{"bbox_2d": [1, 2, 3, 4]}'}
    assert read_conversation(written).unsaid_boxes == 1
    read = read_conversation(written | {"boxes": "pixels"})
    assert (read.objects, read.document[1]["text"]) == ([box(1, 2, 3, 4)], '{"bbox_2d": <bbox>}')
    # Without an image, or without a marker, they are no boxes of the text.
    assert read_conversation({"text": written["text"], "boxes": [1]}).ignored_keys == [("records", "boxes")]
    read = read_conversation({"image": "a.png", "text": "a cat", "objects": ONE_BOX})
    assert (read.objects, read.ignored_keys) == ([], [("records", "objects")])


def test_written_boxes_on_several_images_have_one_size_or_a_number(tmp_path: Path) -> None:
    """Thousandths need neither, except in a family that counts pixels."""
    kinds = "upright", "transparent", "wide"
    upright, transparent, wide = (write_image(tmp_path / "media", kind) for kind in kinds)
    fields: list[dict[str, Any]] = [
        {"boxes": "pixels", "images": [upright, transparent]},
        {"boxes": "pixels", "images": [upright, wide], "objects": {"image_id": [1, 0]}},
        *({"boxes": frame, "images": [upright, wide]} for frame in ("thousandths", "pixels", "resized")),
    ]
    path, report = converted(tmp_path, [record_of(BOTH, TWO, **each) for each in fields])
    assert report.refused["in.json"] == {"bad objects": 2}
    assert "number the image of each in objects.image_id" in (path / "quarantine.jsonl").read_text()
    # 36 of 360 pixels are 100 thousandths, of 480 they are 75. Qwen2.5-VL has 364 x 308 and 476 x 252.
    expected = {
        "qwen3_vl": [
            *("[100, 200, 250, 500] [100, 200]", "[75, 250, 188, 625] [100, 200]"),
            "[36, 60, 90, 150] [36, 60]",
        ],
        "qwen2_5_vl": ["[36, 62, 91, 154] [36, 62]", "[36, 63, 89, 158] [36, 62]", None],
    }
    data = DataConfig(path=str(path))
    for family, answers in expected.items():
        hf = tiny_files(family, tmp_path / family)
        index_datasets(data, read_spec(hf), hf)
        encoder, samples, counts = encoded_and_counted(data, hf, 3)
        for sample, count, boxes in zip(samples, counts, answers, strict=True):
            assert (sample.refused is None) == (boxes is not None) == (count[0] > 0)
            if boxes:
                answer = encoder.chat_encoder.tokenizer.decode(sample.token_ids[sample.loss_mask])
                assert " ".join(re.findall(r"\[[\d, ]+\]", answer)) == boxes
                assert sample.token_and_patch_count == count


ESCAPED = r'Result: "{\"bbox_2d\": [1, 2,\n 3, 4], \"at\": \"{\\\"point_2d\\\": [5, 6]}\"}"'


def test_boxes_in_json_within_json_are_converted_or_counted() -> None:
    arguments = {"result": '{"bbox_2d": [1, 2, 3, 4]}', "bbox_2d": "[5, 6, 7, 8]"}
    call = {"function": {"name": "crop", "arguments": arguments}}
    record = record_of("")
    record["messages"][1] |= {"tool_calls": [call]}
    assert [read_conversation(each).unsaid_boxes for each in (record_of(ESCAPED), record)] == [1, 1]
    read = read_conversation(record_of(ESCAPED, boxes="pixels"))
    assert read.objects == [box(1, 2, 3, 4), box(5, 6)]
    changed = ESCAPED.replace(r"[1, 2,\n 3, 4]", "<bbox>").replace("[5, 6]", "<bbox>")
    assert read.messages[1]["content"] == changed
    written_text = changed.replace("<bbox>", "[2, 10, 8, 20]", 1).replace("<bbox>", "[12, 30]")
    assert written("qwen2_vl", read.objects, changed)["content"] == written_text
    with pytest.raises(RecordError, match="is not .x, y. or"):
        read_conversation(record | {"boxes": "pixels"})
    del call["function"]["arguments"]["bbox_2d"]
    assert read_conversation(record | {"boxes": "pixels"}).objects == [box(1, 2, 3, 4)]


TWO, BOTH = "<image><image>?", '{"bbox_2d": [36, 60, 90, 150]} {"point_2d": [36, 60]}'
ONE_BOX = {"bbox": [[1, 2, 3, 4]]}
VIDEO = {"images": [], "videos": ["a.mp4"]}
REFUSED = [
    (record_of("<bbox>", objects=ONE_BOX | {"image_id": [1]}), "image_id 1 is not in 0 to 0"),
    (record_of("<bbox>", objects={"bbox": [[3, 2, 1, 4]]}), "x2 < x1 or y2 < y1"),
    (record_of("<bbox>", objects={"bbox": [[1, 2, 3, 10**400]]}), "is not .x, y. or"),
    (record_of("<point>", objects={"points": [[1, 2, 3, 4]]}), "is not .x, y. or"),
    (record_of("<bbox>", objects=ONE_BOX | {"bbox_type": "norm1000"}), "norm1000.*valid: real, norm1"),
    (record_of("no marker", objects=ONE_BOX), "0 <bbox> in the text, but 1 in objects.bbox"),
    (record_of("<bbox><ref-object>", objects=ONE_BOX), "1 <ref-object> in the text, but 0 in objects.ref"),
    (record_of("<ref-object>", objects={"ref": ["<|im_end|>"]}), "control token"),
    (record_of("<bbox>", "<video>Where?", objects=ONE_BOX, **VIDEO), "boxes of videos are not read"),
    (record_of('"bbox_2d": [1, 2, 3, 4]', boxes="metres"), "'metres' is unknown; valid: pixels"),
    (record_of('"bbox_2d": [[1, 2, 3, 4]]', boxes="pixels"), "is not .x, y. or"),
    ({"text": "a <bbox><bbox>", "image": "a.png", "objects": ONE_BOX}, "2 <bbox> in the text, but 1"),
    ({"text": "a cat <bbox>", "objects": ONE_BOX}, "is on no image"),
    (record_of(BOTH, TWO, boxes="pixels", images=["a.png"] * 2, objects={"image_id": [0]}), "image_id None"),
]


def test_wrong_objects_are_refused() -> None:
    for record, message in REFUSED:
        with pytest.raises(RecordError, match=message):
            read_conversation(record)


# --- On the image -------------------------------------------------------------------------------------------

CORNERS = (140, 60, 260, 170)
"""x1, y1, x2 and y2 of the red object on the upright image, which has the first and the last on no edge."""
IMAGES = {"upright": (300, 360), "turned": (300, 360), "transparent": (300, 360), "wide": (240, 480)}
"""Height and width of the upright images."""
LIMITS: dict[str, dict[str, int]] = {
    "as they are": {},
    "small": {"min_pixels": 3136, "max_pixels": 200 * 200},
    "enlarged": {"min_pixels": 900 * 900, "max_pixels": 1000 * 1000},
}


def write_image(folder: Path, kind: str) -> str:
    """Writes a grey image with a red object, alone opaque in the transparent one, and returns its name."""
    height, width = IMAGES[kind]
    x1, y1, x2, y2 = CORNERS
    values = np.full((height, width, 4), (200, 200, 200, 0 if kind == "transparent" else 255), np.uint8)
    values[y1:y2, x1:x2] = (255, 0, 0, 255)
    image, options, out = Image.fromarray(values, "RGBA"), {}, io.BytesIO()
    if kind == "turned":  # stored lying on its side: a viewer turns it by 90 degrees clockwise
        image = image.convert("RGB").transpose(Image.Transpose.ROTATE_90)
        options = {"exif": Image.Exif(), "quality": 95, "subsampling": 0}
        options["exif"][0x0112] = 6
    elif kind != "transparent":
        image = image.convert("RGB")
    image.save(out, "JPEG" if kind == "turned" else "PNG", **options)
    return write(folder / f"{kind}.{'jpg' if kind == 'turned' else 'png'}", out.getvalue()).name


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """Each image with its box in four forms of one record each: objects, shares, written pixels, and JSON."""
    folder = tmp_path_factory.mktemp("boxes")
    records = []
    for kind, (height, width) in IMAGES.items():
        name = write_image(folder / "media", kind)
        shares = [corner / side for corner, side in zip(CORNERS, (width, height) * 2, strict=True)]
        label = '{"bbox_2d": <bbox>, "label": "<ref-object>"}'
        fields = [
            ("It is <bbox>.", {"objects": {"bbox": [CORNERS]}}),
            (f'{{"bbox_2d": {list(CORNERS)}}}', {"boxes": "pixels"}),
            (f'{{"bbox_2d": {[1000 * share for share in shares]}}}', {"boxes": "thousandths"}),
        ]
        records += [record_of(answer, **field, images=[name]) for answer, field in fields]
        objects = {"bbox": [shares], "ref": ["red"], "bbox_type": "norm1"}
        records.append({"image": name, "caption": f"[{label}]", "objects": objects})
    path, report = converted(folder, records)
    assert report.samples == 4 * len(IMAGES) and not report.unsaid_boxes
    return path


def tiny_files(family: str, folder: Path) -> Path:
    """The files of a tiny checkpoint without its tensors."""
    folder.mkdir(exist_ok=True)
    write_small_files(folder, family, DEFAULT_TEXTS, TinySizes())
    return folder


def raw_samples(encoder: RowEncoder, path: Path) -> list[RawSample]:
    (source,) = read_sources(str(path), "train")
    reader = SampleReader(source)
    samples = [reader.read_sample(i, with_media=True) for i in range(len(source))]
    return [encoder.preencode_sample(sample) for sample in samples]


def with_image(folder: Path, kind: str, records: list[dict[str, Any]]) -> tuple[Path, DataReport]:
    name = write_image(folder / "media", kind)
    return converted(folder, [record | {"images": [name]} for record in records])


def encoded_and_counted(
    data: DataConfig, hf: Path, numbers: int
) -> tuple[RowEncoder, list[RawSample], list[tuple[int, int]]]:
    """The samples as a run encodes them, and their tokens and patches as it counts them from the index."""
    path, spec = Path(data.path), read_spec(hf)
    encoder = open_encoder(data, spec, hf)
    sizes = open_stored_sizes(path / METADATA_DIR, compute_tokenization_id(hf, spec, data))
    counter = SampleSizeCounter(encoder.chat_encoder, encoder.pixel_settings)
    counts = np.stack(counter.count_samples(sizes, np.arange(numbers)), axis=1)
    cuts = [counter.cut_sample(sizes, i, n - 5, 0) for i, n in enumerate(counts[:, 0]) if n]
    assert not any(cuts), "has boxes"
    return encoder, raw_samples(encoder, path), list(map(tuple, counts.tolist()))


@pytest.mark.parametrize("family", GOLDEN)
def test_boxes_cover_the_object_as_the_model_sees_it(family: str, drawn: Path, tmp_path: Path) -> None:
    """Indexed with one run's limits and read with three others': each box lies on the object to a pixel."""
    hf = tiny_files(family, tmp_path)
    spec = read_spec(hf)
    (result,) = index_datasets(DataConfig(path=str(drawn)), spec, hf)
    assert (result.samples, result.media, result.unusable) == (16, 16, 0)
    texts = {}
    for name, limits in LIMITS.items():
        data = DataConfig(path=str(drawn), seq_len=8192, **limits)
        encoder, samples, counts = encoded_and_counted(data, hf, 4 * len(IMAGES))
        assert [sample.token_and_patch_count for sample in samples] == counts
        for sample in samples:
            (item,) = encoder.postencode_sample(sample).media_items
            pixels = planes_to_pixels(item.planes, item.grid_thw, encoder.pixel_settings)[0].int()
            rows, columns = torch.nonzero(pixels[0] - pixels[1] > 128, as_tuple=True)
            seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            (found,) = sample.objects.seen_boxes(0)
            assert found == pytest.approx([int(edge) for edge in seen], abs=1.01), sample.source

            # The text that is trained on has these numbers.
            answer = encoder.chat_encoder.tokenizer.decode(sample.token_ids[sample.loss_mask])
            (numbers,) = boxes_in_text(answer, spec.vision)
            height, width = pixels.shape[1:]
            new_sizes = (width, height) if family == "qwen2_5_vl" else (1000, 1000)
            scaled = [n * (width, height)[i % 2] / new_sizes[i % 2] for i, n in enumerate(numbers)]
            assert scaled == pytest.approx(found)
        texts[name] = tuple(counts)
    assert len({*texts.values()}) == 3


def test_boxes_of_the_resized_image_follow_the_limits_of_each_run(tmp_path: Path) -> None:
    """Thousandths of pixels that a record counts on the resized image have other digits, too. A box that is
    not on the image under a run's limits is left out by that run alone."""
    answers = ['{"bbox_2d": [7, 8, 30, 40]}', '{"bbox_2d": [7, 8, 900, 40]}']
    path, _ = with_image(tmp_path, "upright", [record_of(each, boxes="resized") for each in answers])
    hf = tiny_files("qwen3_vl", tmp_path / "hf")
    index_datasets(DataConfig(path=str(path)), read_spec(hf), hf)
    for limits, outside in (("small", 1), ("enlarged", 0)):
        data = DataConfig(path=str(path), **LIMITS[limits])
        _, samples, counts = encoded_and_counted(data, hf, 2)
        refusals = [sample.refused[0] for sample in samples if sample.refused]
        assert refusals == outside * ["box outside the image"] and not samples[0].refused
        for sample, count in zip(samples, counts, strict=True):
            assert sample.refused or sample.token_and_patch_count == count


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("Qwen2.5-VL-3B-Instruct", marks=pytest.mark.slow)]
)
def test_boxes_on_images_with_own_limits_stay_in_one_row(family: str, tmp_path: Path) -> None:
    """Their digits follow the image's own size, also under the released vocabulary. A conversation with boxes
    is not cut, because a part might lack the image."""
    records = []
    for own in ({"max_pixels": 9000}, {"resized_height": 1500, "resized_width": 1800}, {}):
        turns = [user([{"type": "image", **own}]), assistant("<bbox>"), user("?"), assistant("<bbox>")]
        records.append({"messages": turns, "objects": {"bbox": [[9, 6, 345, 290]] * 2}})
    path, _ = with_image(tmp_path, "upright", records)
    if family in FAMILIES:
        hf = tiny_files(family, tmp_path / "hf")
    else:
        hf = shutil.copytree(released_tokenizer_folder(), tmp_path / "hf")
        shutil.copy(f"tests/hf_configs/{family}.json", hf / "config.json")
    spec = read_spec(hf)
    index_datasets(DataConfig(path=str(path), **LIMITS["small"]), spec, hf)  # which contradict the second
    for name, limits in LIMITS.items():
        data = DataConfig(path=str(path), seq_len=4096, **limits)
        _, samples, counts = encoded_and_counted(data, hf, 3)
        assert [sample.token_and_patch_count for sample in samples] == counts
        assert [bool(sample.refused) for sample in samples] == [False, name != "as they are", False]
        short = open_encoder(dataclasses.replace(data, seq_len=counts[0][0] - 5), spec, hf)
        assert raw_samples(short, path)[0].refused[0] == "longer than seq_len"


def test_boxes_beyond_the_upright_image_are_refused(tmp_path: Path, capsys) -> None:
    """The turned image is stored with 300 x 360 pixels and has 360 x 300 upright ones; half a pixel beyond is
    a rounding. The last answer does not say its frame of reference."""
    outside = [
        record_of("<bbox>", objects={"bbox": [[1, 2, 361, 4]]}),
        record_of("<point>", objects={"points": [[3, 301]]}),
        record_of("<bbox>", objects={"bbox": [[0, 0, 1.001, 1]], "bbox_type": "norm1"}),
        record_of('"bbox_2d": [1, 2, 3, 1001]', boxes="thousandths"),
        record_of('"bbox_2d": [1, 2, 3, 301]', boxes="pixels"),
    ]
    inside = record_of("<bbox>", objects={"bbox": [[-0.5, 0, 360.5, 300]]})
    unsaid = record_of('{"bbox_2d": [1, 2, 3, 400]}')
    name = write_image(tmp_path, "turned")
    records = [record | {"images": [name]} for record in [*outside, inside, unsaid]]
    (tmp_path / "in.json").write_text(json.dumps(records))
    out = tmp_path / "out"
    assert main(["data", "convert", "--input", str(tmp_path / "in.json"), "--out", str(out)]) == 3
    assert "  1 text with boxes whose frame of reference is not said" in capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert (report["samples"], report["unsaid_boxes"]) == (2, 1)
    assert report["refused"]["in.json"] == {"box outside the image": 5}
    assert (out / "quarantine.jsonl").read_text().count("is beyond the image, which is") == 5


def test_page_draws_the_boxes_that_the_sample_reads(drawn: Path, tmp_path: Path, capsys) -> None:
    hf, page = tiny_files("qwen2_vl", tmp_path / "hf"), tmp_path / "page.html"
    words = f"data show --data.path {drawn} --model.hf {hf} --sample 000000004 --json --html {page}"
    assert main(words.split()) == 0
    (medium,) = json.loads(capsys.readouterr().out)["media"]
    height, width = medium["resized"]
    x1, y1, x2, y2 = (n * (width / 360, height / 300)[i % 2] for i, n in enumerate(CORNERS))
    assert medium["boxes"] == [pytest.approx([x1, y1, x2, y2], abs=1)]
    source = re.search('src="data:image/jpeg;base64,([^"]+)"', page.read_text())
    image = Image.open(io.BytesIO(base64.b64decode(source[1]))).convert("RGB")
    blue = np.asarray(image, int)
    blue = (blue[..., 2] - blue[..., 0] > 60).nonzero()
    scale = image.width / width
    drawn_edges = [blue[1].min(), blue[0].min(), blue[1].max(), blue[0].max()]
    # JPEG smears colours over some pixels.
    assert drawn_edges == pytest.approx([edge * scale for edge in (x1, y1, x2, y2)], abs=5)


# --- Answers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_to_a_split_with_boxes_have_an_iou(drawn: Path, tmp_path: Path) -> None:
    hf, out = tiny_checkpoint("qwen2_vl"), tmp_path / "answers.jsonl"
    config = TrainConfig(data=DataConfig(path=str(drawn)), eval=EvalConfig(split="train", answers=3))
    line = answer_dataset(RepeatsReference(hf, config.data, (4, 4)), config, out)
    assert line == "3 of 3 answers (100.0%) equal their reference; mean IoU of 3 boxes 1.000"
    answers = [json.loads(answer) for answer in out.read_text().splitlines()]
    assert [answer["iou"] for answer in answers] == 3 * [[1.0]]
    assert answers[0]["reference"] == "It is (389,200),(722,567)."


class RepeatsReference(Answerer):
    """Answers with the text that it decoded last, which is the reference."""

    def decode(self, token_ids: Any) -> str:
        self.decoded = super().decode(token_ids)
        return self.decoded

    def answer(self, prompt: Any) -> tuple[GeneratedAnswer, str]:
        return split_thinking(self.decoded, is_block_opened=False), ""


def test_boxes_in_text_are_those_of_the_family() -> None:
    text = 'a [1, 2,3.5, 4] "bbox_2d": [5, 6, 7, 8], [1, 2], [1, 2, 3, 4, 5] (1,2),(3,4) (5,6)'
    lists = [[1, 2, 3.5, 4], [5, 6, 7, 8]]
    assert boxes_in_text(text, spec_of("qwen2_5_vl").vision) == lists
    assert boxes_in_text(text, spec_of("qwen2_vl").vision) == [*lists, [1, 2, 3, 4]]


def test_iou_is_that_of_the_best_partners() -> None:
    for answer, reference, ious in (
        ([], [[5, 0, 15, 10]], [0]),
        # The first has a third of each, the second is the second reference: each is used once.
        ([[5, 0, 15, 10], [10, 0, 20, 10]], [[0, 0, 10, 10], [10, 0, 20, 10]], [1 / 3, 1]),
        ([[0, 0, 10, 10]], [[0, 0, 10, 10], [0, 0, 10, 10]], [0, 1]),
        ([[10, 10, 0, 0]], [[0, 0, 10, 10]], [0]),
        ([[3, 3, 3, 3]], [[3, 3, 3, 3]], [0]),
    ):
        assert sorted(compare_boxes(answer, reference)) == pytest.approx(sorted(ious))
