"""Training on a device: a run's model as ONNX Runtime's training artifacts, and what is done with those.

The artifacts need no PyTorch where they are used; here PyTorch reads the recipe's data.
"""
