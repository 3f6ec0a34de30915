"""Lightning loggers: our own records, which are the truth, and W&B as a view of them."""
