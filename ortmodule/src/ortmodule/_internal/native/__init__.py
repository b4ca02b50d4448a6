"""The extensions, CUDA libraries and kernel table that ONNX Runtime needs before its import."""
