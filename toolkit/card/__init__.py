"""``megatron-vl card``: speed and memory of a model, and its losses beside those of ``transformers``.

:mod:`.measure` puts the card together. It times the model with :mod:`toolkit.bench`. Then :mod:`.curves`
trains the same random weights on the same batches here and in ``transformers``. :mod:`.conversations` writes
what they learn, and :mod:`.page` shows the card.
"""
