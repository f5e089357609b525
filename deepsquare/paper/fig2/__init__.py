"""Figure 2: decision regions of a network with two hidden units."""
