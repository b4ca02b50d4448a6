"""Export of a model to ONNX, checked against PyTorch."""
