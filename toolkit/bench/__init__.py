"""Measures speed, memory, and the time of each part of a step, for real-size models with random weights.

The trainer runs the steps; hooks time them (:mod:`.measure`) and their parts (:mod:`.step_parts`).
"""
