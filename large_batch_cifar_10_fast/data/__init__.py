"""Images: CIFAR-10, .npz files and synthetic shapes; shards, batches and augmentation."""
