"""Estimates a run's memory before it starts, and checks that its model can be built."""
