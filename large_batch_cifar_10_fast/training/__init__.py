"""What trains: norm, optimisers, shards and augmentation, the world of processes, compilation."""
