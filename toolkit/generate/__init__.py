"""Answers prompts, and the prompts of a data set, with ``transformers``."""
