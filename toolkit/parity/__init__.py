"""Any layout against ``transformers``: loss, logits, what each layer gives, gradients; or a short training.

``compare`` prepares pictures, weights and the reference and starts the groups. ``batches`` draws samples,
``reference`` runs them one by one through the Hugging Face model (``stored``: in a process of its own),
``worker`` runs them packed through the real multi-process program and compares, ``training`` takes optimizer
steps. ``activations`` watches layers on both sides, ``places`` names them.
"""
