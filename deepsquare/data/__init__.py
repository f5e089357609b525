"""Data: spirals, CIFAR-10, batches of images that fit into memory, and pictures that do not."""
