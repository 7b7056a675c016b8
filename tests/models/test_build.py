"""Random weights: padding is zero and stays so, and live modules agree with the tensor table."""

from __future__ import annotations

from tests.training.process import run_single
from tests.training.test_optimizer import STEP


def test_padding_stays_zero_under_training(tiny_checkpoint) -> None:
    """FFN width 107 in a width of 128: rows and columns beyond 107 are zero before and after steps with weight decay."""
    out = run_single(
        STEP
        + """
from megatron_vl.models.build import check_tensors, chunk_tensors
table = check_tensors(spec, layout, chunk_tensors(chunks, layout, 0))
def padding():
    p = dict(chunks[0].named_parameters())
    at = "vision_model.decoder.layers.1.mlp."
    fc1, bias, fc2 = (p[at + n] for n in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
    inside = float(fc1[:107].abs().sum() + fc1[128:235].abs().sum())
    return [float(x.abs().sum()) for x in (fc1[107:128], fc1[235:], bias[107:128], bias[235:], fc2[:, 107:])] + [inside]
before = padding()
for step in range(3):
    data = feed.next_step()
    set_learning_rates(optimizer, config, step)
    assert train_step(wrapped, optimizer, data.rows, grid, 256).updated
RESULT = [before, padding()]
""",
        HF=str(tiny_checkpoint("qwen2_5_vl")),
    )
    before, after = out
    assert before[:5] == after[:5] == [0.0] * 5
    assert before[5] > 0 and after[5] != before[5]
