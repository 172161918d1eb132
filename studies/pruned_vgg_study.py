"""Counts the operations of a backward by scan through a pruned VGG-11, product by product.

    python studies/pruned_vgg_study.py

This is figure 10 of Wang, Bai and Pekhimenko (MLSys 2020): the convolutional layers of VGG-11 for images of 32 x 32
pixels, with 97 % of the weights pruned. Nothing is trained: weights are drawn, and which of them are pruned is drawn,
too, so that each layer keeps 3 %. The picture is in docs/scan.md.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from convergence.pictures import Curve, Panel, draw
from penstock.scan.chains import scan_list
from penstock.scan.sparse import Pattern, layer_jacobian

ROOT = Path(__file__).parents[1]
VGG_11: tuple[int | str, ...] = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
"""The channels of each convolution; M is a maximum pooling."""
IMAGE = (3, 32, 32)
PRUNED = 0.97
LEVELS = {False: 3, True: 2}
"""Without and with the zeros of an image, the most levels that are counted. A fourth joins nothing but the gradient."""
DRAWN = (1, 2)
"""Levels of the pictures. The hybrid of the authors' code has two."""
PAIRS_AT_ONCE = 2**23
"""Pairs of entries that meet, of rows whose product is found at once."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two Jacobians, or of a Jacobian and the gradient."""

    kind: str
    """``mm`` for two matrices, ``mv`` for a matrix and a vector."""
    dense: int
    """The multiplications that it would take without zeros."""
    flops: int
    critical: bool = False
    """Whether it is on the path of dependent products that takes the most operations."""


@dataclass(frozen=True, slots=True)
class Element:
    """A part of the chain: the pattern of its Jacobian, or of a gradient, and how it was made."""

    pattern: Pattern
    path: tuple[int, ...] = ()
    """The products, by number, that must be done one after the other before this is there."""
    flops: int = 0
    """Of that path."""


class Recorder:
    """Puts elements of a chain together, and counts."""

    def __init__(self) -> None:
        self.products: list[Product] = []

    def then(self, earlier: Element, later: Element) -> Element:
        """``later @ earlier``: `earlier` is nearer to the loss."""
        left, right = later.pattern, earlier.pattern
        vector = right.shape[1] == 1
        # A gradient has no zeros.
        flops = 2 * left.entries if vector else meeting(left, right)
        self.products.append(Product("mv" if vector else "mm", left.shape[0] * left.shape[1] * right.shape[1], flops))
        found = column(left.shape[0]) if vector else product_pattern(left, right)
        before = max(earlier, later, key=lambda element: element.flops)
        return Element(found, (*before.path, len(self.products) - 1), before.flops + flops)


@dataclass(frozen=True, slots=True)
class Count:
    """All products of a backward."""

    name: str
    products: tuple[Product, ...]

    @property
    def flops(self) -> int:
        """The operations of all products together."""
        return sum(product.flops for product in self.products)

    @property
    def critical_flops(self) -> int:
        """The operations of the products that must be done one after the other."""
        return sum(product.flops for product in self.products if product.critical)


def count(name: str, patterns: Sequence[Pattern], levels: int | None) -> Count:
    """The products of a backward through layers with Jacobians of these `patterns`, the first layer first.

    `levels`: of the up-sweep; 0 is step by step, None all of them.
    """
    recorder = Recorder()
    chain = [Element(column(patterns[-1].shape[1])), *map(Element, reversed(patterns))]
    after = scan_list(chain, recorder.then, levels)
    # The gradient of the input of the chain, too, as a chain of layers in a model needs it.
    ends = [*after, recorder.then(after[-1], chain[-1])] if after else []
    critical = set(max(ends, key=lambda element: element.flops).path) if ends else set()
    return Count(
        name,
        tuple(
            Product(product.kind, product.dense, product.flops, number in critical)
            for number, product in enumerate(recorder.products)
        ),
    )


def column(rows: int) -> Pattern:
    """A vector without zeros."""
    return Pattern((rows, 1), torch.arange(rows), torch.zeros(rows, dtype=torch.long))


