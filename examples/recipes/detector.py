"""Digits are found in scenes: a single-shot detector (SSD, Liu et al., 2016) with its multibox loss.

Scenes of 24 x 24 pixels hold one or two handwritten digits of 8 to 16 pixels. Two maps of features, of 6 x 6 and of
3 x 3 places, have two square anchors at each place. An anchor that overlaps a digit by half is trained to name it and
to move to it; of the others, the three times as many that are most wrong are trained to name the background. As in SSD
there is no BatchNorm. The loss is a mean over as many anchors as 256 scenes have in SSD300, 8732 each; of which this
process has 16 scenes with 90 each, as one of many has. That makes most gradients of activations smaller than any number
in FP16, and the detector learns little; with a loss scale it learns as in FP32.

By default in BF16 it computes what `torch.autocast` does, to the bit, and comes out somewhat below FP32, as that does.
The rule that keeps both heads in FP32 was chosen with seeds from 100 on. What chance does is told by FP32 begun with
other first weights.

The quality is the mean over the ten digits of the average precision, where a box counts that overlaps by half.

    python examples/recipes/detector.py            # --short: a few steps
"""

import copy
import functools
import itertools

import torch
from classify import TRAINED, digits
from common import AUTOCAST, HEADS, MASTERS, NEITHER, Autocast, Options, Recipe, Training, five_ways, main
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

SIZE, MOST, CLASSES = 24, 2, 11  # pixels of a scene, digits in it, the digits and the background, which is 0
SCENES, JUDGED = 768, 512  # to learn from, and of the test
BATCH, NEGATIVES = 16, 3
ANCHORS_OF_ALL = 256 * 8732  # of which this process has BATCH * 90
MAPS = ((6, (9.0, 12.0)), (3, (13.0, 16.0)))  # places in a row, and the sides of the anchors
WIDTH = 32
SCALE = 5.0  # by which SSD multiplies the offsets of boxes; their sizes by as much
OVERLAP, SAME, KEPT = 0.5, 0.45, 40  # of a scene, the boxes that are surest
AGAIN = "FP32, begun otherwise"
APART = 2.0**-8  # by which part of it a first weight is another, where the training is begun otherwise
FP32_HEADS = {
    "version": 1,
    "extends": "default",
    "rules": [{"match": {"module": "heads.*"}, "precision": "fp32", "why": "what is read off as a box and a class"}],
}


@functools.cache
def anchors() -> torch.Tensor:
    """Middle and size of each, (90, 4), in the order of the network's outputs: place by place."""
    maps = []
    for places, sides in MAPS:
        middle = (torch.arange(places) + 0.5) * SIZE / places
        down, right, side = torch.meshgrid(middle, middle, torch.tensor(sides), indexing="ij")
        maps.append(torch.stack([right, down, side, side], -1).flatten(0, 2))
    return torch.cat(maps)


