"""What a graph needs before and behind its plan to become an ONNX file."""
