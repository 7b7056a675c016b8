"""The rotary fields of a Hugging Face config: the places where they may stand, and YaRN.

transformers reads the language model's rotary fields from ``rope_scaling`` in the text config, or, if there
is none, from ``rope_parameters``. It does not see YaRN in the second place, or at the top of a nested config.
Here, YaRN counts wherever it stands.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vl.system.errors import UserError

PLACES = ("rope_scaling", "rope_parameters")
"""The names of a section of rotary fields, in the order in which transformers takes them."""
PLAIN_FIELDS = ("rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor")
"""Rotary fields that belong to the weights."""
YARN_FIELDS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "attn_factor"),
    *("beta_fast", "beta_slow"),
)
"""Fields of YaRN. transformers reads ``attention_factor``. vLLM instead multiplies the default by
``attn_factor``."""
_IGNORED_FIELDS = ("rope_type", "type", "finetuned")


class ConfigError(UserError, ValueError):
    """A Hugging Face config cannot be used. The message names the field and what would be valid."""


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (arXiv 2309.00071), which extends a model to rows longer than those of its pretraining."""

    factor: float
    """Low frequencies are divided by it."""
    original_length: int
    """Positions of the pretraining."""
    attention_factor: float
    """Cosine and sine are multiplied by it, as in transformers."""
    beta_fast: float = 32.0
    """Frequencies with more turns within ``original_length`` stay as they are."""
    beta_slow: float = 1.0
    """Frequencies with fewer turns within ``original_length`` are divided by the whole factor."""

    def ramp_bounds(self, rotary_dim: int, rope_theta: float) -> tuple[float, float]:
        """The index of the last frequency that stays, and of the first one that is divided by the factor.

        Reference: ``_compute_yarn_parameters`` of transformers (5.17 and 5.24).
        """

        def index_of(num_turns: float) -> float:
            turns_a_radian = self.original_length / (num_turns * 2 * math.pi)
            return rotary_dim * math.log(turns_a_radian) / (2 * math.log(rope_theta))

        low = max(math.floor(index_of(self.beta_fast)), 0)
        high = min(math.ceil(index_of(self.beta_slow)), rotary_dim - 1)
        return low, high + 0.001 if low == high else high

    def as_fields(self) -> dict[str, Any]:
        """The fields of a config, for transformers and vLLM."""
        fields: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_length,
        }
        betas = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        fields |= {name: value for name, value in betas.items() if value != getattr(YarnSpec, name)}
        default = _default_attention_factor(self.factor)
        if self.attention_factor != default:
            fields |= {
                "attention_factor": self.attention_factor,
                "attn_factor": self.attention_factor / default,
            }
        return fields


def _default_attention_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text fields of an HF config.

    Released Qwen2-VL and Qwen2.5-VL checkpoints have them at the top level. transformers 5.x nests them in
    ``text_config``.
    """
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def read_rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary fields: those of the place that transformers reads, and YaRN's from whichever has it."""
    text_fields = text_config(config)
    rope_fields = text_fields.get("rope_scaling") or text_fields.get("rope_parameters") or {}
    yarn_places = [fields for fields in _rope_places(config).values() if _rope_type(fields) == "yarn"]
    yarn_fields = {name: fields[name] for fields in yarn_places for name in YARN_FIELDS if name in fields}
    return {**rope_fields, **yarn_fields, "rope_type": "yarn"} if yarn_places else rope_fields


