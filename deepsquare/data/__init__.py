"""Data: spirals, CIFAR-10, and batches of images that fit into memory."""
