"""What is decided on: element types, the neutral graph and its text, the plan. No torch, no ONNX."""
