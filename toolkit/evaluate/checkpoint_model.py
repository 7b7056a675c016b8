"""The one adapter through which every checkpoint is asked: same type, same pixel limits, greedy decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.sample.chat import read_stop_tokens
from megatron_vl.data.sample.pixels import PixelError, VideoInfo, decode_image, probe_video, video_frames
from megatron_vl.data.sample.thinking import GeneratedAnswer, opens_thinking, split_thinking
from megatron_vl.spec.families import read_spec
from toolkit.hf_loading import (
    apply_video_prompt,
    follow_video_positions,
    greedy_settings,
    load_hf_model,
    load_hf_processor,
)

PromptPart = Mapping[str, Any]
"""VLMEvalKit's part of a message: ``{"type": "image" | "video" | "text", "value": path or text}``. A video
may give its number of frames (``nframes``), or frames per second (``fps``), and their size
(``resized_height`` and ``resized_width``)."""
DialogueTurn = Mapping[str, Any]
"""VLMEvalKit's turn of a dialogue: ``{"role": "user" | "assistant", "content": parts, or a text}``."""
EvaluationPrompt = Sequence[PromptPart] | Sequence[DialogueTurn]
"""One turn's parts in order, or the turns of a dialogue up to one of the user's."""


class CheckpointModel:
    """A Hugging Face folder that answers prompts.

    Args:
        settings: ``dtype``, ``device`` (``cpu``, ``cuda`` or ``auto``: spread over the visible GPUs),
            ``min_pixels`` and ``max_pixels`` of a picture or frame (None: the checkpoint's own),
            ``max_new_tokens`` of an answer, and of one with thinking ``max_new_tokens_thinking`` (left out:
            the same), ``thinking`` (``on``, ``off``; None or left out: as the chat template does),
            ``largest_picture`` in pixels. For videos without their own settings: ``video_fps`` frames per
            second, at most ``video_max_frames`` (None or left out: the checkpoint's own).
        allowed_roots: folders from which pictures and videos may be read.
    """

    def __init__(self, hf_dir: Path, settings: Mapping[str, Any], allowed_roots: Sequence[Path]) -> None:
        self.allowed_roots = [root.resolve() for root in allowed_roots]
        self.max_picture_pixels = settings["largest_picture"]
        self.spec = read_spec(hf_dir)
        self.latest_video: tuple[Any, Any] = (None, None)
        thinking_mode = settings.get("thinking")
        self.thinking_switch = {"enable_thinking": thinking_mode == "on"} if thinking_mode else {}

        self.processor = load_hf_processor(hf_dir)
        processor_size = self.processor.image_processor.size
        self.processor.image_processor.size = {
            "shortest_edge": settings["min_pixels"] or processor_size["shortest_edge"],
            "longest_edge": settings["max_pixels"] or processor_size["longest_edge"],
        }
        self.frame_limits = (settings["min_pixels"], settings["max_pixels"])
        video_processor = self.processor.video_processor
        self.default_fps = settings.get("video_fps") or getattr(video_processor, "fps", None) or 2.0
        if settings.get("video_max_frames"):
            video_processor.max_frames = settings["video_max_frames"]

        device = settings["device"]
        device_map = "auto" if device == "auto" else None
        self.model = load_hf_model(hf_dir, getattr(torch, settings["dtype"]), device_map)
        follow_video_positions(self.model, self.spec)
        if device != "auto":
            self.model.to(device)
        self.generation_configs = self._generation_configs(hf_dir, settings)

    def _generation_configs(self, hf_dir: Path, settings: Mapping[str, Any]) -> dict[bool, Any]:
        """Settings of greedy answers without (False) and with thinking (True).

        Released folders set sampling and a repetition penalty; only their end-of-answer tokens are kept.
        """
        stop_token_ids = read_stop_tokens(hf_dir, self.processor.tokenizer)
        limit = settings["max_new_tokens"]
        return {
            False: greedy_settings(stop_token_ids, limit),
            True: greedy_settings(stop_token_ids, settings.get("max_new_tokens_thinking", limit)),
        }

    def model_inputs(self, prompt: EvaluationPrompt) -> Any:
        """The model's inputs: the prompt after the checkpoint's own processor and chat template."""
        return self._prepare_inputs(prompt)[0]

    def _prepare_inputs(self, prompt: EvaluationPrompt) -> tuple[Any, bool]:
        """The model's inputs, and whether the answer begins by thinking."""
        images: list[Any] = []
        videos: list[tuple[Tensor, Any]] = []
        messages = []
        for turn in prompt_turns(prompt):
            chat_content = [self._chat_part(part, images, videos) for part in turn["content"]]
            messages.append({"role": turn["role"], "content": chat_content})

        prompt_text = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.thinking_switch
        )
        prompt_text = apply_video_prompt(prompt_text, self.processor, self.spec)
        processor_arguments: dict[str, Any] = {"images": images} if images else {}
        if videos:
            # Released folders do not limit the pixels of a frame, and transformers warns without a limit.
            processor_arguments |= {"do_sample_frames": False, "cap_pixels_per_frame": False}
            processor_arguments |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [facts for _, facts in videos],
            }
            self._limit_frames(max(len(frames) for frames, _ in videos))

        model_inputs = self.processor(text=[prompt_text], return_tensors="pt", **processor_arguments).to(
            self.model.device
        )
        return model_inputs, opens_thinking(prompt_text)

    def _chat_part(
        self, part: PromptPart, images: list[Any], videos: list[tuple[Tensor, Any]]
    ) -> dict[str, str]:
        """Converts a part for the chat template, and adds pictures and videos to their lists."""
        if part["type"] == "text":
            return {"type": "text", "text": str(part["value"])}
        if part["type"] == "image":
            images.append(self._read_picture(self._allowed_path(part["value"])))
        elif part["type"] == "video" and isinstance(part["value"], str):
            videos.append(self._cached_video(part))
        else:
            raise ValueError(
                f"a prompt holds {part['type']!r}; these models take text, and pictures and videos from files"
            )
        return {"type": part["type"]}

    def _allowed_path(self, file_name: str) -> Path:
        path = Path(file_name)
        if not any(path.resolve().is_relative_to(root) for root in self.allowed_roots):
            raise ValueError(f"{path} is not inside the folder of the data set")
        return path

    def _read_picture(self, picture_path: Path) -> Any:
        """Reads an image as the loader does, up to the same size."""
        from torchvision.transforms.v2.functional import to_pil_image

        return to_pil_image(decode_image(picture_path.read_bytes(), self.max_picture_pixels))

    def _cached_video(self, part: PromptPart) -> tuple[Tensor, Any]:
        """Sampled uint8 frames [n, 3, height, width] and their metadata. Consecutive questions often
        share a video."""
        key = tuple(part.get(name) for name in ("value", "nframes", "fps", "resized_height", "resized_width"))
        if self.latest_video[0] != key:
            self.latest_video = (key, self._read_video(part))
        return self.latest_video[1]

    def _read_video(self, part: PromptPart) -> tuple[Tensor, Any]:
        from transformers.video_utils import VideoMetadata

        video_path = self._allowed_path(part["value"])
        video_bytes = video_path.read_bytes()
        try:
            video_info = probe_video(video_bytes, self.max_picture_pixels)
            frame_indices = self._frame_indices(video_info, part)
            sampled_frames = video_frames(video_bytes, video_info, frame_indices)
        except PixelError as error:
            raise PixelError(f"{video_path}: {error}") from error
        temporal_patch_size = self.processor.video_processor.temporal_patch_size
        num_missing = temporal_patch_size - len(frame_indices)
        if num_missing > 0:
            frame_indices = frame_indices + frame_indices[-1:] * num_missing
            repeated_frames = sampled_frames[-1:].expand(num_missing, -1, -1, -1)
            sampled_frames = torch.cat([sampled_frames, repeated_frames])
        if part.get("resized_height") and part.get("resized_width"):
            from torchvision.transforms.v2 import InterpolationMode
            from torchvision.transforms.v2.functional import resize

            frame_size = [int(part["resized_height"]), int(part["resized_width"])]
            sampled_frames = resize(
                sampled_frames, frame_size, interpolation=InterpolationMode.BICUBIC, antialias=True
            )
        return sampled_frames, VideoMetadata(
            total_num_frames=video_info.frame_count, fps=video_info.fps, frames_indices=frame_indices
        )

    def _frame_indices(self, video_info: VideoInfo, part: PromptPart) -> list[int]:
        """The frames that the checkpoint's own video processor takes, at most as many as the video has."""
        from transformers.video_utils import VideoMetadata

        video_processor = self.processor.video_processor
        temporal_patch_size = video_processor.temporal_patch_size
        if video_info.frame_count < temporal_patch_size:
            return list(range(video_info.frame_count))
        if part.get("nframes"):
            # A whole number of temporal patches, and at least one.
            num_patches = min(int(part["nframes"]), video_info.frame_count) // temporal_patch_size
            sampling_arguments = {"num_frames": max(num_patches, 1) * temporal_patch_size}
        else:
            sampling_arguments = {"fps": float(part.get("fps") or self.default_fps)}
        sampled_indices = video_processor.sample_frames(
            VideoMetadata(total_num_frames=video_info.frame_count, fps=video_info.fps), **sampling_arguments
        )
        return sorted({int(i) for i in sampled_indices})

    def _limit_frames(self, num_frames: int) -> None:
        """Applies ``min_pixels`` and ``max_pixels`` to each frame.

        Qwen3-VL's processor counts the pixels of all frames together, so its limits are multiplied.
        """
        video_processor = self.processor.video_processor
        frame_factor = num_frames if self.model.config.model_type.startswith("qwen3") else 1
        if any(self.frame_limits):
            new_size = {}
            for name, limit in zip(("shortest_edge", "longest_edge"), self.frame_limits, strict=True):
                new_size[name] = limit * frame_factor if limit else video_processor.size[name]
            video_processor.size = new_size

    @torch.no_grad()
    def logit_digests(self, prompt: EvaluationPrompt) -> dict[str, Any]:
        """Digests of all inputs and of all logits ``[tokens, vocabulary]``.

        Returns:
            {"inputs": input -> digest, "logits": digest, "last": float32 logits of the last token, "tokens"}.
        """
        model_inputs = self.model_inputs(prompt)
        logits = self.model(**model_inputs, use_cache=False).logits[0]
        input_digests = {}
        for name, value in model_inputs.items():
            input_digests[name] = tensor_digest(torch.as_tensor(value))
        return {
            "inputs": input_digests,
            "logits": tensor_digest(logits),
            "last": logits[-1].float().cpu(),
            "tokens": len(logits),
        }

    @torch.no_grad()
    def generate_answer(self, prompt: EvaluationPrompt) -> GeneratedAnswer:
        """Generates the greedy answer to the last turn."""
        model_inputs, begins_thinking = self._prepare_inputs(prompt)
        self.model.generation_config = self.generation_configs[begins_thinking]
        tokens = self.model.generate(**model_inputs)
        answer_ids = tokens[0, model_inputs["input_ids"].shape[1] :]
        return split_thinking(self.processor.decode(answer_ids, skip_special_tokens=True), begins_thinking)


def prompt_turns(prompt: EvaluationPrompt) -> list[DialogueTurn]:
    """Converts a prompt into turns, each with a list of parts. The last turn is the user's."""
    if not prompt or "content" not in prompt[0]:  # a part may have a role too
        return [{"role": "user", "content": list(prompt)}]

    turns: list[DialogueTurn] = []
    for turn in prompt:
        if isinstance(turn["content"], str):
            turn = {"role": turn["role"], "content": [{"type": "text", "value": turn["content"]}]}
        turns.append(turn)
    return turns


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bits."""
    host_tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{host_tensor.dtype} {list(host_tensor.shape)}".encode())
    digest.update(memoryview(host_tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
