"""State that a graph does not hold: buffers, attributes, Python values, autograd."""
