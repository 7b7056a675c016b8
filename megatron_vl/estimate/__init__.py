"""What a run will cost: FLOPs, memory and time of each pipeline stage, computed without starting anything."""
