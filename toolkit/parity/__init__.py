"""Compares any layout with ``transformers``: loss, logits, layer outputs and gradients, or a short training.

``compare`` prepares pictures, weights and the reference, and starts the groups of processes. ``batches``
makes random samples. ``reference`` runs samples one by one through the Hugging Face model; ``stored`` does so
in a separate process. ``worker`` packs the samples, runs them through the real multi-process program and
compares. ``training`` takes optimizer steps. ``activations`` records layer outputs on both sides, and
``locations`` names the layers.
"""
