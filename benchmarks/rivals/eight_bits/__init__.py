"""The CPU encoder in eight bits, and ONNX Runtime as its rival."""
