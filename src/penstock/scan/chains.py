"""A chain of small layers, ``torch.nn.Sequential``, whose backward is a scan over the Jacobians of its layers.

Layers may have different numbers of values, so each product is one of its own: algorithm 1 of Wang, Bai and Pekhimenko,
MLSys 2020, on a list. It pays only where layers are many and narrow: a Jacobian of a sample has as many numbers as the
inputs of its layer times the outputs.

Laws of this file:
  1. A layer runs once, in the forward, with a graph of autograd of its own. So what it draws, counts or decides is the
     same in the backward.
  2. Every backward compares the gradient that the scan finds before each layer with the one that the layer's own graph
     makes of the gradient behind it. What passes is backpropagation, whatever the layer does.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.arguments import check_arguments
from penstock.errors import PenstockError
from penstock.scan.scaled import TENSOR
from penstock.scan.sparse import LayerJacobian, layer_jacobian
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.modules import hooks_of
from penstock.torch_internals.tensors import gradient_hooks, times_written

E = TypeVar("E")
_MOST_BYTES = 2**30
_ELEMENTWISE = {
    *(nn.ELU, nn.GELU, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.PReLU, nn.ReLU6, nn.SELU, nn.SiLU),
    *(nn.Softplus, nn.Softsign, nn.AlphaDropout, nn.Dropout),
}
"""Layers whose Jacobian is what autograd makes of ones."""


def scan_list(elements: Sequence[E], then: Callable[[E, E], E], levels: int | None = None) -> list[E]:
    """What the elements before each place, in their order, are together: of all places but the first.

    ``then(earlier, later)`` puts two neighbours together. It must be associative, and need not be commutative. The
    identity, which stands before the first place, is never put together with anything. `levels`: of the up-sweep that
    are done; the rest goes step by step.
    """
    own, last = list(elements), len(elements) - 1
    most = max(last.bit_length() - 1, 0)
    levels = most if levels is None else min(levels, most)
    for level in range(levels):
        for earlier, later in _pairs(last, level):
            own[later] = then(own[earlier], own[later])
    before: list[Any] = [None] * len(own)
    ends = [min((block + 1) << levels, last + 1) - 1 for block in range(-(-(last + 1) >> levels))]
    for end, following in pairwise(ends):
        before[following] = own[end] if before[end] is None else then(before[end], own[end])
    for level in reversed(range(levels)):
        for earlier, later in _pairs(last, level):
            found = before[later]
            before[later] = own[earlier] if found is None else then(found, own[earlier])
            before[earlier] = found
    return before[1:]


def _pairs(last: int, level: int) -> list[tuple[int, int]]:
    """The places that a level puts together; the bounds include their ends."""
    firsts = range(0, last - (1 << level) + 1, 2 << level)
    return [(first + (1 << level) - 1, min(first + (2 << level) - 1, last)) for first in firsts]


class ScanSequential(nn.Sequential):
    """`torch.nn.Sequential` with a backward by parallel scan. Its parameters have the same names.

    Layers take and return one tensor whose dimension 0 counts samples, and treat each sample by itself. Jacobians of
    convolutions, poolings, Linear, ReLU, Tanh and Sigmoid follow from rules, and others come from autograd, which goes
    through such a layer once for each value that it returns for a sample.

    Args:
        layers: as of `torch.nn.Sequential`.
        most_bytes: that the Jacobians of a batch and their products may take.

    Raises:
        PenstockError: in the forward, where they would take more than `most_bytes`, and for a layer that returns no
            tensor of the same samples, reads tensors with gradients besides its parameters, has backward hooks, or
            writes into the input of the chain. In the backward, for a layer whose gradient is no product with a matrix
            of each sample: one that mixes samples, such as BatchNorm in training mode, or one that clips gradients.
    """

    def __init__(self, *layers: Any, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__(*layers)
        self.most_bytes = most_bytes
        self._jacobians: dict[tuple[nn.Module, tuple[int, ...]], LayerJacobian | None] = {}

    def jacobian_of(self, layer: nn.Module, shape: tuple[int, ...]) -> LayerJacobian | None:
        """The sparse Jacobian of a layer for samples of `shape`, whose pattern is found once; None if none is known."""
        key = layer, shape
        if key not in self._jacobians:
            try:
                self._jacobians[key] = layer_jacobian(layer, shape)
            except PenstockError:
                self._jacobians[key] = None
        return self._jacobians[key]

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last layer."""
        check_arguments("ScanSequential", {"input": TENSOR}, input=input)
        if not torch.is_grad_enabled() or not len(self):
            plain: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return plain
        found: Tensor = _ChainBackward.apply(self, input, *self.parameters())  # type: ignore[no-untyped-call]
        return found


