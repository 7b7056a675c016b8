"""Compares any layout with ``transformers``: loss, logits, layer outputs and gradients.

``compare`` prepares images and weights, and starts the processes. ``reference`` runs the Hugging Face
model, and ``reference_job`` writes the result to a folder. ``case`` has the trainer build a layout, and
``worker`` compares it with the reference, ``activations`` the output of each layer.
"""
