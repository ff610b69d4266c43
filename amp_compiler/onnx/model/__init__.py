"""An ONNX model in memory and on disk."""
