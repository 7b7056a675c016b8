"""Loss and gradients of a layout against ``transformers``, parameter by parameter.

``batches`` draws samples, ``reference`` runs them one by one through the Hugging Face model, ``run`` runs them packed
through the real multi-process program and compares.
"""
