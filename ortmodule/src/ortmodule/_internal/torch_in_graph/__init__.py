"""Operators and layers that PyTorch computes inside ONNX Runtime's graph."""
