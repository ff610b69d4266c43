"""Between an ONNX model and the neutral graph: lowering, pins, and the way of a plan back."""
