"""Tests of tables, compressed files, folders and an index as input; of records of questions and answers."""

import base64
import gzip
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.convert import ConversionOptions, check_inputs, convert_dataset
from data_tools.formats import RecordError, read_conversation
from data_tools.input_files import InputFile, find_input_files, parse_columns
from data_tools.media import MediaRoots, is_embedded, read_media
from data_tools.records import ConvertError, read_records
from tests.data.media import encoded, write
from tests.data_tools.test_convert import refused, shards

IMAGE = encoded(40, 60)
SAY = {"role": "assistant", "content": "A cat."}
CALL = {"name": "look", "arguments": {"where": "left"}}


def rows(count: int) -> list[dict]:
    """Conversations with images as tables hold them: two with bytes, one with a path, one without."""
    turns = [{"role": "user", "content": "<image>What?"}, SAY]
    text = {"id": None, "images": [], "messages": [{"role": "user", "content": "Hi"}, SAY]}
    kinds = [
        {"id": "a", "images": [{"bytes": IMAGE, "path": None}], "messages": turns},
        {"id": "b", "images": [{"bytes": IMAGE, "path": "named.png"}], "messages": turns},
        {"id": "c", "images": [{"bytes": None, "path": "here.png"}], "messages": turns},
        text,
    ]
    return [{**kinds[i % 4], "id": f"{i}"} for i in range(count)]


def out_of(folder: Path, *inputs: Path, **options) -> Path:
    (folder / "media").mkdir(exist_ok=True)
    out = folder / "out"
    convert_dataset(list(inputs), ConversionOptions(folder / "media", out, **options))
    return out


def test_tables_give_the_samples_of_the_same_records_in_json(tmp_path):
    import datasets

    write(tmp_path / "media/here.png", IMAGE)
    table = rows(30)
    uri = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
    plain = [{**row, "images": [uri if i["bytes"] else i["path"] for i in row["images"]]} for row in table]
    (tmp_path / "x.json").write_text(json.dumps(plain))
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "x.parquet", row_group_size=7)
    saved = datasets.Dataset.from_list(table)
    saved.save_to_disk(str(tmp_path / "disk"), num_shards=2)

    found = {}
    for name in ("x.json", "x.parquet", "disk"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out = out_of(tmp_path, tmp_path / name, samples_per_shard=4, val_fraction=0.1)
        assert not list(tmp_path.glob("*.partial")) and refused(out) == {}
        members = shards(out)
        samples = [json.loads(data) for member, data in members.items() if member.endswith(".json")]
        for sample in samples:
            del sample["source"], sample["crc32"]
        found[name] = (samples, [data for member, data in members.items() if not member.endswith(".json")])
    assert len(found["x.json"][0]) == 30 and found["x.json"][1] == [IMAGE] * 23
    assert found["x.parquet"] == found["x.json"] and found["disk"] == found["x.json"]


def test_nulls_that_a_table_fills_in_are_dropped(tmp_path):
    """Arrow gives each call the arguments of all others; what a row lacks must not come back as null."""
    other = {"name": "wait", "arguments": {"seconds": 3}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}, {"function": other}]}
    ask, result = {"role": "user", "content": "Go", "tool_calls": None}, {"role": "tool", "content": "ok"}
    record = {"messages": [ask, call, result, result, SAY]}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "t.parquet")
    ((_, read),) = read_records(tmp_path / "t.parquet")
    calls = read_conversation(read).messages[1]["tool_calls"]
    assert [call["function"] for call in calls] == [CALL, other]


@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_read_and_damage_is_named(tmp_path, array, suffix):
    records = [{"a": "x" * 50 + str(i)} for i in range(2000)]
    text = (json.dumps(records) if array else "\n".join(map(json.dumps, records))).encode()
    packed = gzip.compress(text) if suffix == "gz" else pa.compress(text, codec="zstd", asbytes=True)
    path = tmp_path / f"a.json.{suffix}"
    path.write_bytes(packed)
    counted: list[int] = []
    assert [record for _, record in read_records(path, counted.append)] == records
    assert sum(counted) == len(packed)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConvertError, match=f"a.json.{suffix} is damaged"):
        list(read_records(path))
    table = path.with_name(f"a.csv.{suffix}")
    with pytest.raises(ConvertError, match=f"a.csv.{suffix} is a compressed table"):
        list(read_records(path.rename(table)))


