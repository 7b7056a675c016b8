"""Generates text from pictures, videos and prompts with Megatron weights in any tensor x pipeline
x expert layout.

``answers`` turns conversations into prompts and starts the processes; ``worker`` is what each of them runs.
"""
