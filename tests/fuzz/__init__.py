"""A search for files and tensors that break the library: ``make fuzz``; CONTRIBUTING.md says how to use it."""