def overlaps(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes by middle and size; (..., N, 4) and (..., M, 4) to (..., N, M)."""
    first, second = one[..., :, None, :], two[..., None, :, :]
    begin = torch.maximum(first[..., :2] - first[..., 2:] / 2, second[..., :2] - second[..., 2:] / 2)
    end = torch.minimum(first[..., :2] + first[..., 2:] / 2, second[..., :2] + second[..., 2:] / 2)
    both = (end - begin).clamp(min=0).prod(-1)
    return both / (first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - both)


def scene(generator: torch.Generator, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An image (1, 24, 24), boxes by middle and size, and what they hold; of digits whose boxes hardly overlap."""
    images, labels = digits()
    image = 0.2 * torch.randn(1, SIZE, SIZE, generator=generator)
    boxes, held = torch.zeros(0, 4), []
    count = int(torch.randint(1, MOST + 1, (), generator=generator))
    for which in chosen[torch.randint(0, len(chosen), (count,), generator=generator)]:
        side = int(torch.randint(8, 17, (), generator=generator))
        left, top = torch.randint(0, SIZE - side + 1, (2,), generator=generator).tolist()
        box = torch.tensor([[left + side / 2, top + side / 2, side, side]])
        if len(boxes) and overlaps(box, boxes).max() > 0.05:
            continue
        digit = F.interpolate(images[which][None], size=(side, side), mode="bilinear")[0]
        image[:, top : top + side, left : left + side] += digit - images.min()
        boxes, held = torch.cat([boxes, box]), [*held, 1 + int(labels[which])]
    return image, boxes, torch.tensor(held)


def targets(boxes: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each anchor is to name, (90,), and how it is to move, (90, 4)."""
    shared = overlaps(anchors(), boxes)
    best, box = shared.max(1)
    own = shared.argmax(0)  # each box has the anchor that is nearest, however far
    best[own], box[own] = 1.0, torch.arange(len(boxes))
    there, here = boxes[box], anchors()
    moved = torch.cat([(there[:, :2] - here[:, :2]) / here[:, 2:] * 2, (there[:, 2:] / here[:, 2:]).log()], -1) * SCALE
    return torch.where(best >= OVERLAP, held[box], 0), moved


@functools.cache
def scenes(count: int, tested: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scenes with digits of the test alone, or with the others."""
    mixed = torch.randperm(len(digits()[0]), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(int(tested))
    return [scene(generator, mixed[TRAINED:] if tested else mixed[:TRAINED]) for _ in range(count)]


@functools.cache
def learnt() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, and what each anchor is to name and how to move."""
    aims = [targets(boxes, held) for _, boxes, held in scenes(SCENES, False)]
    return (torch.stack([image for image, *_ in scenes(SCENES, False)]), *map(torch.stack, zip(*aims, strict=True)))


def convolutions(*widths: int) -> nn.Sequential:
    """From each width to the next."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for pair in pairs for part in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU())))


class Detector(nn.Module):
    """Convolutions, and on two maps of features one each that names anchors and moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(
            convolutions(1, WIDTH), nn.MaxPool2d(2),
            convolutions(WIDTH, WIDTH), nn.MaxPool2d(2),
            convolutions(WIDTH, WIDTH, WIDTH),
        )  # fmt: skip
        self.far = nn.Sequential(nn.MaxPool2d(2), convolutions(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Conv2d(WIDTH, 2 * (CLASSES + 4), 3, padding=1) for _ in MAPS)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, 90, 11) and moves (N, 90, 4)."""
        near = self.near(images)
        outputs = [head(seen) for head, seen in zip(self.heads, (near, self.far(near)), strict=True)]
        flat = [one.permute(0, 2, 3, 1).reshape(len(images), -1, CLASSES + 4) for one in outputs]
        return torch.cat(flat, 1).split([CLASSES, 4], -1)


def multibox(model: nn.Module, images: torch.Tensor, named: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the anchors with a digit and of the hardest others, and how far the first are from their box."""
    logits, moves = model(images)
    losses = F.cross_entropy(logits.flatten(0, 1), named.flatten(), reduction="none").view_as(named)
    matched = named > 0
    rank = losses.detach().masked_fill(matched, 0.0).argsort(1, descending=True).argsort(1)
    hard = rank < NEGATIVES * matched.sum(1, keepdim=True)
    away = F.smooth_l1_loss(moves, moved, reduction="none").sum(-1)
    return (losses * (matched | hard) + away * matched).sum() / ANCHORS_OF_ALL


def detections(logits: torch.Tensor, moves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How sure, what and where, of the surest of each scene; (N, 40) twice, and (N, 40, 4).

    Of boxes of one digit that overlap the surest alone counts; the others are surely not (-1).
    """
    here, moves = anchors(), moves / SCALE
    boxes = torch.cat(
        [here[:, :2] + moves[..., :2] / 2 * here[:, 2:], here[:, 2:] * moves[..., 2:].clamp(max=4).exp()], -1
    )
    sure, order = logits.softmax(-1)[..., 1:].flatten(1).topk(KEPT)
    which, digit = order // (CLASSES - 1), 1 + order % (CLASSES - 1)
    boxes = boxes.gather(1, which[..., None].expand(-1, -1, 4))
    same = (overlaps(boxes, boxes) > SAME) & (digit[:, :, None] == digit[:, None])
    chosen = torch.ones_like(sure, dtype=torch.bool)
    for number in range(1, KEPT):
        chosen[:, number] = ~(same[:, number, :number] & chosen[:, :number]).any(1)
    return sure.where(chosen, -1.0), digit, boxes


def average_precision(right: torch.Tensor, there: int) -> float:
    """The area below the precision by recall; of boxes from the surest on, whether each is right, (N,)."""
    hits = right.cumsum(0)
    precision = hits / torch.arange(1, len(right) + 1)
    best = precision.flip(0).cummax(0).values.flip(0) if len(right) else precision
    return float((best * right).sum()) / max(there, 1)


@functools.cache
def judged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the test: images, boxes (N, 2, 4) and what they hold (N, 2), nothing (0) where a scene has one digit."""
    images, boxes, held = zip(*scenes(JUDGED, True), strict=True)
    sizes = [MOST - len(one) for one in held]
    boxes = [F.pad(one, (0, 0, 0, size)) for one, size in zip(boxes, sizes, strict=True)]
    return (
        torch.stack(images),
        torch.stack(boxes),
        torch.stack([F.pad(one, (0, n)) for one, n in zip(held, sizes, strict=True)]),
    )


@torch.no_grad()
def quality(model: nn.Module) -> float:
    """The mean of the average precision of the digits, in per cent."""
    judge, (images, there, held) = copy.deepcopy(model).float().eval(), judged()
    sure, digit, boxes = detections(*judge(images))
    shared, best = (overlaps(boxes, there) * (digit[..., None] == held[:, None])).max(-1)
    over, which = (
        (shared >= OVERLAP).flatten().tolist(),
        (best + MOST * torch.arange(len(best))[:, None]).flatten().tolist(),
    )
    named = digit.flatten().tolist()
    right: dict[int, list[bool]] = {number: [] for number in range(1, CLASSES)}
    taken: set[int] = set()
    for place in sure.flatten().argsort(descending=True, stable=True)[: int((sure >= 0).sum())].tolist():
        hit = over[place] and which[place] not in taken
        right[named[place]].append(hit)
        taken |= {which[place]} if hit else set()
    counts = held.flatten().bincount(minlength=CLASSES).tolist()
    return 10 * sum(average_precision(torch.tensor(right[number]).float(), counts[number]) for number in right)


def start(seed: int, options: Options) -> Training:
    """Beside those of `amp.training_step`: `autocast`, a type, and `apart`, of the first weights from the seed's."""
    torch.manual_seed(seed)
    model, data = Detector(), learnt()
    apart, low = (options.get(name) for name in ("apart", "autocast"))
    options = {name: value for name, value in options.items() if name not in ("apart", "autocast")}
    if apart:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + apart * torch.randn_like(weight))

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        chosen = torch.randint(0, SCENES, (BATCH,), generator=torch.Generator().manual_seed(100_000 * seed + number))
        return tuple(part[chosen] for part in data)

    optimizer = torch.optim.Adam(model.parameters(), 2e-3, eps=1e-14)
    if low:
        step = Autocast(model, multibox, optimizer, low)
    else:
        step = amp.training_step(model, multibox, optimizer, backend="eager", **options)
    return Training([step], [optimizer], batch, functools.partial(quality, model))


def ways(scale: float) -> dict[str, Options]:
    """The five, and what tells chance and BF16 apart."""
    return five_ways(scale) | {
        AGAIN: {"enabled": False, "apart": APART},
        AUTOCAST: {"autocast": torch.bfloat16},
        HEADS: {"dtype": "bf16", "rules": FP32_HEADS},
    }


RECIPE = Recipe(
    "detector",
    "A single-shot detector of digits",
    "mean average precision, %",
    start,
    length=500,
    fails=(NEITHER, MASTERS),
    ways=ways,
    seeds=6,
)

if __name__ == "__main__":
    main(RECIPE)
