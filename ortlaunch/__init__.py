"""One recipe, one command: train a PyTorch model on ONNX Runtime from a laptop to a cluster."""

__version__ = "0.1.0"
