"""`FakeGraphs`: what `TorchGraphs` does, in plain Python on any device, to test the bookkeeping around it.

As with a CUDA graph, recording executes nothing (its results are garbage until the first replay), and a replay does the
recorded work on the recorded tensors, whatever the caller holds by then.
"""

import torch


class FakeGraphs:
    """Args: fails: message of an error that every capture ends in; half_way: whether the step was recorded by then."""

    def __init__(self, fails: str = "", half_way: bool = False) -> None:
        self.fails, self.half_way = fails, half_way
        self.log: list[str] = []

    def refuses(self, device):
        return ""

    def warm_up(self, run, inputs):
        self.log.append("warm_up")
        return run(*inputs)

    def capture(self, run, inputs):
        self.log.append("capture")
        if self.fails and not self.half_way:
            raise RuntimeError(self.fails)
        outputs = _recorded(run, inputs)
        if self.fails:
            raise RuntimeError(self.fails)

        def replay():
            self.log.append("replay")
            with torch.no_grad():
                for output, value in zip(outputs, run(*inputs), strict=True):
                    if isinstance(output, torch.Tensor) and output.data_ptr() != value.data_ptr():
                        output.copy_(value)

        return replay, outputs


def _recorded(run, inputs):
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = run(*inputs)
        finally:
            for tensor, old in zip(tensors, before, strict=True):
                if 0 not in tensor.stride():  # a batch that was expanded; steps do not write to batches
                    tensor.copy_(old)
        addresses = {tensor.data_ptr() for tensor in tensors}
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.data_ptr() not in addresses:
                output.fill_(float("nan") if output.is_floating_point() else 99)
    return outputs
