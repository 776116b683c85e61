"""What `benchmarks/peers.py` compares: the workloads, and one file for each contender."""
