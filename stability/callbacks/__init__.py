"""Lightning callbacks, one subject each; they take measurements and never change the run."""
