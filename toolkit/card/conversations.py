"""Conversations about photographs, from which both sides of a card learn.

A picture is a random crop of one of the demo's photographs. Its answer names the photograph and goes on with
a paragraph of the manual that comes with Python, so that there is more to learn in a few hundred steps than
five captions. There are no videos.
"""

from __future__ import annotations

import importlib.util
import io
import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from PIL import Image

from megatron_vl.data.packing.assemble_row import TokenizedSample
from toolkit.demo.demo_data import ANSWER_BY_PICTURE, PICTURE_QUESTION, load_pictures, random_crop
from toolkit.sample_encoder import SampleEncoder

PICTURE_SIDES = (112, 280)
"""Shortest and longest side of a picture in pixels; at most 100 tokens."""
PARAGRAPH_LENGTHS = (150, 450)
"""Fewest and most characters of a paragraph."""


@dataclass(frozen=True)
class PictureConversation:
    """A picture, a question about it, and the answer."""

    jpeg: bytes
    question: str
    answer: str


def write_conversations(conversation_count: int) -> list[PictureConversation]:
    """Makes conversations, always the same ones for a version of Python and scikit-image."""
    random_generator = random.Random(0)
    photographs = {}
    for picture_name, load_picture in load_pictures().items():
        photographs[picture_name] = Image.fromarray(load_picture())
    paragraphs = manual_paragraphs()
    random_generator.shuffle(paragraphs)

    conversations = []
    for conversation_index in range(conversation_count):
        picture_name = random_generator.choice(list(ANSWER_BY_PICTURE))
        picture_size = random_generator.randint(*PICTURE_SIDES), random_generator.randint(*PICTURE_SIDES)
        cropped_picture = random_crop(photographs[picture_name], picture_size, random_generator)
        jpeg_file = io.BytesIO()
        cropped_picture.save(jpeg_file, "JPEG", quality=92)

        topic, paragraph = paragraphs[conversation_index % len(paragraphs)]
        question = f"{PICTURE_QUESTION} And what does the manual say of {topic}?"
        answer_text = f"{ANSWER_BY_PICTURE[picture_name]} {paragraph}"
        conversations.append(PictureConversation(jpeg_file.getvalue(), question, answer_text))
    return conversations


def manual_paragraphs() -> list[tuple[str, str]]:
    """(topic, paragraph) of the prose in Python's manual, as ``help()`` shows it."""
    min_length, max_length = PARAGRAPH_LENGTHS
    paragraphs = []
    for topic, topic_text in topics.items():
        for text_block in topic_text.split("\n\n"):
            joined_text = " ".join(text_block.split())
            # Code, tables and lists are indented or begin with a sign.
            if text_block[:1].isalpha() and min_length <= len(joined_text) <= max_length:
                paragraphs.append((topic, joined_text))
    return paragraphs


def encode_conversations(
    conversations: list[PictureConversation], encoder: SampleEncoder
) -> list[TokenizedSample]:
    """Encodes conversations as the trainer's loader does."""
    encoded_samples = []
    for conversation in conversations:
        user_content = [{"type": "image"}, {"type": "text", "text": conversation.question}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": user_content},
            {"role": "assistant", "content": conversation.answer},
        ]
        media = [("image", "picture.jpg", conversation.jpeg)]
        encoded_samples.append(encoder.encode_sample(messages, media))
    return encoded_samples


def describe_conversations(conversation_count: int) -> str:
    """Says what the conversations are about."""
    has_photographs = importlib.util.find_spec("skimage") is not None
    picture_text = "scikit-image's photographs" if has_photographs else "drawings"
    return f"{conversation_count} conversations about crops of {picture_text} and Python's manual"
