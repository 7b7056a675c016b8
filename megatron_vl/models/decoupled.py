"""The vision tower on every rank (``vision.placement: decoupled``).

Ahead of the pipeline, the tp x cp x pp ranks of a data-parallel replica encode the images of the whole step
together, without keeping activations, and send the features to the first stage. There they are autograd
leaves. After the pipeline's backward pass, their gradients go back to the ranks that encoded them. Each rank
runs its images forward once more and then backward. The gradients of the weights are summed over all ranks
of the run. Kimi K2.5 was trained in this way.

Images stay within their replica, whose loader holds their pixels. Batches are planned so that replicas have
about equally many patches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_vl.config import CALLS_WITHOUT_ACTIVATIONS, VisionConfig
from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.models.fp8_linear import renew_fp8_weights
from megatron_vl.models.frame_shares import Array, TowerFrames, split_by_cost
from megatron_vl.models.vision_language import TowerEverywhere
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.process_groups import current_groups, group_of_this_rank
from megatron_vl.spec.families import VisionSpec


@dataclass
class StepVision:
    """The images of a step, as one rank needs them: the rank's share of them, and the sizes of all shares."""

    device_rows: list[DeviceRow]
    features_per_rank: list[int]
    """Number of features that each rank of the replica computes, by rank in the replica's group."""
    features_per_row: list[int]
    """Number of features of each row; under context parallelism, of this rank's part of it."""
    local_frames: TowerFrames
    plane_bounds: Array
    """int64 [F, 2]: for each frame of the share, its first plane and the one after its last."""
    share: VisionInput
    """The whole share, without the lengths of its longest segments."""
    features_of_part: list[int] = field(default_factory=list)
    """Under context parallelism, the number of features that each context-parallel rank needs."""
    part_order: Tensor | None = None
    """Under context parallelism, on the first rank of the replica: int64 [N] on the device, all features
    sorted by the rank that needs them."""

    @property
    def has_images(self) -> bool:
        """Whether any rank of the replica has an image."""
        return any(self.features_per_rank)

    def tower_inputs(self, patches_per_input: int) -> Iterator[tuple[VisionInput, slice]]:
        """Cuts the share into tower inputs of about ``patches_per_input`` patches. Frames are not cut.

        Yields:
            An input, and its slice of the share's patches.
        """
        frame_patches = self.local_frames.patches_per_frame
        frame_bounds = split_by_cost(frame_patches, max(1, -(-int(frame_patches.sum()) // patches_per_input)))
        for frame_begin, frame_end in zip(frame_bounds[:-1], frame_bounds[1:], strict=True):
            if frame_begin < frame_end:
                yield self._tower_input(int(frame_begin), int(frame_end))

    def _tower_input(self, frame_begin: int, frame_end: int) -> tuple[VisionInput, slice]:
        """The tower input of a range of the share's frames, and its slice of the share's patches."""
        first_patch, first_window = self.local_frames.first_patch, self.local_frames.first_window
        patch_slice = slice(int(first_patch[frame_begin]), int(first_patch[frame_end]))
        window_slice = slice(int(first_window[frame_begin]), int(first_window[frame_end]))
        first_plane = int(self.plane_bounds[frame_begin:frame_end, 0].min())
        end_plane = int(self.plane_bounds[frame_begin:frame_end, 1].max())

        # Bounds and plane numbers count from the start of the share. The first input needs no change,
        # which saves three kernels in a step of one input.
        frame_cu_seqlens = self.share.full_segments.cu_seqlens[frame_begin : frame_end + 1]
        window_bounds = slice(window_slice.start, window_slice.stop + 1)
        window_cu_seqlens = self.share.window_segments.cu_seqlens[window_bounds]
        if frame_begin:
            frame_cu_seqlens = frame_cu_seqlens - patch_slice.start
            window_cu_seqlens = window_cu_seqlens - patch_slice.start

        tower_input = self.share.cut(
            slice(first_plane, end_plane),
            patch_slice,
            Segments(frame_cu_seqlens, int(self.local_frames.patches_per_frame[frame_begin:frame_end].max())),
            Segments(window_cu_seqlens, int(self.local_frames.patches_per_window[window_slice].max())),
        )
        return tower_input, patch_slice


class RowFeatures:
    """The features of one row on the first stage, [N, 1 + levels, H], and later their gradient."""

    def __init__(self, features: Tensor, is_trained: bool) -> None:
        # A leaf of the pipeline's autograd graph: its backward pass ends here and leaves the gradient.
        self.features = features.detach().requires_grad_(is_trained)

    def for_pipeline(self) -> Tensor:
        """The features on the device, with an autograd graph if the tower is trained."""
        return self.features

    def gradient(self) -> Tensor:
        """The gradient on the device, after the backward pass."""
        return torch.zeros_like(self.features) if self.features.grad is None else self.features.grad


class DecoupledTower:
    """Runs this rank's tower on the images of a step.

    Each method is one part of a step, which ``megatron-vl bench`` times.
    """

    def __init__(
        self, tower_module: TowerEverywhere, vision_spec: VisionSpec, vision_config: VisionConfig
    ) -> None:
        self.module, self.vision, self.config = tower_module, vision_spec, vision_config
        self.group = current_groups().replica_group
        self.cp_group = mpu.get_context_parallel_group()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.on_first_stage = mpu.get_pipeline_model_parallel_rank() == 0
        self.ddp: ReplicaDDP | None = None
        """Reduces the gradients over all ranks of the run; None if no weight of the tower is trained."""
        self.on_backward_call: Callable[[], None] = lambda: None
        """Called before each call of the backward pass, when the pipeline has freed its memory."""
        self.keep_features: Callable[[Sequence[Tensor], bool], list[RowFeatures]] = lambda rows, is_trained: [
            RowFeatures(features, is_trained) for features in rows
        ]
        """Keeps the features of a step's rows for the pipeline; they are parts of one tensor."""
        self._step_vision: StepVision | None = None
        self._kept_features: list[tuple[list[Tensor], slice]] = []
        """Features whose autograd graph was kept, so that their patches do not run forward twice. Each entry
        also has its slice of the share's patches."""

    def wrap(self, ddp_config: DistributedDataParallelConfig) -> None:
        """Wraps the tower in DDP over all ranks of the run, if any of its weights is trained."""
        if any(parameter.requires_grad for parameter in self.module.parameters()):
            self.ddp = ReplicaDDP(
                self.module.config, ddp_config, self.module, pg_collection=tower_process_groups()
            )

    def encode(self, step_rows: Sequence[DeviceRow], is_training: bool) -> None:
        """Computes the features of a step and attaches them to the rows of the first stage.

        Collective over the replica.
        """
        step_vision = step_rows[0].step_vision
        if is_training and self.ddp is not None:
            self.ddp.zero_grad_buffer()
        if step_vision is None:
            return

        # Above frozen blocks, only the mergers have activations, and those of all patches are kept.
        keeps_activations = is_training and self.ddp is not None and self.module.vision_model.is_frozen
        step_features = self._empty_features(step_vision)
        if step_vision.has_images:
            renew_fp8_weights(self.module)
            step_features = self.to_first(self.forward(step_vision, keeps_activations), step_vision)

        if self.on_first_stage:
            features_by_row = step_features.split(step_vision.features_per_row)
            kept_features = self.keep_features(features_by_row, is_training and self.ddp is not None)
            for device_row, row_features in zip(step_vision.device_rows, kept_features, strict=True):
                device_row.vision_features = row_features
        self._step_vision = step_vision if is_training else None

    def forward(self, step_vision: StepVision, keeps_activations: bool) -> Tensor:
        """The features of this rank's share, [n, 1 + levels, H].

        Without activations it runs in larger inputs, and once more in the backward pass.
        """
        patches_a_call = self.config.patches_a_call * (1 if keeps_activations else CALLS_WITHOUT_ACTIVATIONS)
        feature_parts = []
        with torch.set_grad_enabled(keeps_activations):
            for tower_input, patch_slice in step_vision.tower_inputs(patches_a_call):
                levels = self.module.vision_model(tower_input)
                if keeps_activations:
                    self._kept_features.append((levels, patch_slice))
                feature_parts.append(torch.stack([level.detach() for level in levels], 1))

        if not feature_parts:
            return self._empty_features(step_vision)
        return torch.cat(feature_parts) if len(feature_parts) > 1 else feature_parts[0]

    def _empty_features(self, step_vision: StepVision) -> Tensor:
        """No features, [0, 1 + levels, H]."""
        shape = 0, 1 + len(self.vision.deepstack_layers), self.vision.out_hidden_size
        return torch.empty(
            shape, dtype=self.module.config.params_dtype, device=step_vision.share.planes.device
        )

    def to_first(self, local_features: Tensor, step_vision: StepVision) -> Tensor:
        """The features of all ranks of the replica, in rank order, on its first stage; empty elsewhere.

        Under context parallelism, each rank of that stage gets those of its part of each row.
        """
        all_features = exchange_with_first(
            local_features, step_vision.features_per_rank, self.group, should_gather=True
        )
        if self._exchanges_parts:
            if step_vision.part_order is not None:
                all_features = all_features.index_select(0, step_vision.part_order)
            all_features = exchange_with_first(
                all_features, step_vision.features_of_part, self.cp_group, should_gather=False
            )
        # Only the first tensor rank has received the features; the others need the same ones.
        if self.on_first_stage and self.tp_group.size() > 1:
            if self.tp_group.rank():
                all_features = local_features.new_empty(
                    sum(step_vision.features_per_row), *local_features.shape[1:]
                )
            dist.broadcast(all_features, src=dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return all_features

    def backward(self) -> None:
        """Computes the gradients of the tower's weights and reduces them (:meth:`reduce`).

        Collective over the run. Call it after the pipeline's backward pass.
        """
        step_vision, self._step_vision = self._step_vision, None
        if self.ddp is None:
            return

        if step_vision is not None and step_vision.has_images:
            # The gradients go back to the ranks that encoded the features.
            local_gradient = self.to_owners(self._collect_gradients(step_vision), step_vision)

            if not self._kept_features:
                for tower_input, patch_slice in step_vision.tower_inputs(self.config.patches_a_call):
                    self.backward_call(self.run_forward_again(tower_input), patch_slice, local_gradient)
            # ``pop`` frees the memory of each entry before the next call.
            while self._kept_features:
                self.backward_call(*self._kept_features.pop(), local_gradient)

        self.reduce()

    def reduce(self) -> None:
        """Sums the gradients over the run. Ranks without images take part in it too."""
        assert self.ddp is not None
        self.ddp.finish_grad_sync()

    def run_forward_again(self, tower_input: VisionInput) -> list[Tensor]:
        """Runs one input forward again, with an autograd graph for its backward pass."""
        return self.module.vision_model(tower_input)

    def backward_call(self, input_features: list[Tensor], patch_slice: slice, local_gradient: Tensor) -> None:
        """Runs the backward pass of one input."""
        self.on_backward_call()
        merge_unit = self.vision.merge_unit
        input_gradient = local_gradient[patch_slice.start // merge_unit : patch_slice.stop // merge_unit]
        torch.autograd.backward(input_features, list(input_gradient.unbind(1)))

    def _collect_gradients(self, step_vision: StepVision) -> Tensor:
        """The gradients of all features, on the rank that owns the loader; empty elsewhere.

        Rows no longer hold their features or gradients afterwards.
        """
        no_gradients = self._empty_features(step_vision)
        row_gradients = no_gradients
        # All tensor-parallel ranks of the first stage have the same gradients, so one of them sends.
        sends_gradients = self.on_first_stage and not self.tp_group.rank()
        if sends_gradients:
            # Filled row by row, because the rows' gradients beside all of them would be twice the memory.
            row_gradients = no_gradients.new_empty(sum(step_vision.features_per_row), *no_gradients.shape[1:])
        parts = row_gradients.split(step_vision.features_per_row) if sends_gradients else ()
        for number, device_row in enumerate(step_vision.device_rows):
            features, device_row.vision_features = device_row.vision_features, None
            if sends_gradients:
                parts[number].copy_(features.gradient())
        if self._exchanges_parts:
            row_gradients = exchange_with_first(
                row_gradients, step_vision.features_of_part, self.cp_group, should_gather=True
            )
            if step_vision.part_order is not None:
                row_gradients = torch.empty_like(row_gradients).index_copy_(
                    0, step_vision.part_order, row_gradients
                )
        return row_gradients if self.group.rank() == 0 else no_gradients

    @property
    def _exchanges_parts(self) -> bool:
        """Whether this rank exchanges features and their gradients with other context-parallel ranks."""
        return self.cp_group.size() > 1 and self.on_first_stage and not self.tp_group.rank()

    def to_owners(self, all_gradients: Tensor, step_vision: StepVision) -> Tensor:
        """The gradients of this rank's features, [n, 1 + levels, H]."""
        return exchange_with_first(
            all_gradients, step_vision.features_per_rank, self.group, should_gather=False
        )


def tower_process_groups() -> ProcessGroupCollection:
    """The process groups of a tower that every rank holds whole: all ranks are data-parallel ranks."""
    groups_of_one = ("tp", "pp", "cp", "mp", "ep", "tp_ep_pp", "expt_tp", "expt_dp")
    return ProcessGroupCollection(
        dp=dist.group.WORLD,
        dp_cp=dist.group.WORLD,
        **dict.fromkeys(groups_of_one, group_of_this_rank()),
        # With the distributed optimizer, the gradient norm is summed over the slices of all ranks, as for the
        # language model.
        intra_dist_opt=mpu.get_intra_distributed_optimizer_instance_group(),
    )


def exchange_with_first(
    local_part: Tensor, rank_sizes: Sequence[int], process_group: dist.ProcessGroup, *, should_gather: bool
) -> Tensor:
    """Gathers the ranks' parts on the first rank of a group, or scatters them from there.

    Args:
        local_part: this rank's part if parts are gathered. If they are scattered, all parts on the first
            rank, and an empty tensor elsewhere.
        rank_sizes: length of each rank's part in dim 0.

    Returns:
        If gathered, all parts on the first rank, and an empty tensor elsewhere. If scattered, this rank's
        part.
    """
    if process_group.size() == 1:
        return local_part

    rank = process_group.rank()
    # What the first rank exchanges with each rank, and what this rank exchanges with the first one.
    splits_of_first = list(rank_sizes) if rank == 0 else [0] * len(rank_sizes)
    splits_with_first = [rank_sizes[rank], *[0] * (len(rank_sizes) - 1)]
    send_splits, receive_splits = (
        (splits_with_first, splits_of_first) if should_gather else (splits_of_first, splits_with_first)
    )

    # One exchange with empty splits, because NCCL has no gather or scatter of parts of unequal length.
    received_part = local_part.new_empty(sum(receive_splits), *local_part.shape[1:])
    dist.all_to_all_single(
        received_part, local_part.contiguous(), receive_splits, send_splits, group=process_group
    )
    return received_part