def _rope_places(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Place -> its rotary fields, for all places that have some."""
    return {
        f"{prefix}{name}": section[name]
        for prefix, section in {"": config, "text_config.": text_config(config)}.items()
        for name in PLACES
        if section.get(name)
    }


def _rope_type(fields: dict[str, Any]) -> str:
    """``yarn`` or ``default``: ``mrope`` is the default's name before transformers 4.45."""
    rope_type = fields.get("rope_type") or fields.get("type") or "default"
    return "default" if rope_type == "mrope" else rope_type


def check_rope_places(config: dict[str, Any]) -> None:
    """Raises ConfigError if one of the places for rope fields contradicts itself or another.

    Which of them counts depends on the program and its version, so that a wish in one of them would be lost.
    """
    places = _rope_places(config)
    for place, fields in places.items():
        _check_rope_type(place, fields)

    rope_fields, text_fields = read_rope_fields(config), text_config(config)
    for name in (*PLAIN_FIELDS, *YARN_FIELDS):
        # Beside the fields, transformers also saves its class's default, which counts only if they have none.
        value = rope_fields.get(name, text_fields.get(name) if name in PLAIN_FIELDS else None)
        for place, fields in places.items():
            must_have_it = name in YARN_FIELDS and _rope_type(fields) == "yarn"
            if fields.get(name, None if must_have_it else value) != value:
                raise ConfigError(
                    f"config.json: {name} is {fields.get(name)} in {place}, but {value} is read; make the"
                    " places of rope fields equal, or keep one"
                )


def _check_rope_type(place: str, fields: dict[str, Any]) -> None:
    names = [name for name in ("rope_type", "type") if fields.get(name) is not None]
    for name in names:
        if fields[name] not in ("mrope", "default", "yarn"):
            raise ConfigError(
                f"config.json: rope type {fields[name]!r} in {place}.{name} is not supported; valid:"
                " 'mrope', 'default', 'yarn'"
            )
    if len({_rope_type({"type": fields[name]}) for name in names}) > 1:
        raise ConfigError(
            f"config.json: {place} has rope_type {fields['rope_type']!r} and type {fields['type']!r}; make"
            " them equal, or remove type"
        )
    if _rope_type(fields) == "default" and (fields.get("factor") or 1) != 1:
        raise ConfigError(
            f"config.json: {place} has factor {fields['factor']}, but rope_type is not yarn, so that"
            " transformers would ignore it; set rope_type to yarn, or remove factor"
        )


def read_yarn(config: dict[str, Any]) -> YarnSpec | None:
    """Reads YaRN as ``transformers`` does; None if the config has none.

    Raises:
        ConfigError: a field is missing, unknown or impossible.
    """
    rope_fields = read_rope_fields(config)
    if rope_fields.get("rope_type") != "yarn":
        return None
    for fields in _rope_places(config).values():
        if _rope_type(fields) == "yarn":
            _refuse_unknown(fields)
    factor = _number(rope_fields, "factor", minimum=1.0)
    beta_fast = _number(rope_fields, "beta_fast", default=32.0)
    beta_slow = _number(rope_fields, "beta_slow", default=1.0)
    if beta_fast < beta_slow:
        raise ConfigError(
            f"config.json: beta_fast {beta_fast} of YaRN must be at least beta_slow {beta_slow}"
        )
    return YarnSpec(
        factor,
        _original_length(config, rope_fields),
        _attention_factor(rope_fields, factor),
        beta_fast,
        beta_slow,
    )


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    if unknown := sorted(set(fields) - {*PLAIN_FIELDS, *YARN_FIELDS, *_IGNORED_FIELDS}):
        valid = ", ".join(("rope_type", *YARN_FIELDS))
        raise ConfigError(f"config.json: field {unknown[0]!r} of YaRN is not supported; valid: {valid}")


def _number(
    fields: dict[str, Any], name: str, *, default: float | None = None, minimum: float = 0.0
) -> float:
    value: Any = default if fields.get(name) is None else fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value < math.inf or not value:
        least = f"of at least {minimum:g}" if minimum else "above 0"
        raise ConfigError(f"config.json: {name} {value} of YaRN must be a number {least}")
    return float(value)


def _original_length(config: dict[str, Any], rope_fields: dict[str, Any]) -> int:
    name, text_fields = "original_max_position_embeddings", text_config(config)
    given = [fields[name] for fields in (text_fields, rope_fields) if fields.get(name) is not None]
    length = given[0] if given else text_fields.get("max_position_embeddings")
    if any(value != length for value in given):
        raise ConfigError(
            f"config.json: {name} is {given[0]} in the text fields, but {given[1]} in the rope fields; make"
            " them equal, or keep one"
        )
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"config.json: {name} {length} of YaRN must be a whole number of at least 1: positions of the"
            " pretraining"
        )
    return length


def _attention_factor(rope_fields: dict[str, Any], factor: float) -> float:
    default = _default_attention_factor(factor)
    value = _number(rope_fields, "attention_factor", default=default)
    vllm_value = default * _number(rope_fields, "attn_factor", default=value / default)
    if not math.isclose(vllm_value, value, rel_tol=1e-6):
        raise ConfigError(
            f"config.json: attn_factor of YaRN, which vLLM reads, means an attention_factor of"
            f" {vllm_value:.7g}, but transformers reads {value:.7g}; make them agree, or remove attn_factor"
        )
    return value


def with_rope_scaling(config: dict[str, Any], rope_scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with other rotary fields in the one place that transformers and vLLM read.

    Args:
        rope_scaling: YaRN's fields, or ``{"rope_type": "default"}``. Rotary fields that belong to the weights
            may be repeated.

    Raises:
        ConfigError: a field is unknown, or contradicts one that belongs to the weights.
    """
    config = copy.deepcopy(config)
    text_fields, old_fields = text_config(config), read_rope_fields(config)
    _refuse_unknown(rope_scaling)
    for field, value in rope_scaling.items():
        old_value = old_fields.get(field, text_fields.get(field))
        if field in PLAIN_FIELDS and old_value not in (None, value):
            raise ConfigError(
                f"config.json: {field} {value} differs from {old_value}, with which the weights were trained;"
                " leave it out"
            )
    place = "rope_scaling" if text_fields.get("rope_scaling") else "rope_parameters"
    for section in (config, text_fields):
        for each in PLACES:
            section.pop(each, None)
    kept = {field: value for field, value in old_fields.items() if field in PLAIN_FIELDS}
    text_fields.pop("original_max_position_embeddings", None)
    # Both would have to be equal for vLLM, and transformers 5 needs only rope_type.
    rope_type = rope_scaling.get("rope_type", rope_scaling.get("type", "default"))
    given = {field: value for field, value in rope_scaling.items() if field != "type"}
    text_fields[place] = {**kept, **given, "rope_type": rope_type}
    return config


def serving_config(config: dict[str, Any], trained_rope: Mapping[str, Any]) -> dict[str, Any]:
    """A config from which transformers and vLLM read the rotary fields of a training.

    It is ``config`` itself if they do so already.

    Args:
        trained_rope: what :attr:`~megatron_vl.spec.families.base.LanguageSpec.rope_fields` was in training.
    """
    changed = with_rope_scaling(config, trained_rope)
    yarn, text_fields = read_yarn(changed), text_config(config)
    if yarn != read_yarn(config):
        return changed
    if yarn is None:
        return config
    read_there = text_fields.get("rope_scaling") or text_fields.get("rope_parameters") or {}
    has_yarn = all(read_there.get(name) == value for name, value in yarn.as_fields().items())
    # vLLM refuses a folder whose type is another.
    return config if has_yarn and read_there.get("type", "yarn") == "yarn" else changed
