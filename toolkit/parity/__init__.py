"""Compares any layout with ``transformers``: loss, logits, layer outputs and gradients; or a short training.

``compare`` prepares pictures, weights and the reference and starts the groups. ``batches`` draws samples.
``reference`` runs them one by one through the Hugging Face model (``stored`` does so in a separate process).
``worker`` runs them packed through the real multi-process program and compares. ``training`` takes optimizer
steps. ``activations`` records layer outputs on both sides, and ``locations`` names the layers.
"""