class _Run(NamedTuple):
    """A layer that has run, and the graph from its input to its output."""

    name: str
    layer: nn.Module
    given: Tensor
    """A leaf. It requires a gradient if something before it does."""
    output: Tensor
    parameters: Sequence[tuple[Tensor, Tensor]]
    """Each that is trained, and the leaf that stood for it."""
    weight: Tensor | None
    """That of the layer at this time, for rules."""

    def sizes(self) -> tuple[int, int]:
        """The values of a sample before and behind the layer."""
        return math.prod(self.given.shape[1:]), math.prod(self.output.shape[1:])

    def jacobian(self) -> Tensor:
        """Transposed, (B, inputs, outputs), from autograd."""
        count = self.sizes()[1]
        ones = torch.eye(count, dtype=self.output.dtype, device=self.output.device)
        each = ones.view(count, 1, *self.output.shape[1:]).expand(count, *self.output.shape)
        try:
            rows = _differentiated([self], [each], [self.given], is_grads_batched=True)[self.given]
        except PenstockError:
            # Some operations, and those of users, take one gradient at a time.
            parts = [_differentiated([self], [one], [self.given])[self.given] for one in each]
            rows = None if parts[0] is None else torch.stack(parts)  # type: ignore[arg-type]
        if rows is None:
            return self.given.new_zeros(len(self.given), *self.sizes())
        return rows.reshape(count, len(self.given), -1).permute(1, 2, 0)


def _differentiated(
    runs: list[_Run], gradients: Sequence[Tensor], leaves: Sequence[Tensor], **options: bool
) -> dict[Tensor, Tensor | None]:
    """What autograd makes of the `gradients` of the outputs, in one backward. None where a leaf was not used."""
    try:
        # The graphs may be needed again, by a second backward through them.
        found = torch.autograd.grad(
            [run.output for run in runs], leaves, gradients, retain_graph=True, allow_unused=True, **options
        )
    except RuntimeError as error:
        for run, gradient in zip(runs, gradients if len(runs) > 1 else (), strict=False):
            # It names the one that fails.
            _differentiated([run], [gradient], leaves)
        raise PenstockError(
            f"ScanSequential: {runs[0].name}: expected a layer that autograd can differentiate, found: {error}"
        ) from error
    return dict(zip(leaves, found, strict=True))


