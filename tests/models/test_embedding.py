"""Gradients of the embedding are added to the rows of its tokens, with the bits of the whole gradient."""

import pytest
import torch
import torch.nn.functional as F

from megatron_vl.models.embedding import add_to_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, vocabulary", [(1, 9), (40, 1000), (5000, 64)])
def test_rows_get_the_bits_of_the_whole_gradient(num_tokens: int, vocabulary: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    # As in rows with images, most tokens are the same one.
    token_ids = torch.randint(vocabulary, (num_tokens,), generator=generator)
    token_ids[num_tokens // 3 :] = vocabulary - 1
    vector_grads = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    earlier_grads = torch.randn(vocabulary, 24, generator=generator)

    weight = torch.zeros(vocabulary, 24, dtype=dtype, requires_grad=True)
    F.embedding(token_ids, weight).backward(vector_grads)
    assert weight.grad is not None
    expected = earlier_grads + weight.grad

    main_grad = earlier_grads.clone()
    add_to_rows(main_grad, token_ids, vector_grads)
    assert torch.equal(main_grad, expected)
