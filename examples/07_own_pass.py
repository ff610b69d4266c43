"""A pass of one's own in the pipeline: casts to FP16 that stop at 65504, where others overflow, and its stages.

python examples/07_own_pass.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

import amp_compiler as amp
from amp_compiler.passes.base import InPlacePass, PassResult

CAST, CLAMP = torch.ops.aten.to.dtype, torch.ops.aten.clamp.default
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class SaturateCasts(InPlacePass):
    """Bring what is cast from FP32 to FP16 into the range of FP16 first.

    Before::

        to: fp16[4] = aten.to.dtype(x, torch.float16)

    After::

        clamp: fp32[4] = aten.clamp.default(x, -65504.0, 65504.0)
        to: fp16[4] = aten.to.dtype(clamp, torch.float16)

    Left alone: casts to other types.
    """

    name: ClassVar[str] = "saturate_casts"
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        graph = subject.graph
        casts = [node for node in graph.find_nodes(op="call_function", target=CAST) if node.args[1] is torch.float16]
        for cast in casts:
            value = cast.args[0]
            with graph.inserting_before(cast):
                clamp = graph.call_function(CLAMP, (value, -LARGEST, LARGEST))
            clamp.meta["val"] = value.meta["val"]  # every node carries an example of its result, without data
            cast.args = (clamp, *cast.args[1:])
        if casts:
            subject.recompile()
        return PassResult(subject, bool(casts))


def main() -> dict[str, float]:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 100.0)
    x = torch.full((1, 4), 1000.0)

    plain = amp.compile(model, dtype="fp16", backend="eager")
    largest = {"plain": plain(x).item()}  # 400,000 in FP32

    forward = amp.pipelines.FORWARD.insert_after("legalize", SaturateCasts())
    saturating = amp.compile(model, dtype="fp16", backend="eager", passes=forward)
    largest["saturating"] = saturating(x).item()
    print(f"result: {largest['plain']} without the pass, {largest['saturating']} with it\n")

    for name, difference in saturating.stages.diffs():
        if name in ("apply_plan", "legalize", "saturate_casts"):
            print(f"--- {name}\n{difference}")
    try:
        amp.pipelines.FORWARD.skip("apply_plan")
    except amp.PassError as error:
        print(f"refused: {error}")
    return largest


if __name__ == "__main__":
    main()
