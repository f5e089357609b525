"""Tables 1 to 3: the vanilla CNN on CIFAR-10."""