class _ChainBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: ScanSequential, input: Tensor, *parameters: Tensor) -> Tensor:
        ctx.chain, ctx.parameters = chain, parameters
        ctx.runs, value = _run_layers(chain, input, ctx.needs_input_grad[1])
        _check_size(ctx.runs, chain.most_bytes)
        if not ctx.runs:
            ctx.mark_non_differentiable(value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            found = _gradients(ctx.chain, ctx.runs, gradient)
        of_parameters: dict[Tensor, Tensor] = {}
        for run in reversed(ctx.runs):
            for parameter, leaf in run.parameters:
                # A leaf that several layers share has the sum of them.
                part = found.pop(leaf, None)
                if part is not None:
                    known = of_parameters.get(parameter)
                    of_parameters[parameter] = part if known is None else known + part
            of_input = found.get(run.given)
            if of_input is None:
                # As in PyTorch, no gradient is another thing than one of zeros.
                break
        return None, of_input, *(of_parameters.get(parameter) for parameter in ctx.parameters)


def _run_layers(chain: ScanSequential, input: Tensor, wanted: bool) -> tuple[list[_Run], Tensor]:
    """The runs that gradients go through, and the output. `wanted`: whether the input needs one."""
    if any(hooks_of(module, backward=True) for child in chain for module in child.modules()):
        _refuse("a layer", "without backward hooks", "some: put them on parameters, or on the chain")
    runs: list[_Run] = []
    value, is_input = input, True
    for number, layer in enumerate(chain):
        name = f"layer {number} ({type(layer).__name__})"
        given = value.detach()
        given.requires_grad_(wanted)
        own = dict(layer.named_parameters())
        leaves: dict[str, Tensor] = {key: each for key, each in own.items() if each.requires_grad}
        replaced = not all(each.is_leaf and not gradient_hooks(each) for each in leaves.values())
        if replaced:
            # Hooks run once, for the whole gradient.
            leaves = {key: each.detach().requires_grad_() for key, each in leaves.items()}
        with torch.enable_grad():
            # A copy, since a layer may write in place.
            copy = given.clone()
            written = times_written(copy)
            output = torch.func.functional_call(layer, leaves, (copy,)) if replaced else layer(copy)
        if not isinstance(output, Tensor):
            _refuse(name, "that returns one tensor", f"{type(output).__name__}")
        if is_input and times_written(copy) != written:
            _refuse(name, "that leaves the input of the chain as it is", "one that writes in place: use inplace=False")
        is_input = is_input and output.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr()
        parameters = [(own[key], leaf) for key, leaf in leaves.items()]
        weight = leaves.get("weight", own.get("weight"))
        run = _Run(name, layer, given, output, parameters=parameters, weight=weight)
        wanted = output.requires_grad
        if wanted:
            _check_run(run)
            runs.append(run)
        else:
            # Nothing before has a gradient.
            runs.clear()
        value = output.detach()
    return runs, value


def _check_run(run: _Run) -> None:
    given, output = run.given, run.output
    if output.dim() < 1 or given.dim() < 1 or len(output) != len(given):
        _refuse(
            run.name,
            f"whose output has the samples of its input, of shape {tuple(given.shape)}, in dimension 0",
            f"an output of shape {tuple(output.shape)}. Give several samples as a batch",
        )
    if not output.is_floating_point() or (given.requires_grad and not given.is_floating_point()):
        _refuse(run.name, "of real floating-point numbers", f"{given.dtype} before it and {output.dtype} behind it")
    known = {id(given), *(id(leaf) for _, leaf in run.parameters)}
    if any(id(leaf) not in known for leaf in leaves_behind(output)):
        _refuse(run.name, "that reads no tensors with gradients but its own parameters", "another: register it")


def _refuse(name: str, expected: str, found: str) -> NoReturn:
    raise PenstockError(
        f"ScanSequential: {name}: expected a layer {expected}, found {found}. Or put the layer before or behind the "
        "chain, or use torch.nn.Sequential"
    )


def _gradients(chain: ScanSequential, runs: list[_Run], gradient: Tensor) -> dict[Tensor, Tensor | None]:
    """The gradients of all leaves. Where the scan does not find what the layers' graphs do, for example since a product
    leaves the range of its type, they are found step by step, with Jacobians from autograd.
    """
    wide = reduce(torch.promote_types, (run.output.dtype for run in runs), torch.float32)
    scanned = [run for run in runs if run.given.requires_grad]
    leaves = [*(run.given for run in scanned), *(leaf for run in runs for _, leaf in run.parameters)]
    for levels in (None, 0):
        jacobians = [(run.jacobian() if levels == 0 else _transposed(chain, run)).to(wide) for run in scanned]
        # Of the outputs of the last layer first, and those of the first layer last.
        elements = [_flat(gradient).unsqueeze(-1).to(wide), *reversed(jacobians)]
        behind = [elements[0]]
        if jacobians:
            behind = scan_list(elements, lambda earlier, later: later @ earlier, levels)
            behind.append(elements[-1] @ behind[-1])
        behind.reverse()
        # All layers know their gradients now, so they are independent of each other.
        own = [
            each.reshape(run.output.shape).to(run.output.dtype)
            for run, each in zip(runs, behind[-len(runs) :], strict=True)
        ]
        found = _differentiated(runs, own, list(dict.fromkeys(leaves)))
        expected = [found[run.given] for run in scanned]
        if _agree(behind[:-1], expected):
            return found
        compared = zip(scanned, jacobians, pairwise(behind), expected, strict=True)
        wrong = [run for run, jacobian, pair, each in compared if _differ(run, jacobian, pair, each)]
        if not wrong:
            return found
    _refuse(
        wrong[-1].name,
        f"whose gradient for a batch of shape {tuple(wrong[-1].given.shape)} is a matrix times that of each sample",
        "another: the layer mixes samples (as BatchNorm does in training mode), a hook or a function of its own changes"
        " the gradient, or it computes in fewer digits than its input has",
    )


def _agree(gradients: list[Tensor], expected: list[Tensor | None]) -> bool:
    """Whether they are the same but for a few digits of the largest value: a quick look at all layers at once."""
    pairs = [
        (one, other.reshape(one.shape)) for one, other in zip(gradients, expected, strict=True) if other is not None
    ]
    if not pairs or len(pairs) < len(gradients):
        return not gradients
    norm = torch.linalg.vector_norm
    differences = torch.stack([norm(one - other, torch.inf) for one, other in pairs])
    sizes = torch.stack([norm(one, torch.inf) for one, _ in pairs])
    return bool((differences <= torch.finfo(sizes.dtype).eps ** (2 / 3) * sizes).all())


def _differ(run: _Run, jacobian: Tensor, gradients: tuple[Tensor, Tensor], expected: Tensor | None) -> bool:
    """Whether the first of `gradients`, before the layer, is not the `expected` one from autograd for the second."""
    before, behind = (_flat(each).double() for each in gradients)
    difference = before if expected is None else before - _flat(expected)
    largest = torch.linalg.vector_norm(jacobian.flatten(1), torch.inf, dim=1).double()
    rounding = max(torch.finfo(each.dtype).eps for each in (run.given, run.output)) ** 0.5
    # A gradient that is not finite is left as it is.
    finite = behind.isfinite().all(1) & (True if expected is None else _flat(expected).isfinite().all(1))
    allowed = rounding * largest * behind.abs().sum(1)
    return not bool((difference.abs().amax(1) <= allowed)[finite].all())


def _flat(values: Tensor) -> Tensor:
    """(B, values of a sample), also where a sample is a single number."""
    return values.unsqueeze(-1).flatten(1)


def _transposed(chain: ScanSequential, run: _Run) -> Tensor:
    """The transposed Jacobians of a layer, (B or 1, inputs, outputs)."""
    if type(run.layer) in _ELEMENTWISE:
        diagonal = _differentiated([run], [torch.ones_like(run.output)], [run.given])[run.given]
        assert diagonal is not None
        return torch.diag_embed(_flat(diagonal))
    known = chain.jacobian_of(run.layer, tuple(run.given.shape[1:]))
    if known is None or known.pattern.shape != run.sizes():
        return run.jacobian()
    found = known.pattern.dense(known.values(run.given.detach(), run.output.detach(), run.weight))
    return found if found.dim() == 3 else found.unsqueeze(0)


def _check_size(runs: Sequence[_Run], most_bytes: int) -> None:
    shapes = [run.sizes() for run in runs if run.given.requires_grad]
    if not shapes:
        return
    every = list(shapes)

    def then(earlier: tuple[int, int], later: tuple[int, int]) -> tuple[int, int]:
        every.append((later[0], earlier[1]))
        return every[-1]

    scan_list([(shapes[-1][1], 1), *reversed(shapes)], then)
    output = runs[-1].output
    needed = len(output) * output.element_size() * sum(rows * columns for rows, columns in every)
    if needed > most_bytes:
        raise PenstockError(
            f"ScanSequential: the Jacobians of this batch and their products would take up to {needed:,} bytes: "
            f"expected at most {most_bytes:,} (most_bytes=). Use torch.nn.Sequential for layers this wide, smaller "
            "batches, or a larger most_bytes"
        )
