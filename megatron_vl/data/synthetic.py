"""Rows without a data set: ``data.path: synthetic:images`` and ``synthetic:text``.

Documents are as long as those of visual question answering. The images have the sizes of COCO's, each with
40 to 260 tokens of text. Tokens and pixels are random, because only shapes matter for speed. Grids, windows,
positions and packing are those of the loader.

Rows are drawn from ``data.seed``. A step takes the next ``global_batch_size`` of them, so its rows are the
same in every layout. After :data:`DISTINCT_TOKENS` tokens the first row comes again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample, pack_row
from megatron_vl.data.packing.training_row import TrainingRow, pin_row
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, placeholder_runs

DISTINCT_TOKENS, MAX_DISTINCT_ROWS = 2**20, 64
"""Rows are repeated after about so many tokens, and after so many rows. A replica keeps its rows in pinned
memory, at most 3 GB of pixels."""
DRAWING_THREADS = 4
IMAGE_SIZES = ((640, 480), (480, 640), (640, 427), (427, 640), (640, 426), (640, 360), (500, 375), (640, 640))
"""Width and height in pixels: the sizes of COCO's images. :mod:`megatron_vl.estimate.rows` assumes their
mean."""
TEXT_LENGTHS = range(40, 261)
"""Tokens of text with an image; the second half has loss."""
DOCUMENT_LENGTHS = range(300, 701)
"""Tokens of a document without an image, about as many as one with an image has."""
SECONDS_PER_GRID = 3.75
"""Seconds per frame group. In Qwen2.5-VL, time positions then reach further than rows and columns."""


class SyntheticRows(Iterator[TrainingRow]):
    """Iterator over the random rows of one data-parallel rank, in place of
    :class:`~megatron_vl.data.row_loader.RowLoader`.

    Args:
        rows_per_step: number of rows of a step on all ranks, a multiple of ``dp``.
    """

    def __init__(
        self, data_config: DataConfig, spec: ModelSpec, dp_rank: int, dp: int, rows_per_step: int
    ) -> None:
        self._data_config, self._spec = data_config, spec
        self._rows_per_step, self._rows_per_rank = rows_per_step, rows_per_step // dp
        self._first_of_step = dp_rank * self._rows_per_rank
        self._start_row = self._rows_taken = 0
        self._num_rows = num_distinct_rows(data_config.seq_len)
        self._rows: dict[int, Future[TrainingRow]] = {}
        self.dataset_identity = synthetic_identity(data_config)
        self.row_settings = {"seed": data_config.seed, "seq_len": data_config.seq_len}
        self.model_folder_settings: dict[str, Any] = {}
        """Nothing comes from the files of a tokenizer or image processor."""
        self.start_notes = [f"{data_config.path}: {self._num_rows} different rows of random tokens, in turn"]

    def __next__(self) -> TrainingRow:
        # Drawing begins with the first row, because a state may be loaded before it.
        self._rows = self._rows or self._draw_own_rows()
        number = self._row_number(*divmod(self._rows_taken, self._rows_per_rank))
        self._rows_taken += 1
        row = self._rows[number % self._num_rows].result()
        return dataclasses.replace(row, sample_keys=[f"{number}/{i}" for i in range(row.num_samples)])

    def _row_number(self, step: int, row_of_step: int) -> int:
        """The number in the run of a row of this rank."""
        return self._start_row + step * self._rows_per_step + self._first_of_step + row_of_step

    def _draw_own_rows(self) -> dict[int, Future[TrainingRow]]:
        """The rows by number. Threads draw their pixels, in the order in which steps take them."""
        # Steps are repeated too. If they are large, a rank has the same few rows in all of them.
        distinct_steps = range(self._num_rows // math.gcd(self._num_rows, self._rows_per_step))
        places = itertools.product(distinct_steps, range(self._rows_per_rank))
        own_numbers = dict.fromkeys(self._row_number(*place) % self._num_rows for place in places)
        chosen_rows = list(choose_rows(self._data_config, self._spec))
        threads = ThreadPoolExecutor(DRAWING_THREADS)
        rows = {number: threads.submit(self._pack_row, chosen_rows[number]) for number in own_numbers}
        threads.shutdown(wait=False)
        return rows

    def _pack_row(self, row: list[ChosenSample]) -> TrainingRow:
        return pin_row(pack_row(draw_row(row), self._spec, self._data_config.seq_len))

    def state_dict(self) -> dict[str, Any]:
        """The number of rows of the steps that are done, the same on all ranks."""
        return {
            "identity": {"dataset": self.dataset_identity, **self.row_settings},
            "rows": self._start_row + self._rows_taken // self._rows_per_rank * self._rows_per_step,
        }

    def load_state_dict(self, saved_state: dict[str, Any]) -> None:
        """Continues after the steps of a saved state, on any number of ranks. Call it before the first row.

        Raises:
            LoaderStateError: the state belongs to other rows, or is damaged.
        """
        identity = self.state_dict()["identity"]
        if saved_state.get("identity") != identity:
            raise LoaderStateError(
                f"the loader state was saved with {saved_state.get('identity')}, these rows are {identity};"
                " set data.path and data.seed back"
            )
        if not isinstance(saved_state.get("rows"), int):
            raise LoaderStateError("the loader state is damaged: it has no number of rows")
        self._start_row = saved_state["rows"]

    def close(self) -> None:
        """Frees the rows, and ends their drawing."""
        for row in self._rows.values():
            row.cancel()
        self._rows = {}


def synthetic_identity(data_config: DataConfig) -> dict[str, Any]:
    """Stands for a data set's identity (:class:`~megatron_vl.data.source.dataset_description.SplitFacts`)."""
    return {"content": data_config.path}


