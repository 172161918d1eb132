"""The model of a process that trains some of its layers: the others have the weights of before, or none."""

from collections.abc import Collection, Sequence

from torch import nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.reminders import Reminder
from penstock.values.plan_stages import Stage

__all__ = ["remind"]


def remind(model: nn.Module | Sequence[nn.Module], chain: LayerChain, stages: Collection[Stage]) -> Reminder | None:
    """Puts a reminder on `model`, if `stages` (those of this process) do not hold all layers of `chain`."""
    held = {layer for stage in stages for layer in range(stage.start, stage.stop)}
    if not isinstance(model, nn.Module) or len(held) == len(chain.layers):
        return None
    reminder = Reminder(
        f"penstock: this process trains {len(held)} of the {len(chain.layers)} layers of {type(model).__name__}. The "
        "weights of the others are in other processes; here they are those of before the training, or none. Use "
        "pipe.predict(inputs) instead of a call of the model, and pipe.save_weights(directory) or "
        "pipe.full_state_dict() instead of its state dict or save_pretrained. To generate text, load what save_weights "
        "wrote into a whole model"
    )
    reminder.put_on(model)
    return reminder
