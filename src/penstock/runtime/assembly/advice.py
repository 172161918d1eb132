"""What to call instead, for the calls that other libraries have and a pipeline has not."""

import inspect
from typing import TYPE_CHECKING, Any, NoReturn, Self

from penstock.errors import PenstockError, suggestion

_CALLS = {
    "backward": "step(x, y) computes the gradients and makes the update",
    "zero_grad": "step(x, y) begins with no gradients",
    "train": "step(x, y) trains; call model.train() before the pipeline is built",
    "eval": "evaluate(x, y) and predict(x) run the model in evaluation mode",
    "forward": "step(x, y) trains, predict(x) returns outputs, and evaluate(x, y) returns the loss",
    "generate": "load what save_weights(directory) wrote into a whole model, and call its generate",
}
_NAMES = {
    "gradient_clip": "clip_grad_norm",
    "gradient_accumulation_steps": "microbatches",
    "chunks": "microbatches",
    "criterion": "loss_fn",
}
"""Arguments of other libraries whose names are not near."""


class Advised:
    """A base of `Pipeline`, which says what to call in place of what it has not."""

    __signature__: inspect.Signature
    """Else tools would show that of `__new__`."""

    def __init_subclass__(cls) -> None:
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(parameters)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        known = list(cls.__signature__.parameters)
        # A class of the user's may hand on what it is given.
        hands_on = any(each.kind is each.VAR_KEYWORD for each in cls.__signature__.parameters.values())
        for name in () if hands_on else options:
            if name not in known:
                near = f"Did you mean {_NAMES[name]!r}? " if name in _NAMES else suggestion(name, known)
                raise PenstockError(
                    f"{cls.__name__} has no argument {name!r}. {near}Expected {', '.join(known)}: rename it, or leave "
                    "it out"
                )
        return super().__new__(cls)

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise PenstockError(f"a {type(self).__name__} is not called: {_CALLS['forward']}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            advice = f": {_CALLS[name]}" if name in _CALLS else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(text, name=name, obj=self)
