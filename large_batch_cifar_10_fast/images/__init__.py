"""Where images come from: CIFAR-10, a .npz file, or shapes drawn in memory."""