def meeting(left: Pattern, right: Pattern) -> int:
    """The operations of a product: each entry on the left meets those of one row on the right."""
    return 2 * int(right.starts.diff()[left.columns].sum())


def product_pattern(left: Pattern, right: Pattern, pairs_at_once: int = PAIRS_AT_ONCE) -> Pattern:
    """Where the product may have entries. It is found for some rows at a time, which takes little memory."""
    meets = torch.cat([torch.zeros(1, dtype=torch.long), right.starts.diff()[left.columns].cumsum(0)])[left.starts]
    rows, columns, first = [], [], 0
    dense = dense_ones(right) if int(meets[-1]) > left.shape[0] * right.entries // 8 else None
    while first < left.shape[0]:
        last = int(torch.searchsorted(meets, meets[first] + pairs_at_once, right=True)) - 1
        last = min(max(last, first + 1), left.shape[0]) if dense is None else min(first + 512, left.shape[0])
        entries = slice(int(left.starts[first]), int(left.starts[last]))
        own = Pattern((last - first, left.shape[1]), left.rows[entries] - first, left.columns[entries])
        found = _meeting_places(own, right) if dense is None else (dense_ones(own) @ dense).nonzero()
        rows.append(found[:, 0] + first)
        columns.append(found[:, 1])
        first = last
    return Pattern((left.shape[0], right.shape[1]), torch.cat(rows), torch.cat(columns))


def dense_ones(pattern: Pattern) -> Tensor:
    """1 where there may be an entry."""
    return pattern.dense(torch.ones(pattern.entries))


def _meeting_places(left: Pattern, right: Pattern) -> Tensor:
    met = right.starts.diff()[left.columns]
    ends = met.cumsum(0)
    entries = torch.repeat_interleave(right.starts[left.columns] - (ends - met), met) + torch.arange(int(met.sum()))
    marks = torch.zeros(left.shape[0], right.shape[1], dtype=torch.bool)
    marks[torch.repeat_interleave(left.rows, met), right.columns[entries]] = True
    return marks.nonzero()


def build(shape: Sequence[int | str] = VGG_11, channels: int = IMAGE[0], pruned: float = PRUNED) -> nn.Sequential:
    """Convolutions of 3 x 3, each with a ReLU, and poolings. Each convolution keeps the same share of its weights."""
    layers: list[nn.Module] = []
    for each in shape:
        if isinstance(each, str):
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, each, 3, padding=1)
        with torch.no_grad():
            # So that activations keep their size.
            nn.init.normal_(convolution.weight, std=(2 / (9 * channels * (1 - pruned))) ** 0.5)
            numbers = torch.randperm(convolution.weight.numel())[: round(pruned * convolution.weight.numel())]
            convolution.weight.view(-1)[numbers] = 0
        layers += [convolution, nn.ReLU()]
        channels = each
    return nn.Sequential(*layers)


def patterns_of(model: nn.Sequential, image: Tensor, *, of_image: bool) -> list[Pattern]:
    """The patterns of the Jacobians of all layers. `of_image`: only entries that are not zero for `image` (C, H, W)."""
    found, inputs = [], image.unsqueeze(0)
    for layer in model:
        outputs = layer(inputs).detach()
        known = layer_jacobian(layer, tuple(inputs.shape[1:]), pruned=True)
        pattern = known.pattern
        if of_image:
            kept = known.values(inputs, outputs).expand(1, -1)[0] != 0
            pattern = Pattern(pattern.shape, pattern.rows[kept], pattern.columns[kept])
        found.append(pattern)
        inputs = outputs
    return found


def plain_backward(model: nn.Sequential, image: Tensor, *, pruned: bool) -> Count:
    """Backpropagation by the gradient operators of the layers. They use the zeros of weights only if `pruned`."""
    products, inputs = [], image.unsqueeze(0)
    for layer in model:
        outputs = layer(inputs).detach()
        size, made = inputs.numel(), outputs.numel()
        # A ReLU passes on or not; a pooling writes zeros, and each gradient to one place.
        flops = size if isinstance(layer, nn.ReLU) else size + made
        if isinstance(layer, nn.Conv2d):
            flops = 2 * entries_of(layer, tuple(inputs.shape[1:]), pruned=pruned)
        products.append(Product("mv", size * made, flops, critical=True))
        inputs = outputs
    return Count(f"backpropagation, {'pruned' if pruned else 'dense'} weights", tuple(products))