def test_damaged_tables_are_named(tmp_path):
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 nothing")
        with pytest.raises(ConvertError, match=name):
            list(read_records(tmp_path / name))


def index_of(folder: Path, entries: dict) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return folder / "dataset_info.json"


def test_index_names_files_columns_and_tags(tmp_path):
    """A column that the index leaves out has no effect, as in LLaMA-Factory."""
    talk = [{"who": "person", "says": "<image>?"}, {"who": "model", "says": "Yes."}]
    chats = [{"talk": talk, "images": ["a.png"], "rules": "Be brief."}]
    (tmp_path / "alpaca.jsonl").write_text(
        json.dumps({"question": "Q", "answer": "A", "system": "not named"})
    )
    write(tmp_path / "chats/1.json", json.dumps(chats).encode())
    alpaca_columns = {"prompt": "question", "response": "answer"}
    columns = {"messages": "talk", "images": "images", "system": "rules"}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "person", "assistant_tag": "model"}
    second = {"file_name": "chats", "formatting": "sharegpt", "columns": columns, "tags": tags}
    entries = {"first": {"file_name": "alpaca.jsonl", "columns": alpaca_columns}, "second": second}
    index = index_of(tmp_path, entries)
    first, second = find_input_files([index])
    read = [
        read_conversation(source.rename_fields(record), source.format_name)
        for source in (first, second)
        for _, record in read_records(source.path)
    ]
    assert [m["content"] for m in read[0].messages] == ["Q", "A"]
    assert read[0].ignored_keys == [("records", "system (not among the columns)")]
    assert [(m["role"], m["content"]) for m in read[1].messages] == [
        ("system", "Be brief."),
        ("user", [{"type": "image"}, {"type": "text", "text": "?"}]),
        ("assistant", "Yes."),
    ]
    assert read[1].media_references == [("image", "a.png")] and read[1].ignored_keys == []

    write(tmp_path / "media/a.png", IMAGE)
    out = out_of(tmp_path, Path(f"{index}:second"))
    assert len([name for name in shards(out) if name.endswith(".json")]) == 1


@pytest.mark.parametrize(
    "entry,message",
    [
        ({"hf_hub_url": "a/b"}, "hf download --repo-type dataset a/b .* choose local ones: .*:NAME"),
        ({"file_name": "in.json", "ranking": True}, "preferences"),
        ({"file_name": "in.json", "formatting": "csv"}, "formatting 'csv'; valid: alpaca, sharegpt, openai"),
        ({"file_name": "in.json", "tags": {"tool_tag": "x"}}, "tags tool_tag are unknown"),
        ({"file_name": "in.json", "num_samples": 5}, "num_samples"),
        ({"file_name": "gone.json"}, "gone.json does not exist"),
        ({}, 'no "file_name"'),
    ],
)
def test_unusable_indices_are_refused(tmp_path, entry, message):
    (tmp_path / "in.json").write_text("[]")
    index = index_of(tmp_path, {"ok": {"file_name": "in.json"}, "bad": entry})
    with pytest.raises(ConvertError, match=message):
        out_of(tmp_path, index)
    with pytest.raises(ConvertError, match="does not have none; it has bad, ok"):
        out_of(tmp_path, Path(f"{index}:ok,none"))


