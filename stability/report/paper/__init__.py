"""Pictures for papers, with the numbers they show as CSV."""
