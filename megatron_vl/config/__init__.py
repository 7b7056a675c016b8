"""The config of a run: its fields, how they are read, and which values are refused."""

# ruff: noqa: F401  # other packages import these names from here

from megatron_vl.config.checks import validate_config
from megatron_vl.config.fields import (
    CALLS_WITHOUT_ACTIVATIONS,
    FEATURE_ROWS_ON_DEVICE,
    RANDOM_WEIGHTS,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FailuresConfig,
    Fp8Config,
    LogConfig,
    LoraConfig,
    LossOn,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfigError,
    TrainConfig,
    VisionConfig,
    field_types,
)
from megatron_vl.config.parsing import build_parser, parse_config, parse_or_exit
