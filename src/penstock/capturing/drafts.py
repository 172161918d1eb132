"""A chain as it was traced, and the questions that runs of model and chain have still to answer.

Every process of a training captures the same model. Its trace holds the modules of the process, so each process needs
its own; what a comparison finds out is the same in all, and one of them can ask for the others.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from penstock.capturing.chain import LayerChain
from penstock.torch_internals.modules import hooks_of
from penstock.torch_internals.tensors import gradient_hooks


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Something that runs on the sample show."""

    ask: Callable[[], Any]
    """Returns a value that can be sent to another process. Raises `CaptureError` for a trace that is wrong."""
    settle: Callable[[LayerChain, Any], LayerChain] = lambda chain, answer: chain
    """The chain with what such a value says."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A chain without the answers to `questions`; these do not depend on each other."""

    chain: LayerChain
    questions: Sequence[Question] = ()
    finish: Callable[[LayerChain], LayerChain] = lambda chain: chain

    @property
    def text(self) -> str:
        """The chain in words: the same in processes that have captured the same model."""
        chain, inputs = self.chain, self.chain.inputs
        layers = [
            (each.name, each.inputs, each.outputs, each.random, each.mutates, each.output_kinds, each.volatile)
            for each in chain.layers
        ]
        modules = (module for each in chain.layers for module in each.module.modules())
        codes = [module.code for module in modules if isinstance(module, GraphModule)]
        guards = [guard.text for guard in inputs.guards]
        return (
            f"{layers} {codes} {dict(inputs.sizes)} {inputs.equal} {guards} {chain.output.leaves} {[*chain.parameters]}"
        )

    @property
    def waits(self) -> bool:
        """Whether a run may wait for other processes: so did its forward, or hooks run in its backward."""
        chain = self.chain
        modules = (module for layer in chain.layers for module in layer.module.modules())
        return (
            chain.communicates
            or any(map(gradient_hooks, chain.parameters.values()))
            or any(hooks_of(module, backward=True) for module in modules)
        )

    def alone(self) -> LayerChain:
        """The chain with all answers, which this process finds. Raises `CaptureError`."""
        return self.settled(self.share_of(0, 1))

    def share_of(self, rank: int, processes: int) -> dict[int, Any]:
        """The answers that this process finds, by the number of the question. Raises `CaptureError`.

        The first question takes as long as the others together: rank 0 has it alone. What may wait for other processes
        is asked in all of them.
        """
        every = processes == 1 or self.waits
        with without_garbage_collection():
            return {
                number: question.ask()
                for number, question in enumerate(self.questions)
                if every or rank == (1 + (number - 1) % (processes - 1) if number else 0)
            }

    def settled(self, answers: Mapping[int, Any]) -> LayerChain:
        """The chain with all `answers`, by the number of the question."""
        chain = self.chain
        for number, question in enumerate(self.questions):
            chain = question.settle(chain, answers[number])
        return self.finish(chain)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Looking for garbage among the objects of a trace takes a fifth of the time of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
