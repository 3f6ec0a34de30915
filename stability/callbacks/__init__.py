"""Lightning callbacks that take measurements, one subject each; none changes the run.

What every run records, they do not write: that is the recorder's.
"""
