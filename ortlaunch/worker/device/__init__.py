"""Training on a device: a run's model as ONNX Runtime's training artifacts, and their use.

Using the artifacts needs no PyTorch on a device; here PyTorch reads the recipe's data.
"""
