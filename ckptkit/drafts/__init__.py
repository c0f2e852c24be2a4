"""What is known of self-drafting layers: their tensors, the engines that load them, what they cost. No I/O."""
