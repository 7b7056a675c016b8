"""The whole path on a laptop: small checkpoint, real photographs, TP x PP training, and back to Hugging Face,
checked."""
