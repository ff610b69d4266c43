"""What cuDNN does for recurrent networks, by torch on a CPU, so that it can be tried without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from amp_compiler.ops.cuda.cudnn_rnn import Form, Layout

ALIGNED = 8  # elements: the weights do not fill their buffer
FRESH, USED = 17, 99  # bytes of what a forward keeps, before and behind the backward that uses it up


class StandIn:
    """All matrices, then all biases, each on a multiple of 8 elements; the backward writes into what it is given.

    Args:
        types: that it knows.
    """

    device = "cuda"

    def __init__(self, types=(torch.float32, torch.float64, torch.float16, torch.bfloat16)):
        self.types, self.calls, self.reserves = types, [], []

    def available(self):
        return True

    def layout(self, form: Form):
        if form.dtype not in self.types:
            return "CUDNN_STATUS_NOT_SUPPORTED"
        sizes = [torch.Size(shape).numel() for shape in form.shapes]
        offsets, end = [0] * len(sizes), ALIGNED
        for dims in (2, 1):
            for place in [place for place, shape in enumerate(form.shapes) if len(shape) == dims]:
                offsets[place] = end
                end += -(-sizes[place] // ALIGNED) * ALIGNED
        return Layout(end, tuple(offsets))

    def reserve_size(self, form, steps, batch):
        return 3 * steps * batch * form.hidden * form.layers * form.directions + 5

    def forward(self, form, data, flat, h, c, keeps):
        self.calls.append(("forward", form, keeps))
        with torch.no_grad():
            out, *last = self._run(form, data, self.layout(form).views(form, flat), h, c)
        size = self.reserve_size(form, *data.shape[:2]) if keeps else 0
        reserve = torch.full((size,), FRESH, dtype=torch.uint8)
        self.reserves.append(reserve.data_ptr())
        return out.contiguous(), last[0], last[1] if c is not None else h.new_empty(0), reserve

    def backward(self, form, inputs, out, gradients, reserve):
        self.calls.append(("backward", form, True))
        self.reserves.append(reserve.data_ptr())
        assert len(reserve) and bool((reserve == FRESH).all()), "used up, or never kept"
        reserve.fill_(USED)
        with ThreadPoolExecutor(1) as pool:  # within an operator this thread records no gradients
            return pool.submit(self._gradients, form, inputs, gradients).result()

    def _gradients(self, form, inputs, gradients):
        data, flat, h, c = inputs
        leaves = [one.detach().requires_grad_() for one in (data, flat, h, c) if one is not None]
        with torch.enable_grad():
            cell = leaves[3] if c is not None else None
            results = self._run(form, leaves[0], self.layout(form).views(form, leaves[1]), leaves[2], cell)
        made = list(torch.autograd.grad(results, leaves, gradients[: len(results)]))
        return made[0], made[2], made[3] if c is not None else h.new_empty(0), made[1]

    def _run(self, form, data, weights, h, c):
        options = (True, form.layers, 0.0, True, form.bidirectional, False)
        wide = torch.float32 if form.dtype in (torch.bfloat16, torch.float16) else form.dtype
        data, h, *weights = (one.to(wide) for one in (data, h, *weights))
        if form.kind == "lstm":
            found = torch.ops.aten.lstm.input(data, [h, c.to(wide)], weights, *options)
        else:
            found = getattr(torch.ops.aten, form.kind).input(data, h, weights, *options)
        return [one.to(form.dtype) for one in found]
