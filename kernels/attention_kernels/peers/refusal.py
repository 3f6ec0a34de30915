"""What a peer says where it can't compute a call: not installed, not built for it, not of its kind.

`peers` turns it into the error that a user sees, `status` into a reason. Leaves out when.
"""

__all__ = ["PeerRefusalError"]


class PeerRefusalError(RuntimeError):
    """A peer does not run here, or does not take this call; the message says why."""
