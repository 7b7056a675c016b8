"""Records of questions and answers: CSV, columns, TRL, media without markers and in several folders."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from data_tools.convert import ConversionOptions, check_inputs, convert_dataset
from data_tools.formats import RecordError, read_conversation
from data_tools.input_files import InputFile, parse_columns
from data_tools.media import MediaRoots, is_embedded, read_media
from data_tools.records import ConvertError, read_records
from tests.data.media import encoded


def test_csv_rows_are_records_with_quotes_newlines_and_missing_fields(tmp_path: Path):
    table = tmp_path / "q.csv"
    table.write_text(
        '\ufeffquestion,answer,image\n"Say ""hi""\nnow",Hi,a.png\n\nWhat?,That,\n', encoding="utf-8"
    )
    assert list(read_records(table)) == [
        (1, {"question": 'Say "hi"\nnow', "answer": "Hi", "image": "a.png"}),
        (2, {"question": "What?", "answer": "That"}),
    ]
    tabs = tmp_path / "q.tsv"
    tabs.write_text("query\tresponse\na, b\tc\n")
    assert list(read_records(tabs)) == [(1, {"query": "a, b", "response": "c"})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2,3\n", "line 2: 3 fields instead of 2"),
        ("a,a\n1,2\n", "must name each column once"),
        ('a,b\n1,"2\n', "line 2: unexpected end of data"),
        ("a,b\n1,\xe9\n", "line 2: it is not UTF-8; save the file as UTF-8"),
        ("a,b\n" + "1,2\n" * 9000 + "1,\xe9\n", "line 9002: it is not UTF-8"),
        ("a,\xe9\n1,2\n", "it is not UTF-8; save the file as UTF-8"),
        ("a;b\n1;2\n", "has semicolons and no comma; write the file with commas"),
    ],
)
def test_csv_that_is_broken_is_refused(tmp_path: Path, text: str, message: str):
    table = tmp_path / "q.csv"
    table.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConvertError, match=message):
        list(read_records(table))


def test_columns_name_question_answer_and_image(tmp_path: Path):
    for wrong in ("q=user", "q=foo,a=assistant", "q=user,p=user,a=assistant", "q"):
        with pytest.raises(ConvertError, match="--columns"):
            parse_columns(wrong)

    table = tmp_path / "q.csv"
    table.write_text("q,a,pic,output\nWhat?,A dot,dot.png,never read\n")
    (tmp_path / "dot.png").write_bytes(encoded(64, 64))
    columns = {"columns": "q=user,a=assistant,pic=image", "missing_markers": "first"}
    report = convert_dataset([table], ConversionOptions(tmp_path, tmp_path / "out", **columns))
    assert (report.samples, report.images, report.records) == (1, 1, 1)
    with pytest.raises(ConvertError, match="--columns"):
        convert_dataset([table], ConversionOptions((), tmp_path / "other", columns="q=nothing"))


def test_trl_trains_on_the_completion_alone():
    first, second = ({"role": "user", "content": text} for text in ("A?", "B?"))
    answers = [{"role": "assistant", "content": text} for text in "ab"]
    record = {"prompt": [first, answers[0], second], "completion": answers[1:]}
    messages = read_conversation(record).messages
    assert [message.get("loss_weight") for message in messages] == [None, 0.0, None, None]
    text = read_conversation({"prompt": "Sky is", "completion": "blue"}).messages
    assert [message["content"] for message in text] == ["Sky is", "blue"]


def test_missing_markers_are_refused_or_put_first():
    record = {"query": "What?", "response": "A dot", "images": ["a.png", "b.png"]}
    with pytest.raises(RecordError, match="--missing-markers first"):
        read_conversation(record)
    conversation = read_conversation(record, missing_markers="first")
    assert conversation.messages[0]["content"] == [
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "What?"},
    ]
    assert conversation.media_references == [("image", "a.png"), ("image", "b.png")]
    # One marker for two images is a mistake in either case.
    with pytest.raises(RecordError, match="1 <image> in the text, but 2"):
        read_conversation({**record, "query": "<image> What?"}, missing_markers="first")


def test_media_are_found_in_the_first_root_that_has_them(tmp_path: Path):
    for name, files in {"one": ("a",), "two": ("a", "b")}.items():
        for file in files:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(f"{name}/{file}")
    roots = MediaRoots((tmp_path / "one", tmp_path / "two"))
    assert [read_media(name, roots) for name in "ab"] == [b"one/a", b"two/b"]
    with pytest.raises(RecordError, match="c does not exist"):
        read_media("c", roots)
    with pytest.raises(RecordError, match="outside the media root .*two; add --media-root .*one"):
        read_media("../one/a", MediaRoots((tmp_path / "two",)))


def test_links_out_of_a_root_are_followed_only_on_request(tmp_path: Path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a").write_text("a")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "store", tmp_path / "root" / "link")
    with pytest.raises(RecordError, match="--follow-links"):
        read_media("link/a", MediaRoots((tmp_path / "root",)))
    followed = MediaRoots((tmp_path / "root",), follow_links=True)
    assert read_media("link/a", followed) == b"a"
    with pytest.raises(RecordError, match="outside the media root"):
        read_media("../store/a", followed)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_base64_is_recognised_without_data(kind: str):
    image = encoded(64, 64, kind)
    text = base64.b64encode(image).decode()
    assert is_embedded(text) and read_media(text, MediaRoots()) == image
    broken = text[:-8] + "!" * 300
    with pytest.raises(RecordError, match="not base64"):
        read_media(broken, MediaRoots())


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"question": "a", "answer": "b"}, "give --columns question=user,answer=assistant$"),
        (
            {"Problem": "a", "solution": "b", "image_path": "c"},
            "give --columns Problem=user,solution=assistant,image_path=image --missing-markers first$",
        ),
        ({"prompt": "<image>a", "answer": "b", "image": "c"}, "prompt=user,answer=assistant,image=image$"),
        ({"url": "a", "alt": "b"}, "has 'alt', 'url'; formats have messages, .* with --columns"),
        ({}, "has no field; "),
        ({"message": [{"role": "user", "content": "a"}]}, "has 'message'; did you mean 'messages'.$"),
        ({"conversation": [{"from": "human", "value": "a"}]}, "did you mean the field 'conversations'.$"),
        ({"conversation": [{"role": "user", "content": "a"}]}, "did you mean the field 'messages'.$"),
    ],
)
def test_record_without_format_names_its_fields_and_what_to_do(record: dict[str, Any], advice: str):
    with pytest.raises(RecordError, match=advice):
        read_conversation(record)


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "arrow", "json", "jsonl"])
def test_column_that_does_not_exist_is_refused_with_those_that_do(form: str, tmp_path: Path):
    """Empty fields of a CSV are absent from its records, and only some records of JSON may have an image."""
    records, other, empty = tmp_path / f"a.{form}", tmp_path / f"b.{form}", None if form == "parquet" else ""
    for path, names in ((records, ("question", "answer", "image")), (other, ("question", "answer"))):
        rows = [dict.fromkeys(names, "b") | {name: empty for name in names[2:]}] * 2
        if form in ("csv", "tsv"):
            lines = [names, *(row.values() for row in rows)]
            path.write_text("".join(f"{('\t' if form == 'tsv' else ',').join(line)}\n" for line in lines))
        elif form == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif form == "arrow":
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_text("\n".join(map(json.dumps, rows)) if form == "jsonl" else json.dumps(rows))

    def read(columns: str, *paths: Path) -> list[InputFile]:
        return check_inputs([*paths], ConversionOptions((), tmp_path / "out", columns=columns))

    assert len(read("question=user,answer=assistant,image=image", records, other)) == 2
    assert read("question=user,answer=assistant", other)[0].field_by_column["answer"] == "output"
    has = rf"{records} has no 'reply'; it has 'question', 'answer', 'image'$"
    for columns in ("question=user,reply=assistant", "answer=assistant,reply=user", "reply=caption"):
        with pytest.raises(ConvertError, match=f"--columns {columns}: {has}"):
            read(columns, records)
    if form in ("csv", "tsv", "parquet"):
        with pytest.raises(ConvertError, match=rf"{other} has no 'img'; it has 'question', 'answer'$"):
            read("question=user,answer=assistant,img=image", other, records)


def test_texts_of_users_and_assistants_are_turns():
    texts = [{"user": f"q{i}", "assistant": f"a{i}", "source": "s"} for i in range(2)]
    read = read_conversation({"texts": texts, "images": ["a.png"]}, missing_markers="first")
    assert [message["role"] for message in read.messages] == ["user", "assistant"] * 2
    assert read.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "q0"}]
    assert read.messages[3]["content"] == "a1" and read.ignored_keys == [("turns", "source")] * 2
