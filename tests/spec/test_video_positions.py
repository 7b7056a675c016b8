"""M-RoPE positions at videos, worked out by hand from the released models' rule and not from a library.

The rule is that of ``get_rope_index_2`` and ``get_rope_index_25`` in Qwen's fine-tuning code, of
``get_rope_index`` in the releases of transformers that brought the models (4.45, 4.49), and of vLLM: a medium
at position p spans p + (time, row, column), and what follows goes on one after the largest of these
positions. Group i of a video is at time i in Qwen2-VL, and at int(i x seconds of a group x tokens_per_second)
in Qwen2.5-VL (2 in all released sizes).
"""

import pytest
import torch

from megatron_vl.spec.positions import GridTHW, mrope_positions
from tests.data.helpers import positions_one_by_one, sample_of, spec_of

SHORT = GridTHW(3, 4, 6, "video", 0.75)
"""2 x 3 merge units per frame; a little over 1.5 seconds."""
MINUTE = GridTHW(16, 32, 20, "video", 3.75)
"""16 x 10 merge units per frame; 60 seconds in 32 frames."""
SMALL_MINUTE = GridTHW(16, 8, 8, "video", 3.75)


# Of each text token, and of <|vision_start|> and <|vision_end|>, its position; of a medium the positions of
# its frame groups. Parts with a number are so many text tokens; each medium has its start and end token
# around it.
WORKED_OUT = {
    # p = 4. Times 0, int(1.5) = 1, int(3.0) = 3: the largest position is 4 + 3. (Rows reach 5, columns 6.)
    ("qwen2_5_vl", "short"): ([3, SHORT, 2], [0, 1, 2, 3], [[4, 5, 7]], [8, 9, 10]),
    # Times 0, 1, 2: the largest is 6, of time and of the columns.
    ("qwen2_vl", "short"): ([3, SHORT, 2], [0, 1, 2, 3], [[4, 5, 6]], [7, 8, 9]),
    # p = 3. Times int(i x 7.5): 0, 7, 15, ... 112; rows reach 18.
    ("qwen2_5_vl", "long"): (
        [2, MINUTE, 2],
        [0, 1, 2],
        [[3, 10, 18, 25, 33, 40, 48, 55, 63, 70, 78, 85, 93, 100, 108, 115]],
        [116, 117, 118],
    ),
    # Times 0 ... 15, rows too: both reach 18.
    ("qwen2_vl", "long"): ([2, MINUTE, 2], [0, 1, 2], [list(range(3, 19))], [19, 20, 21]),
    # Frames of 4 x 4 units: time alone reaches 18, rows and columns reach 6.
    ("qwen2_vl", "long and small"): ([2, SMALL_MINUTE, 2], [0, 1, 2], [list(range(3, 19))], [19, 20, 21]),
    # First video at 3: times 0, 2, 4 -> 7. End 8, text 9, start 10. Image of 2 x 4 units at 11 -> 14. End 15,
    # text 16 and 17, start 18. Second video at 19: times 0 and int(2.5 x 2) = 5 -> 24. End 25, text 26 and
    # 27.
    ("qwen2_5_vl", "two with an image between"): (
        [2, GridTHW(3, 4, 4, "video", 1.0), 1, GridTHW(1, 4, 8), 2, GridTHW(2, 4, 4, "video", 2.5), 2],
        [0, 1, 2],
        [[3, 5, 7], [11], [19, 24]],
        [8, 9, 10, 15, 16, 17, 18, 25, 26, 27],
    ),
    # First video at 3: times 0, 1, 2 -> 5. End 6, text 7, start 8. Image at 9 -> 12. End 13, text 14 and 15,
    # start 16. Second video at 17: times 0 and 1, two rows and columns -> 18. End 19, text 20 and 21.
    ("qwen2_vl", "two with an image between"): (
        [2, GridTHW(3, 4, 4, "video", 1.0), 1, GridTHW(1, 4, 8), 2, GridTHW(2, 4, 4, "video", 2.5), 2],
        [0, 1, 2],
        [[3, 4, 5], [9], [17, 18]],
        [6, 7, 8, 13, 14, 15, 16, 19, 20, 21],
    ),
    # A video, then another one, with nothing but their tokens between: 1 + int(7 x 0.5 x 2) = 8; the second
    # one at 11, not at 4.
    ("qwen2_5_vl", "two in a row"): (
        [GridTHW(8, 4, 4, "video", 0.5), GridTHW(2, 4, 4, "video", 0.5), 1],
        [0],
        [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12]],
        [9, 10, 13, 14],
    ),
    # The same, but a group is 1 apart whatever its seconds.
    ("qwen2_vl", "two in a row"): (
        [GridTHW(8, 4, 4, "video", 3.0), GridTHW(2, 4, 4, "video", 3.0), 1],
        [0],
        [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12]],
        [9, 10, 13, 14],
    ),
}


@pytest.mark.parametrize(("family", "name"), WORKED_OUT)
def test_positions_are_those_worked_out_by_hand(family, name):
    parts, before, times, after = WORKED_OUT[family, name]
    spec = spec_of(family)
    sample = sample_of(spec, parts)
    positions = mrope_positions(sample.token_ids, [item.grid_thw for item in sample.media_items], spec)
    is_text = sample.token_ids < 151655
    assert positions[:, is_text].tolist() == [[*before, *after]] * 3

    expected = []
    for grid, starts in zip([part for part in parts if isinstance(part, GridTHW)], times, strict=True):
        rows, columns = (starts[0] + torch.arange(size // 2) for size in (grid.h, grid.w))
        expected.append(torch.cartesian_prod(torch.tensor(starts), rows, columns))
    assert positions[:, ~is_text].T.tolist() == torch.cat(expected).tolist()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.75, 0.9, 1.0, 1.3, 2.0, 2.9, 3.75, 60.0])
def test_positions_of_any_length_are_as_counted_one_by_one(family, seconds):
    spec = spec_of(family)
    video = GridTHW(7, 4, 6, "video", torch.tensor(seconds, dtype=torch.float32).item())
    sample = sample_of(spec, [3, video, 2, GridTHW(1, 6, 4), video, 4])
    grids = [item.grid_thw for item in sample.media_items]
    counted = positions_one_by_one(sample.token_ids, grids, spec)
    assert mrope_positions(sample.token_ids, grids, spec).T.tolist() == counted