def entries_of(layer: nn.Conv2d, shape: tuple[int, ...], *, pruned: bool) -> int:
    """The entries of the Jacobian of a convolution of one group."""
    if pruned:
        return layer_jacobian(layer, shape, pruned=True).pattern.entries
    # Every pair of channels has as many.
    one = nn.Conv2d(1, 1, layer.kernel_size, layer.stride, layer.padding)
    return layer_jacobian(one, (1, *shape[1:])).pattern.entries * layer.in_channels * layer.out_channels


def counts_of(patterns: Sequence[Pattern], most_levels: int | None = None) -> list[Count]:
    """Step by step, and with each number of levels."""
    every = len(patterns).bit_length() - 1 if most_levels is None else most_levels
    names = ["step by step", *(f"scan of {levels} level{'s'[: levels > 1]}" for levels in range(1, every + 1))]
    return [count(name, patterns, levels) for levels, name in enumerate(names)]


def table(counts: Sequence[Count]) -> list[str]:
    """Rows of Markdown, in millions of operations."""
    rows = [
        "| method | products mm | mv | MFLOP in all | of the largest product | on the critical path |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for each in counts:
        kinds = [sum(product.kind == kind for product in each.products) for kind in ("mm", "mv")]
        numbers = [each.flops, max(product.flops for product in each.products), each.critical_flops]
        text = " | ".join(f"{number / 1e6:,.1f}" for number in numbers)
        rows.append(f"| {each.name} | {kinds[0]} | {kinds[1]} | {text} |")
    return rows


def picture(panels: dict[str, Count], plain: Count) -> str:
    """Figure 10 of the paper: operations of each product over those that it would take without zeros."""
    rows = []
    for title, found in panels.items():
        curves = [
            _dots("BP, dense weights", 3, plain.products, lambda product: True),
            *(
                _dots(f"{kind}{', critical' if critical else ''}", colour, found.products, chosen)
                for kind, critical, colour in (("mv", False, 5), ("mv", True, 2), ("mm", False, 6), ("mm", True, 1))
                for chosen in [partial(_is, kind, critical)]
            ),
        ]
        rows.append(Panel(title, tuple(curves), "m n k", "FLOP", log_x=True, log_y=True))
    return draw([rows], "Operations of each product of a backward by scan through a pruned VGG-11")


def _is(kind: str, critical: bool, product: Product) -> bool:
    return (product.kind, product.critical) == (kind, critical)


def _dots(name: str, colour: int, products: Sequence[Product], chosen: Callable[[Product], bool]) -> Curve:
    points = sorted((float(each.dense), float(each.flops)) for each in products if chosen(each))
    return Curve(name, colour, tuple((x, y, y, y) for x, y in points), joined=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "studies/results/pruned_vgg.md")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/pictures", help="the folder for the picture")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, image = build(), torch.randn(IMAGE)
    plain = [plain_backward(model, image, pruned=pruned) for pruned in (False, True)]
    lines, counts = [], {}
    for of_image, title in ((False, "All entries that may differ from zero"), (True, "Entries for one image")):
        counts[of_image] = counts_of(patterns_of(model, image, of_image=of_image), LEVELS[of_image])
        lines += [f"{title}:", "", *table([*plain, *counts[of_image]]), ""]
        print(*lines[-len(counts[of_image]) - 7 :], sep="\n", flush=True)
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text("\n".join(lines))
    panels = {f"{levels} level{'s'[: levels > 1]}": counts[True][levels] for levels in DRAWN}
    (options.pictures / "scan-pruned-vgg.svg").write_text(picture(panels, plain[0]))


if __name__ == "__main__":
    main()
