"""What a step has measured, on its way to the host."""

from threading import Thread

import torch

from stability.probe.measurements import MeasurementBuffer


class _Interrupted(torch.Tensor):
    """Lets another thread add while it is being added."""

    between = staticmethod(lambda: None)

    def detach(self):
        other = Thread(target=self.between)
        other.start()
        other.join(timeout=60)
        assert not other.is_alive()
        return super().detach().as_subclass(torch.Tensor)


def test_threads_that_add_at_once_keep_each_name_with_its_value():
    """Attention and modules are measured by two probes; two threads had each other's values."""
    buffer = MeasurementBuffer()

    class Between(_Interrupted):
        between = staticmethod(lambda: buffer.add(["b"], torch.tensor([2.0])))

    buffer.add(["a", "c"], torch.tensor([1.0, 3.0]).as_subclass(Between))
    transfer = buffer.transfer(())
    assert transfer is not None
    assert transfer.result().metrics == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert buffer.transfer(()) is None
