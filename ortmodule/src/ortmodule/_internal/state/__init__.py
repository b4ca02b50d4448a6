"""State that a graph does not contain: buffers, attributes, Python values, autograd."""
