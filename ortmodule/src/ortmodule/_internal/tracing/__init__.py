"""Trace a model, and write the ONNX form of each operator."""
