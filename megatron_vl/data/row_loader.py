"""The rows of one data-parallel rank as an iterator whose state can be saved and loaded.

Batches are planned (see :mod:`megatron_vl.data.planned_rows`), so a state does not depend on ranks or
workers.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

from megatron.energon.errors import FatalSampleError

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.batch_planner import count_finished_draws
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.planned_rows import PlannedRankRows, PlanningContext
from megatron_vl.data.sample.stop_tokens import serving_notes
from megatron_vl.data.source.blend import blend_change_lines, read_saved_sources, summarize_blend
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.state_json import LoaderStateError, state_from_json, state_to_json
from megatron_vl.spec.families.hf_folder import describe_template_digest
from megatron_vl.system.json_files import check_format_version

STATE_VERSION = 1
"""Version of a state's format, of the order of samples and of the planning of rows, which its constants
determine."""
PIXEL_FIELDS = tuple(
    "min_pixels max_pixels video_min_pixels video_max_pixels video_fps video_max_frames".split()
)
COUNTED_SAMPLES = 1000, 10_000
"""Least and largest number of samples by whose rows passes are counted. The latter take half a second."""
PROCESSOR_PREFIX = "processor."
"""Begins the names of an identity's settings of pixels that are not fields of ``data``."""
RESUME_EARLIER_ADVICE = "go back to an earlier checkpoint with `megatron-vl checkpoint rollback`"
ADVICE_BY_FIELD = {
    "pixels": f"set data.{', data.'.join(f for f in PIXEL_FIELDS if f != 'video_min_pixels')} back",
    "chat_template": "give the chat template that the run began with (that of data.chat_template stands in"
    " run.json, among the fields)",
    "tokenizer": "give the tokenizer that the run began with",
}

FORMER_VALUES = {"learnt": "trained"}
"""How states of version 0.2.0 name a value."""
NEW_FIELDS: dict[str, Any] = {"too_long": None, "template_arguments": {}}
"""Fields that states of version 0.2.0 do not have, and the value that made their rows; None: the run's value
holds from where it resumes."""


