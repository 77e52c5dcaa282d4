"""Our own forward pass for some families."""
