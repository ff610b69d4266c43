"""Passes that pin nodes of an ONNX model before the rules decide."""
