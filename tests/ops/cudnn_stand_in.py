"""What cuDNN does for recurrent networks, by torch on a CPU, so that it can be tried without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from amp_compiler.ops.cuda.cudnn_rnn import Form, Inputs

FRESH, USED = 17, 99  # bytes of what a forward keeps, before and behind the backward that uses it up


class StandIn:
    """The gradients of all weights lie in one buffer, and the backward writes into what it is given.

    Args:
        types: that it knows.
    """

    device = "cuda"

    def __init__(self, types=(torch.float32, torch.float64, torch.float16, torch.bfloat16)):
        self.types, self.calls, self.reserves = types, [], []

    def available(self):
        return True

    def reserve_size(self, form: Form, shapes, dtype, device):
        if dtype not in self.types:
            return "CUDNN_STATUS_NOT_SUPPORTED"
        (steps, batch, _), (parts, _, units), cell, *weights = shapes
        of_weights = [len(shape) for shape in weights[: form.each]]
        assert len(weights) == parts * form.each and of_weights == [2, 2, 1, 1, 2][: form.each]
        assert units == (form.projected or form.hidden) and (cell is not None) == (form.kind == "lstm")
        return 3 * steps * batch * form.hidden * parts + 5

    def forward(self, form, given: Inputs, keeps):
        self.calls.append(("forward", form, keeps))
        with torch.no_grad():
            out, *last = self._run(form, *given)
        shapes = tuple(None if one is None else tuple(one.shape) for one in (*given[:3], *given.weights))
        size = self.reserve_size(form, shapes, given.data.dtype, given.data.device) if keeps else 0
        reserve = torch.full((size,), FRESH, dtype=torch.uint8)
        self.reserves.append(reserve.data_ptr())
        return out.contiguous(), last[0], last[1] if given.c is not None else given.h.new_empty(0), reserve

    def backward(self, form, given, out, gradients, reserve):
        self.calls.append(("backward", form, True))
        self.reserves.append(reserve.data_ptr())
        assert len(reserve) and bool((reserve == FRESH).all()), "used up, or never kept"
        reserve.fill_(USED)
        with ThreadPoolExecutor(1) as pool:  # within an operator this thread records no gradients
            return pool.submit(self._gradients, form, given, gradients).result()

    def _gradients(self, form, given, gradients):
        flat = torch.cat([one.reshape(-1) for one in given.weights]).requires_grad_()
        data, h, c = (None if one is None else one.detach().requires_grad_() for one in given[:3])
        with torch.enable_grad():
            parts = flat.split([one.numel() for one in given.weights])
            weights = [part.view(one.shape) for part, one in zip(parts, given.weights, strict=True)]
            results = self._run(form, data, h, c, weights)
        leaves = [one for one in (data, h, flat, c) if one is not None]
        d_data, d_h, d_flat, *d_c = torch.autograd.grad(results, leaves, gradients[: len(results)])
        parts = d_flat.split([one.numel() for one in given.weights])
        views = [part.view(one.shape) for part, one in zip(parts, given.weights, strict=True)]
        return d_data, d_h, d_c[0] if d_c else given.h.new_empty(0), views

    def _run(self, form, data, h, c, weights):
        options = (True, form.layers, 0.0, True, form.bidirectional, False)
        dtype = data.dtype
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        data, h, *weights = (one.to(wide) for one in (data, h, *weights))
        if form.kind == "lstm":
            found = torch.ops.aten.lstm.input(data, [h, c.to(wide)], weights, *options)
        else:
            found = getattr(torch.ops.aten, form.kind).input(data, h, weights, *options)
        return [one.to(dtype) for one in found]
