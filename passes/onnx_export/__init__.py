"""What a graph needs to become an ONNX file."""
