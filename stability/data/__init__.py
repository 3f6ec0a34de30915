"""Real text to batches of tokens, in an order that a seed alone decides."""
