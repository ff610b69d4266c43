"""From a rewritten FX graph to an ONNX file."""