def num_distinct_rows(seq_len: int) -> int:
    """Number of rows after which they are repeated."""
    return max(1, min(MAX_DISTINCT_ROWS, DISTINCT_TOKENS // seq_len))


@dataclasses.dataclass(frozen=True)
class ChosenSample:
    """A sample whose tokens and pixels are not drawn yet."""

    num_tokens: int
    draw: Callable[[], TokenizedSample]

    def __len__(self) -> int:
        return self.num_tokens


def draw_row(row: list[ChosenSample]) -> list[TokenizedSample]:
    """Draws the tokens and pixels of a row, which takes 0.1 s for 8,192 tokens of images."""
    return [sample.draw() for sample in row]


def draw_rows(data_config: DataConfig, spec: ModelSpec) -> Iterator[list[TokenizedSample]]:
    """Yields the samples of each different row of ``data.path``."""
    return map(draw_row, choose_rows(data_config, spec))


def choose_rows(data_config: DataConfig, spec: ModelSpec) -> Iterator[list[ChosenSample]]:
    """Yields each different row of ``data.path``, before its tokens and pixels are drawn."""
    rng, seq_len = random.Random(data_config.seed), data_config.seq_len
    choose_sample = {"synthetic:images": image_sample, "synthetic:text": text_sample}[str(data_config.path)]
    samples = (choose_sample(spec, rng, seq_len) for _ in itertools.count())
    return itertools.islice(fill_rows(samples, seq_len), num_distinct_rows(seq_len))


def fill_rows[Sample: Sized](samples: Iterable[Sample], seq_len: int) -> Iterator[list[Sample]]:
    """Yields groups of consecutive samples. Each fills a row of ``seq_len`` tokens."""
    row_samples: list[Sample] = []
    tokens_used = 0
    for sample in samples:
        if row_samples and tokens_used + len(sample) > seq_len:
            yield row_samples
            row_samples, tokens_used = [], 0
        row_samples.append(sample)
        tokens_used += len(sample)


def image_sample(spec: ModelSpec, rng: random.Random, seq_len: int) -> ChosenSample:
    """One image with a question and its answer. Each has at most half of a row."""
    merge_size = spec.vision.spatial_merge_size
    columns, rows = (
        max(1, round(n / (spec.vision.patch_size * merge_size))) for n in rng.choice(IMAGE_SIZES)
    )
    half_row = max(1, seq_len // 2 - 2)
    while columns * rows > half_row:
        columns, rows = (columns + 1) // 2, (rows + 1) // 2
    grid_size = (1, rows * merge_size, columns * merge_size)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    num_text_tokens = min(half_row, rng.choice(TEXT_LENGTHS))

    def draw() -> TokenizedSample:
        image_token_ids, media_item = random_medium(spec, "image", grid_size, generator)
        text_token_ids = random_text_ids(spec, num_text_tokens, generator)
        token_ids = torch.cat([image_token_ids, text_token_ids])
        loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
        loss_mask[-len(text_token_ids) // 2 :] = True
        return TokenizedSample(token_ids, loss_mask, [media_item])

    return ChosenSample(columns * rows + 2 + num_text_tokens, draw)  # a token before and after the image


def text_sample(spec: ModelSpec, rng: random.Random, seq_len: int) -> ChosenSample:
    """A document about as long as an image sample, without an image."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    num_tokens = min(seq_len, rng.choice(DOCUMENT_LENGTHS))

    def draw() -> TokenizedSample:
        token_ids = random_text_ids(spec, num_tokens, generator)
        return TokenizedSample(token_ids, loss_mask=torch.ones(num_tokens, dtype=torch.bool))

    return ChosenSample(num_tokens, draw)


def random_text_ids(spec: ModelSpec, token_count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws tokens below all special ones."""
    end = min(
        *(spec.image_token_id, spec.video_token_id, spec.vision_start_token_id, spec.vision_end_token_id),
        spec.language.vocab_size,
    )
    return torch.randint(0, end, (token_count,), generator=generator)


def random_medium(
    spec: ModelSpec, media_kind: str, grid_size: tuple[int, int, int], generator: torch.Generator
) -> tuple[torch.Tensor, MediaItem]:
    """Returns the tokens of an image or a video with random pixels, and the medium itself."""
    vision_spec, (t, h, w) = spec.vision, grid_size
    media_grid = GridTHW(t, h, w, kind=media_kind, second_per_grid=SECONDS_PER_GRID)  # type: ignore[arg-type]
    frame_count = t * vision_spec.temporal_patch_size if media_kind == "video" else 1
    pixel_planes = torch.randint(
        0,
        256,
        (frame_count, h * w, vision_spec.in_channels, vision_spec.patch_size**2),
        generator=generator,
        dtype=torch.uint8,
    )
    pixel_planes = pixel_planes.transpose(2, 3).flatten(2)  # colours last

    placeholder_id = spec.image_token_id if media_kind == "image" else spec.video_token_id
    token_ids = []
    for placeholder_run in placeholder_runs([media_grid], spec):
        if placeholder_run.kind == "video" and vision_spec.video_timestamps:
            token_ids += random_text_ids(spec, 4, generator).tolist()
        token_ids += [
            spec.vision_start_token_id,
            *([placeholder_id] * placeholder_run.num_tokens(vision_spec.spatial_merge_size)),
            spec.vision_end_token_id,
        ]

    return torch.tensor(token_ids), MediaItem(grid_thw=media_grid, planes=pixel_planes)