def test_files_outside_the_input_are_not_read(tmp_path):
    """As for media: a foreign index or folder must not bring in a file from elsewhere on this machine."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}\n")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link.jsonl").symlink_to(secret)
    for name in ("../secret.jsonl", str(secret), "link.jsonl", ".."):
        with pytest.raises(ConvertError, match="which is not inside"):
            find_input_files([index_of(inside, {"d": {"file_name": name}})])
    with pytest.raises(ConvertError, match=f"link.jsonl leads to {secret}, which is not inside"):
        find_input_files([inside])
    (inside / "link.jsonl").unlink()
    os.mkfifo(inside / "pipe.jsonl")  # without a writer, nothing would end the wait for it
    with pytest.raises(ConvertError, match="pipe.jsonl is a named pipe"):
        find_input_files([inside])

    hub = tmp_path / "hub/datasets--a"
    (hub / "snapshots/1/data").mkdir(parents=True)
    write(hub / "blobs/ab", secret.read_bytes())
    (hub / "snapshots/1/data/train.jsonl").symlink_to("../../../blobs/ab")
    for folder in (hub / "snapshots/1", hub / "snapshots/1/data"):
        assert [file.path.name for file in find_input_files([folder])] == ["train.jsonl"]


def test_index_may_name_a_data_set_once(tmp_path):
    path = tmp_path / "dataset_info.json"
    path.write_text('{"a": {"file_name": "a.json"}, "a": {"file_name": "b.json"}}')
    with pytest.raises(ConvertError, match="the key 'a' occurs twice"):
        find_input_files([path])


def test_folders_of_several_splits_or_kinds_are_refused(tmp_path):
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"):
        pq.write_table(pa.Table.from_pylist(rows(1)), tmp_path / name)
    with pytest.raises(ConvertError, match="the splits test, train; give one of its files"):
        out_of(tmp_path, tmp_path)
    (tmp_path / "test-00000-of-00001.parquet").rename(tmp_path / "more.jsonl")
    with pytest.raises(ConvertError, match=".jsonl and .parquet; give one of its files"):
        out_of(tmp_path, tmp_path)
    (tmp_path / "data/.nv-meta").mkdir(parents=True)
    with pytest.raises(ConvertError, match=f".jsonl and .parquet; give its data set {tmp_path}/data"):
        out_of(tmp_path, tmp_path)


def test_csv_rows_are_records_with_quotes_newlines_and_missing_fields(tmp_path):
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
def test_csv_that_is_broken_is_refused(tmp_path, text, message):
    table = tmp_path / "q.csv"
    table.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConvertError, match=message):
        list(read_records(table))


def test_columns_name_question_answer_and_image(tmp_path):
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
    image, text = {"type": "image"}, {"type": "text", "text": "What?"}
    assert conversation.messages[0]["content"] == [image, image, text]
    assert conversation.media_references == [("image", "a.png"), ("image", "b.png")]
    # One marker for two images is a mistake in either case.
    with pytest.raises(RecordError, match="1 <image> in the text, but 2"):
        read_conversation({**record, "query": "<image> What?"}, missing_markers="first")


def test_media_are_found_in_the_first_root_that_has_them(tmp_path):
    for name in ("one/a", "two/a", "two/b"):
        write(tmp_path / name, name.encode())
    roots = MediaRoots((tmp_path / "one", tmp_path / "two"))
    assert [read_media(name, roots) for name in "ab"] == [b"one/a", b"two/b"]
    with pytest.raises(RecordError, match="c does not exist"):
        read_media("c", roots)
    with pytest.raises(RecordError, match="outside the media root .*two; add --media-root .*one"):
        read_media("../one/a", MediaRoots((tmp_path / "two",)))


def test_links_out_of_a_root_are_followed_only_on_request(tmp_path):
    write(tmp_path / "store/a", b"a")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "store", tmp_path / "root" / "link")
    with pytest.raises(RecordError, match="--follow-links"):
        read_media("link/a", MediaRoots((tmp_path / "root",)))
    followed = MediaRoots((tmp_path / "root",), follow_links=True)
    assert read_media("link/a", followed) == b"a"
    with pytest.raises(RecordError, match="outside the media root"):
        read_media("../store/a", followed)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_base64_is_recognised_without_data(kind):
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
def test_record_without_format_names_its_fields_and_what_to_do(record, advice):
    with pytest.raises(RecordError, match=advice):
        read_conversation(record)


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "arrow", "json", "jsonl"])
def test_column_that_does_not_exist_is_refused_with_those_that_do(form, tmp_path):
    """Empty fields of a CSV are absent from its records, and only some records of JSON may have an image."""
    records, other, empty = tmp_path / f"a.{form}", tmp_path / f"b.{form}", None if form == "parquet" else ""
    for path, names in ((records, ("question", "answer", "image")), (other, ("question", "answer"))):
        rows = [dict.fromkeys(names, "b") | {name: empty for name in names[2:]}] * 2
        if form in ("csv", "tsv"):
            lines = [names, *(row.values() for row in rows)]
            path.write_text("".join(f"{('\t' if form == 'tsv' else ',').join(line)}\n" for line in lines))
        elif form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif form == "arrow":
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(path, table.schema) as writer:
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
