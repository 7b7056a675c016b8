"""Vision tower, language model and the two joined."""
