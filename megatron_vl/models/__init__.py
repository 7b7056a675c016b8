"""The vision tower, the language model, and the model that joins them."""
