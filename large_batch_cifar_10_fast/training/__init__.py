"""What trains: norm, optimisers, the world of processes, compilation."""
