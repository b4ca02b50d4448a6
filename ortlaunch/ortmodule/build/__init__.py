"""Extensions, CUDA libraries and kernels that ONNX Runtime needs before it is imported."""
