"""Training: text to rows, the optimizer, one jitted step, the loop around it."""
