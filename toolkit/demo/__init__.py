"""Runs and checks the whole path on a laptop: small checkpoint, photographs, TP x PP training, and export."""
