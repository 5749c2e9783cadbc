"""Files: where a model is, on this machine or on the hub, and how its JSON and safetensors files are read."""
