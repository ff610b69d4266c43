"""From an ONNX model to an `nn.Module`."""
