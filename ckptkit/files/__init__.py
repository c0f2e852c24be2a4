"""What lies on disk: sources, the safetensors container, checkpoints, their digests; how bytes pass."""
