"""Many training runs at once, resumable: in local processes or on a Ray cluster."""
