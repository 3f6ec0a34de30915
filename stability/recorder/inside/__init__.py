"""What of the recorder runs in the process of somebody's training: it watches, and writes a spool.

It needs Python 3.9, torch 2.1 and the standard library, nothing of this package: a training may run
in another environment. `startup/sitecustomize.py` loads it there under a name of its own, so its
imports are relative. The spool is read, and the record of the run written, by the command that
started the training (`recorder.spooled`, `recorder.writer`).
"""
