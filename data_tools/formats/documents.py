"""Documents: texts and media in their order, all of whose text is trained on.

* ``text`` or ``caption``, perhaps with listed media, which stand in the place of markers or come first;
* ``texts`` beside ``images`` and ``videos`` of the same length, with null where the other has something
  (OBELICS, OmniCorpus);
* ``text_list`` with ``image_info`` (MMC4): an image stands before the sentence of its
  ``matched_text_index``, and sentences are joined by a space, as OpenFlamingo reads them.
"""

from typing import Any

from .conversation import Message, RecordError, checked_text, join_text_parts, shorten_value
from .conversation_formats import filled_field
from .record_reader import EMPTY_VALUES, MEDIA_KINDS, MEDIA_MARKER, RecordFormat, RecordReader

TEXT_FIELDS = ("text", "caption")
FIELDS = (*TEXT_FIELDS, "texts", "text_list")
MMC4_REFERENCE_KEYS = ("image_name", "image", "path", "bytes", "url", "raw_url")


def answer_prompt(record: dict[str, Any], document: list[Message], prompt: str) -> list[Message]:
    """The conversation in which a caption, one text after its media, answers a question about them."""
    parts = document[0]["content"]
    texts = [part["type"] == "text" for part in parts]
    if len(texts) == 1 or not texts[-1] or sum(texts) > 1 or not any(key in record for key in TEXT_FIELDS):
        return document
    question = [*parts[:-1], {"type": "text", "text": prompt}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": parts[-1]["text"]}]


def _document(parts: list[dict[str, Any]], field_name: str) -> list[Message]:
    """The one message of a document. Raises RecordError if it has no text."""
    if not any(part["type"] == "text" and part["text"].strip() for part in parts):
        raise RecordError("no text", "the document has no text to train on", field_name)
    content = join_text_parts(parts)
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"role": "document", "content": content}]


def _read_text(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    empty_field = next((name for name in TEXT_FIELDS if name in record), TEXT_FIELDS[0])
    field_name = filled_field(record, TEXT_FIELDS) or empty_field
    text = checked_text(record.get(field_name) or "", field_name)
    # Texts of the web have <image> and <video> as HTML, or as words.
    reader.markers_are_text |= not any(reader.listed_counts.values())
    if not reader.markers_are_text and MEDIA_MARKER.search(text):
        return _document(reader.text_parts(text), field_name)
    return _document([*reader.all_listed_media(), {"type": "text", "text": text}], field_name)


def _listed(record: dict[str, Any], field_name: str) -> list[Any]:
    value = record.get(field_name) or []
    if not isinstance(value, list):
        raise RecordError("bad document", f"a list is required, not {shorten_value(value)}", field_name)
    return value


def _read_interleaved(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    lists = {"text": _listed(record, "texts")}
    lists |= {kind: listed for kind in MEDIA_KINDS if (listed := _listed(record, f"{kind}s"))}
    parts: list[dict[str, Any]] = []
    for kind, listed in lists.items():
        if len(listed) != len(lists["text"]):
            detail = (
                f"{len(lists['text'])} texts and {len(listed)} {kind}s; write null where the other list has"
                " something"
            )
            raise RecordError("bad document", detail, f"{kind}s")
    for i, values in enumerate(zip(*lists.values(), strict=True)):
        filled = [
            (kind, value) for kind, value in zip(lists, values, strict=True) if value not in EMPTY_VALUES
        ]
        if len(filled) > 1:
            detail = f"place {i} has a text and a medium, or two media; give each a place of its own"
            raise RecordError("bad document", detail, f"texts[{i}]")
        for kind, value in filled:
            if kind != "text":
                parts.append(reader.placed_medium(kind, value, f"{kind}s[{i}]", record))
                continue
            text = checked_text(value, f"texts[{i}]")
            previous = parts[-1].get("text", " ") if parts else " "
            if not previous[-1].isspace() and not text[0].isspace():
                text = "\n\n" + text
            parts.append({"type": "text", "text": text})
    return _document(parts, "texts")


def _read_mmc4(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    sentences = _listed(record, "text_list")
    images_before: list[list[tuple[Any, str]]] = [[] for _ in sentences]
    for i, info in enumerate(_listed(record, "image_info")):
        if info is None:
            continue
        index = info.get("matched_text_index") if isinstance(info, dict) else None
        if type(index) is not int or not 0 <= index < len(sentences):
            detail = f"matched_text_index {shorten_value(index)} is none of the {len(sentences)} sentences"
            raise RecordError("bad document", detail, f"image_info[{i}].matched_text_index")
        key = next((key for key in MMC4_REFERENCE_KEYS if info.get(key)), MMC4_REFERENCE_KEYS[0])
        images_before[index].append((info.get(key), f"image_info[{i}].{key}"))
    parts: list[dict[str, Any]] = []
    for i, sentence in enumerate(sentences):
        parts += [reader.placed_medium("image", *image, record) for image in images_before[i]]
        space = " " if i < len(sentences) - 1 else ""
        parts.append({"type": "text", "text": checked_text(sentence, f"text_list[{i}]") + space})
    return _document(parts, "text_list")


FORMATS = (
    RecordFormat(
        "interleaved",
        "texts",
        lambda record: isinstance(record.get("texts"), list),
        _read_interleaved,
        is_document=True,
        own_media_fields=("images", "videos"),
    ),
    RecordFormat(
        "mmc4",
        "text_list",
        lambda record: isinstance(record.get("text_list"), list),
        _read_mmc4,
        read_fields=("image_info",),
        is_document=True,
    ),
    RecordFormat(
        "document",
        "text",
        lambda record: any(key in record for key in TEXT_FIELDS),
        _read_text,
        read_fields=TEXT_FIELDS,
        is_document=True,
    ),
)
