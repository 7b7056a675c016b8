"""Prompts of Qwen3.5 with images, videos, thinking and calls, worked out by hand: tokens and positions.

An image or a frame group at position p spans p + (0, row, column), in units of 32 pixels; what follows goes
on one after the largest of these. A video becomes groups ``<TIME seconds><|vision_start|>...<|vision_end|>``:
TIME is the mean of the times of the group's first and last frame, to a tenth.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, image_grid, video_grid
from megatron_vl.data.sample.pixel_settings import read_pixel_settings
from megatron_vl.spec.positions import mrope_positions
from tests.data.helpers import IMAGE, VIDEO, assistant, text, user
from tests.data.test_thinking import CALL, DRY, LARGE, RESULT, TOOL_CALL, thinking_encoder

SIZE = (250, 330)
"""Pixels. The nearest multiples of 32 are 256 x 320, more than the least area of 65,536: 8 x 10 units."""
CLIP = VideoInfo(frame_count=100, fps=25.0, height=70, width=100)
"""4 seconds at 2 frames a second are 8 frames. Evenly from 0 to 99, every 14.14:
0, 14.1, 28.3, 42.4, 56.6, 70.7, 84.9, 99. The nearest multiples of 32 are 64 x 96: 2 x 3 units."""
FRAMES = [0, 14, 28, 42, 57, 71, 85, 99]
"""Their times are 0, 0.56, 1.12, 1.68, 2.28, 2.84, 3.40 and 3.96 seconds."""
TIMES = (0.28, 1.40, 2.56, 3.68)
"""The means of the first two times, of the next two, ..."""

START, END, NEXT = "<|vision_start|>", "<|vision_end|>", ["<|im_end|>", "\n"]
USER, ASSISTANT = ["<|im_start|>", "user", "\n"], ["<|im_start|>", "assistant", "\n"]
OPENED, CLOSED = ["<think>", "\n"], ["<think>", "\n\n", "</think>", "\n\n"]


def time(whole: str, tenth: str) -> list[str]:
    """The tokens before a frame group: seven."""
    return ["<", whole, ".", tenth, " seconds", ">", START]


@dataclass
class Unit:
    """An image, or a frame group of a video."""

    at: int
    rows: int
    columns: int
    token: str = "<|video_pad|>"
    later: int = 0
    """In time, after ``at``."""

    def positions(self) -> torch.Tensor:
        """int64 [3, rows * columns]"""
        rows = torch.arange(self.rows).repeat_interleave(self.columns)
        columns = torch.arange(self.columns).repeat(self.rows)
        return self.at + torch.stack([torch.full_like(rows, self.later), rows, columns])


Run = tuple[int, list[str]] | Unit
"""The position of the first token, and the tokens."""


CALLED = [*TOOL_CALL, *NEXT, *DRY, *ASSISTANT, *OPENED]
# The numbers are counted by hand: a run of n tokens at p ends at p + n - 1, and 8 x 10 units at p end at
# p + 9 (the last column), 2 x 3 units at p + 2.
GOLDEN: dict[str, tuple[list[dict], bool | None, list[Run]]] = {
    "an image": (
        [user([IMAGE, text("What?")])],
        None,
        [
            (0, [*USER, START]),  # to 3
            Unit(4, 8, 10, "<|image_pad|>"),  # to 13
            (14, [END, "What", "?", *NEXT, *ASSISTANT, *OPENED]),
        ],
    ),
    "a video, without thinking": (
        [user([VIDEO, text("Who?")])],
        False,
        [
            (0, [*USER, *time("0", "3")]),  # 0.28; 3 + 7 tokens, to 9
            Unit(10, 2, 3),  # to 12
            (13, [END, *time("1", "4")]),  # 1 + 7, to 20
            Unit(21, 2, 3),  # to 23
            (24, [END, *time("2", "6")]),  # 2.56; to 31
            Unit(32, 2, 3),  # to 34
            (35, [END, *time("3", "7")]),  # 3.68; to 42
            Unit(43, 2, 3),  # to 45
            (46, [END, "Who", "?", *NEXT, *ASSISTANT, *CLOSED]),
        ],
    ),
    # What was thought before the first answer is left out.
    "an image, an answer, and a video": (
        [
            user([IMAGE, text("What?")]),
            assistant("A cat.", reasoning_content="Hm."),
            user([text("Now"), VIDEO]),
        ],
        True,
        [
            (0, [*USER, START]),  # to 3
            Unit(4, 8, 10, "<|image_pad|>"),  # to 13
            # 1 + 2 + 2 to 18, 3 + 3 + 2 to 26, 3 + 1 to 30, 7 to 37
            (
                14,
                [END, "What", "?", *NEXT, *ASSISTANT, "A", " cat", ".", *NEXT, *USER, "Now", *time("0", "3")],
            ),
            Unit(38, 2, 3),  # to 40
            (41, [END, *time("1", "4")]),  # to 48
            Unit(49, 2, 3),  # to 51
            (52, [END, *time("2", "6")]),  # to 59
            Unit(60, 2, 3),  # to 62
            (63, [END, *time("3", "7")]),  # to 70
            Unit(71, 2, 3),  # to 73
            (74, [END, *NEXT, *ASSISTANT, *OPENED]),
        ],
    ),
    # The call belongs to the last question, so that what was thought before it stays.
    "an image, a call and its result": (
        [user([text("Hi"), IMAGE]), CALL, RESULT],
        None,
        [
            (0, [*USER, "Hi", START]),  # to 4
            Unit(5, 8, 10, "<|image_pad|>"),  # to 14
            (15, [END, *NEXT, *ASSISTANT, *OPENED, "Look", ".\n", "</think>", "\n\n", *CALLED]),
        ],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(Path(__file__).with_name(f"qwen3_5.{name}"), path / name)
    return path


def test_video_times_worked_out_by_hand(folder) -> None:
    settings = read_pixel_settings(folder)
    grid = video_grid(CLIP, settings)
    assert frame_indices(CLIP, settings) == FRAMES
    assert grid.timestamps == pytest.approx(TIMES, abs=1e-12)
    assert (grid.t, grid.h, grid.w) == (4, 4, 6)

    # 3 seconds at 2.5 frames a second make 7 frames, every 4.83 from 0 to 29: 0, 5, 10, 14 (of 14.5), 19, 24
    # and 29, which fills the last group alone. At 10 frames a second, (0 + 0.5) / 2, (1 + 1.4) / 2, ...
    settings = read_pixel_settings(folder, DataConfig(video_fps=2.5))
    odd = video_grid(VideoInfo(frame_count=30, fps=10.0, height=70, width=100), settings)
    assert odd.timestamps == pytest.approx((0.25, 1.2, 2.15, 2.9), abs=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_tokens_and_positions_worked_out_by_hand(folder, name) -> None:
    messages, think, runs = GOLDEN[name]
    ours = thinking_encoder(LARGE, "qwen3_5")
    settings = read_pixel_settings(folder)
    made = {"image": image_grid(*SIZE, settings), "video": video_grid(CLIP, settings)}
    parts = [part for turn in messages if turn["role"] == "user" for part in turn["content"]]
    grids = [made[part["type"]] for part in parts if part["type"] in made]

    ids = ours.encode_prompt(messages, grids, enable_thinking=think)
    tokens, positions = written(runs)
    assert [ours.tokenizer.decode(token) for token in ids] == tokens
    assert torch.equal(mrope_positions(ids, grids, ours.spec), positions)


def written(runs: list[Run]) -> tuple[list[str], torch.Tensor]:
    """The tokens of all runs, and their positions int64 [3, S]."""
    tokens: list[str] = []
    positions: list[torch.Tensor] = []
    for run in runs:
        if isinstance(run, Unit):
            tokens += [run.token] * (run.rows * run.columns)
            positions.append(run.positions())
        else:
            tokens += run[1]
            positions.append((run[0] + torch.arange(len(run[1]))).expand(3, -1))
    return tokens, torch.cat(positions, dim=1)
