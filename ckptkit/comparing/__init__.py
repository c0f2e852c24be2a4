"""Two checkpoints or two configs compared."""
