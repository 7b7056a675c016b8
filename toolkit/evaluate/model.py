"""The one adapter through which every checkpoint is asked: same data type, same pixel
limits, greedy decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.sample.chat import stop_tokens
from megatron_vl.data.sample.pixels import PixelError, VideoInfo, open_image, probe_video, video_frames
from megatron_vl.data.sample.thinking import Said, opens_thinking, split_thinking
from megatron_vl.spec.families import read_spec
from toolkit.hf import follow_video_positions, load_model, load_processor, video_text

Part = Mapping[str, Any]
"""VLMEvalKit's part of a message: ``{"type": "image" | "video" | "text", "value": path or text}``. A video
may give its number of frames (``nframes``), or frames per second (``fps``), and their size
(``resized_height`` and ``resized_width``)."""
Turn = Mapping[str, Any]
"""VLMEvalKit's turn of a dialogue: ``{"role": "user" | "assistant", "content": parts, or a text}``."""
Prompt = Sequence[Part] | Sequence[Turn]
"""One turn's parts in order, or the turns of a dialogue up to one of the user's."""


class Checkpoint:
    """A Hugging Face folder that answers prompts.

    Args:
        settings: ``dtype``, ``device`` (``cpu``, ``cuda`` or ``auto``: spread over the visible GPUs),
            ``min_pixels`` and ``max_pixels`` of a picture or frame (None: the checkpoint's own),
            ``max_new_tokens`` of an answer, and of one with thinking ``max_new_tokens_thinking`` (left out:
            the same), ``thinking`` (``on``, ``off``; None or left out: as the chat template does),
            ``largest_picture`` in pixels. For videos without their own settings: ``video_fps`` frames per
            second, at most ``video_max_frames`` (None or left out: the checkpoint's own). Rules for videos:
            ``video_positions`` and ``video_prompt`` (left out: ``released``).
        roots: folders from which pictures and videos may be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], roots: Sequence[Path]) -> None:
        from transformers import GenerationConfig

        self.roots = [root.resolve() for root in roots]
        self.largest = settings["largest_picture"]
        self.spec = read_spec(folder)
        self.prompt_rule = settings.get("video_prompt", "released")
        self.processor = load_processor(folder)
        size = self.processor.image_processor.size
        low = settings["min_pixels"] or size["shortest_edge"]
        high = settings["max_pixels"] or size["longest_edge"]
        self.processor.image_processor.size = {"shortest_edge": low, "longest_edge": high}
        self.frame_limits = (settings["min_pixels"], settings["max_pixels"])
        self.fps = settings.get("video_fps") or getattr(self.processor.video_processor, "fps", None) or 2.0
        if settings.get("video_max_frames"):
            self.processor.video_processor.max_frames = settings["video_max_frames"]
        device = settings["device"]
        self.model = load_model(
            folder, getattr(torch, settings["dtype"]), "auto" if device == "auto" else None
        )
        follow_video_positions(self.model, self.spec, settings.get("video_positions", "released"))
        if device != "auto":
            self.model.to(device)
        self.latest: tuple[Any, Any] = (None, None)
        # Released folders set sampling and a repetition penalty; only their end-of-answer tokens are kept.
        ends = stop_tokens(folder, self.processor.tokenizer)
        pad = self.model.generation_config.pad_token_id
        limit = settings["max_new_tokens"]
        limits = {False: limit, True: settings.get("max_new_tokens_thinking", limit)}
        common = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0] if pad is None else pad}
        self.generation = {
            thinks: GenerationConfig(max_new_tokens=most, **common) for thinks, most in limits.items()
        }
        thinking = settings.get("thinking")
        self.switch = {"enable_thinking": thinking == "on"} if thinking else {}

    def inputs(self, prompt: Prompt) -> Any:
        """The model's inputs: the prompt after the checkpoint's own processor and chat template."""
        return self._prepared(prompt)[0]

    def _prepared(self, prompt: Prompt) -> tuple[Any, bool]:
        """The model's inputs, and whether the answer begins by thinking."""
        images: list[Any] = []
        videos: list[tuple[Tensor, Any]] = []
        messages = []
        for turn in turns(prompt):
            content = [self._part(part, images, videos) for part in turn["content"]]
            messages.append({"role": turn["role"], "content": content})

        text = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.switch
        )
        text = video_text(text, self.processor, self.spec, self.prompt_rule)
        more: dict[str, Any] = {"images": images} if images else {}
        if videos:
            # Released folders do not limit the pixels of a frame, and transformers warns if no limit
            # is given.
            more |= {"do_sample_frames": False, "cap_pixels_per_frame": False}
            more |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [facts for _, facts in videos],
            }
            self._limit_frames(max(len(frames) for frames, _ in videos))

        inputs = self.processor(text=[text], return_tensors="pt", **more).to(self.model.device)
        return inputs, opens_thinking(text)

    def _part(self, part: Part, images: list[Any], videos: list[tuple[Tensor, Any]]) -> dict[str, str]:
        """Converts a part for the chat template; adds pictures and videos to their lists."""
        if part["type"] == "text":
            return {"type": "text", "text": str(part["value"])}
        if part["type"] == "image":
            images.append(self._picture(self._inside(part["value"])))
        elif part["type"] == "video" and isinstance(part["value"], str):
            videos.append(self._video(part))
        else:
            raise ValueError(
                f"a prompt holds {part['type']!r}; these models take text, and pictures and videos from files"
            )
        return {"type": part["type"]}

    def _inside(self, name: str) -> Path:
        path = Path(name)
        if not any(path.resolve().is_relative_to(root) for root in self.roots):
            raise ValueError(f"{path} is not inside the folder of the data set")
        return path

    def _picture(self, path: Path) -> Any:
        """Reads an RGB picture, in the formats and up to the size that the loader reads too."""
        with open_image(path.read_bytes(), self.largest) as image:
            return image.convert("RGB")

    def _video(self, part: Part) -> tuple[Tensor, Any]:
        """Sampled uint8 frames [n, 3, height, width] and their metadata. Consecutive questions often
        share a video."""
        key = tuple(part.get(name) for name in ("value", "nframes", "fps", "resized_height", "resized_width"))
        if self.latest[0] != key:
            self.latest = (key, self._read_video(part))
        return self.latest[1]

    def _read_video(self, part: Part) -> tuple[Tensor, Any]:
        from transformers.video_utils import VideoMetadata

        path = self._inside(part["value"])
        data = path.read_bytes()
        try:
            video = probe_video(data, self.largest)
            indices = self._indices(video, part)
            frames = video_frames(data, video, indices)
        except PixelError as error:
            raise PixelError(f"{path}: {error}") from error
        step = self.processor.video_processor.temporal_patch_size
        if len(indices) < step:
            indices = indices + indices[-1:] * (step - len(indices))
            frames = torch.cat([frames, frames[-1:].expand(step - len(frames), -1, -1, -1)])
        if part.get("resized_height") and part.get("resized_width"):
            from torchvision.transforms.v2 import InterpolationMode
            from torchvision.transforms.v2.functional import resize

            size = [int(part["resized_height"]), int(part["resized_width"])]
            frames = resize(frames, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
        return frames, VideoMetadata(total_num_frames=video.frames, fps=video.fps, frames_indices=indices)

    def _indices(self, video: VideoInfo, part: Part) -> list[int]:
        """The frames that the checkpoint's own video processor takes; a requested number is capped at what
        the video has."""
        from transformers.video_utils import VideoMetadata

        sampler = self.processor.video_processor
        step = sampler.temporal_patch_size
        if video.frames < step:
            return list(range(video.frames))
        if part.get("nframes"):
            asked = {"num_frames": max(min(int(part["nframes"]), video.frames) // step * step, step)}
        else:
            asked = {"fps": float(part.get("fps") or self.fps)}
        taken = sampler.sample_frames(VideoMetadata(total_num_frames=video.frames, fps=video.fps), **asked)
        return sorted({int(i) for i in taken})

    def _limit_frames(self, frames: int) -> None:
        """Applies ``min_pixels`` and ``max_pixels`` to each frame; Qwen3-VL's processor counts
        all frames together."""
        sampler = self.processor.video_processor
        times = frames if self.model.config.model_type.startswith("qwen3") else 1
        names = ("shortest_edge", "longest_edge")
        given = {name: limit * times for name, limit in zip(names, self.frame_limits, strict=True) if limit}
        if given:
            sampler.size = {name: sampler.size[name] for name in names} | given

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> dict[str, Any]:
        """Digests of all inputs and of all logits ``[tokens, vocabulary]``, and the last
        token's logits (float32)."""
        inputs = self.inputs(prompt)
        logits = self.model(**inputs, use_cache=False).logits[0]
        names = {name: digest(torch.as_tensor(value)) for name, value in inputs.items()}
        return {
            "inputs": names,
            "logits": digest(logits),
            "last": logits[-1].float().cpu(),
            "tokens": len(logits),
        }

    @torch.no_grad()
    def answer(self, prompt: Prompt) -> Said:
        """Generates the greedy answer to the last turn."""
        inputs, opened = self._prepared(prompt)
        tokens = self.model.generate(**inputs, generation_config=self.generation[opened])
        new = tokens[0, inputs["input_ids"].shape[1] :]
        return split_thinking(self.processor.decode(new, skip_special_tokens=True), opened)


def turns(prompt: Prompt) -> list[Turn]:
    """Converts a prompt into turns, each with a list of parts; the last turn is the user's."""
    if not prompt or "content" not in prompt[0]:  # a part may have a role too
        return [{"role": "user", "content": list(prompt)}]
    return [
        {"role": turn["role"], "content": [{"type": "text", "value": content}]}
        if isinstance(content := turn["content"], str)
        else turn
        for turn in prompt
    ]


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bits."""
    data = tensor.detach().cpu().contiguous()
    state = hashlib.sha256(f"{data.dtype} {list(data.shape)}".encode())
    state.update(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return state.hexdigest()