class RowLoader(Iterator[TrainingRow]):
    """Iterator over the rows of one data-parallel rank. All ranks plan the same batches.

    Args:
        loader_identity: the settings that determine the rows, as JSON values.
        dp_rank, dp: this data-parallel rank, and the number of such ranks.
    """

    def __init__(
        self,
        planning_context: PlanningContext,
        loader_identity: dict[str, Any],
        dp_rank: int,
        dp: int,
        data_config: DataConfig,
    ) -> None:
        self._planning_context, self._data_config = planning_context, data_config
        self._identity = loader_identity
        self._dp_rank, self._dp = dp_rank, dp
        self._change_lines: list[str] = []
        self._start_row = 0
        self._is_closed = False
        self._rank_rows: PlannedRankRows | None = None

    def __next__(self) -> TrainingRow:
        if self._is_closed:
            raise LoaderError("the loader is closed")
        # An error of a loader process comes with that process's traceback, which says nothing to a user.
        try:
            # Processes start with the first row, because a state may be loaded before it.
            if self._rank_rows is None:
                self._rank_rows = PlannedRankRows(
                    self._planning_context,
                    *(self._dp_rank, self._dp, self._data_config.num_workers, self._start_row),
                )
            return next(self._rank_rows)
        except (FatalSampleError, LoaderError) as error:
            raise LoaderError(_without_traceback(str(error))) from error

    def count_steps(self) -> int:
        """Number of steps until the data end, from the loaded state. Plans all of them."""
        batch_planner, steps = self._planning_context.make_planner(), 0
        while not batch_planner.is_at_end:
            batch_planner.next_batch()
            steps += 1
        return steps

    def count_passes(self, steps: int) -> float | None:
        """How often the first steps of a run draw each sample, on average; None: the data have no passes.

        Plans some of the steps: those that read all samples, within :data:`COUNTED_SAMPLES`.

        Raises:
            LoaderError: no sample can be used.
        """
        batch_planner = self._planning_context.make_planner()
        pass_size = batch_planner.sample_order.pass_size
        least, most = COUNTED_SAMPLES
        counted_samples = min(max(pass_size, least), most) if pass_size else 1
        planned_steps = samples = 0
        while planned_steps < steps and samples < counted_samples:
            batch_planner.next_batch()
            planned_steps += 1
            samples = sum(count_finished_draws(batch_planner.planner_state()).values())
        return steps / planned_steps * samples / pass_size if pass_size else None

    @property
    def row_settings(self) -> dict[str, Any]:
        """The fields of ``data`` that determine the rows, with the values that hold for the model."""
        settings = self._identity | dict(zip(PIXEL_FIELDS, self._identity["pixels"], strict=True))
        # The text, because the file that a run was given may change or move.
        chat_encoder = self._planning_context.row_encoder.chat_encoder
        settings["chat_template"] = chat_encoder.chat_template if chat_encoder.given_template else ""
        return {f.name: settings[f.name] for f in dataclasses.fields(DataConfig) if f.name in settings}

    @property
    def model_folder_settings(self) -> dict[str, Any]:
        """What comes from the folder of the model, for messages: digests, and settings of the processor."""
        return {
            "chat template": describe_template_digest(self._identity["chat_template"]),
            "tokenizer": self._identity["tokenizer"],
            **{name: value for name, value in self._identity.items() if name.startswith(PROCESSOR_PREFIX)},
        }

    @property
    def start_notes(self) -> list[str]:
        """Lines to print once at the start of a run."""
        notes = serving_notes(self._planning_context.row_encoder.chat_encoder)
        if long_samples := self._planning_context.make_planner().long_samples():
            fate = "cut, or left out if they cannot be" if self._identity["too_long"] == "cut" else "left out"
            notes += [f"{long_samples}; they are {fate}"]
        return [
            *summarize_blend(self._planning_context.blend_sources),
            *self._change_lines,
            *(f"NOTE: {note}" for note in notes),
        ]

    @property
    def source_passes(self) -> dict[str, float]:
        """How many passes over each source of the blend were made, by its key; on data-parallel rank 0.

        It counts what was drawn up to the last whole step, and not what was drawn ahead of it.
        """
        planner_state = (self._rank_rows or self._planning_context).planner_state
        finished = count_finished_draws(planner_state) if planner_state is not None else {}
        return {
            source.source_key: finished.get(source.source_key, 0) / max(source.sample_count, 1)
            for source in self._planning_context.blend_sources
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks' loaders as JSON values; on data-parallel rank 0.

        After :meth:`load_state_dict`, the next row is the one that would come next here.

        Raises:
            LoaderStateError: this rank has not taken all its rows of a step.
        """
        rank_rows = self._rank_rows
        return {
            "identity": self._identity,
            # Version 0.2.0 names what has changed at a resume, and reads no state without them.
            "num_workers": self._data_config.num_workers,
            "ranks": self._dp,
            "rows_per_step": self._planning_context.rows_per_step,
            "rows": rank_rows.total_rows_taken if rank_rows else self._start_row,
            "planner": state_to_json((rank_rows or self._planning_context).planner_state),
        }

    def load_state_dict(self, saved_state: dict[str, Any]) -> None:
        """Continues where data-parallel rank 0 saved its state, on any number of ranks and workers.

        Call it before the first row.

        Raises:
            LoaderStateError: the state belongs to another data set or to other packing, or rows were already
                read.
        """
        if self._rank_rows is not None:
            raise LoaderStateError("a loader state must be loaded before the first row is read")
        try:
            self._check_saved_state(saved_state)
            planner_state = state_from_json(saved_state["planner"])
            self._note_blend_change(
                saved_state["identity"].get("dataset"), (planner_state or {}).get("drawn", ())
            )
            self._planning_context.planner_state = planner_state
            # Damage is found here, and not by the processes that plan.
            self._planning_context.make_planner()
            self._start_row = int(saved_state["rows"])
            if self._identity["too_long"] == "cut" and "too_long" not in saved_state["identity"]:
                self._change_lines.append(
                    "conversations longer than a row are cut at whole exchanges from here on; version 0.2.0"
                    " left them out, as data.too_long: drop does"
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            is_known = isinstance(error, LoaderStateError)
            if is_known and "damaged" not in str(error):
                raise
            damage = str(error) if is_known else f"the loader state is damaged ({error!r})"
            raise LoaderStateError(f"{damage}; {RESUME_EARLIER_ADVICE}") from error

    def _check_saved_state(self, saved_state: dict[str, Any]) -> None:
        saved_identity = saved_state.get("identity", {})
        check_format_version(
            "the loader state",
            *(saved_identity.get("version"), self._identity["version"]),
            "resume with the program that saved it",
            LoaderStateError,
        )

        for field_name, current_value in self._identity.items():
            if field_name in NEW_FIELDS and field_name not in saved_identity:
                saved_value = current_value if NEW_FIELDS[field_name] is None else NEW_FIELDS[field_name]
            else:
                saved_value = saved_identity.get(field_name)
            saved_value = FORMER_VALUES.get(str(saved_value), saved_value)
            if field_name != "dataset" and saved_value != current_value:
                advice = ADVICE_BY_FIELD.get(field_name, f"set data.{field_name} back")
                if field_name.startswith(PROCESSOR_PREFIX):
                    advice = "give the files of the image and video processor that the run began with"
                raise LoaderStateError(
                    f"the loader state was saved with {field_name} = {saved_value!r}, this loader has"
                    f" {current_value!r} and would not make the same rows; {advice}"
                )

    def _note_blend_change(self, saved_dataset: Any, drawn_keys: Collection[str]) -> None:
        """Notes what changes in the blend, the only difference with which a run may go on."""
        old_sources = read_saved_sources(saved_dataset)
        new_sources = self._planning_context.blend_sources
        if not {one.source_key for one in old_sources} & {one.source_key for one in new_sources}:
            old_names, new_names = (
                ", ".join(f"{one.source_name} ({one.sample_count:,} samples)" for one in sources)
                for sources in (old_sources, new_sources)
            )
            raise LoaderStateError(
                f"the loader state was saved with another data set: {old_names or 'data that cannot be read'}"
                f" before, {new_names} now; give the data set that the run began with, or"
                " another checkpoint.dir"
            )
        if change_lines := blend_change_lines(old_sources, new_sources, drawn_keys):
            self._change_lines.append("the blend has changed; from here on:")
            self._change_lines += [f"  {line}" for line in change_lines]

    def close(self) -> None:
        self._is_closed = True
        if self._rank_rows is not None:
            self._rank_rows.close()


def _without_traceback(error_message: str) -> str:
    """The message of an error without the lines that torch adds, which hold a traceback."""
    pattern = r"^[\w.]*(?:FatalSampleError|LoaderError): ([^\n]+)"
    return str([error_message, *re.findall(pattern, error_message, re.MULTILINE)][-1])
