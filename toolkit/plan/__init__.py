"""What can be known of a run before it starts: its memory, and whether its model can be built."""
