"""Names of tensors: templates, patterns, rename rules."""
