"""The whole path on a laptop, checked: small checkpoint, photographs, TP x PP training, back
to Hugging Face."""
