"""Speed of real-size models with random weights on a seeded workload."""
