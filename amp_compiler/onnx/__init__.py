"""ONNX files: converted, exported, planned."""
