"""Compares any layout with ``transformers``: loss, logits, layer outputs and gradients, or a short training.

``compare`` prepares images and weights, and starts the processes. ``reference`` runs and trains the Hugging
Face model, and ``reference_job`` writes the result to a folder. ``case`` has the trainer build and train a
layout, and ``worker`` compares it with the reference: ``training`` the state after some steps,
``activations`` the output of each layer.
"""
