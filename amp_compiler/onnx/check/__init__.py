"""ONNX models run on batches: calibration before a conversion, and verification after it. It knows no rules."""
