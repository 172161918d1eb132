"""In what form a model goes to a hub: which of its tensors, under which names, and the configurations beside them.

A model of transformers goes whole, with its configuration. Of a PEFT model go the adapters, as PEFT writes them. Any
other module goes whole, under the names of its state dict.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class HubForm:
    """The form of one model."""

    names: Mapping[str, str]
    """The name in the files for each tensor that goes into them, by its name in the model."""
    adapter: bool = False
    """Whether only an adapter goes. It is always one file."""


def hub_form(model: Any, tensors: Mapping[str, Tensor]) -> HubForm:
    """The form of `model`, whose state dict has `tensors`; only their shapes are read."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return _adapter_form(model, peft.get_peft_model_state_dict, tensors)
    if getattr(model, "peft_config", None):
        raise PenstockError(
            f"{type(model).__name__} has adapters of its own (add_adapter): expected a PEFT model around it, whose "
            "adapters have names to be saved under. Build it with peft.get_peft_model(model, config)"
        )
    return HubForm({name: name for name in tensors})


def write_configurations(model: Any, form: HubForm, directory: Path, dtype: torch.dtype | None) -> None:
    """Writes the configurations of `model` to `directory`, if it has any. `dtype`: of its weights in the files."""
    if form.adapter:
        _write_adapter_configuration(model, directory)
        return
    config = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        config = copy.deepcopy(config)
        assert config is not None
        # transformers notes both when it saves. Which class and which type a reader makes depends on them.
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        assert generation is not None
        generation.save_pretrained(directory)


def _adapter_form(model: Any, select: Callable[..., Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> HubForm:
    """What PEFT selects of a state dict without values, recognized by its tensors."""
    if len(model.peft_config) != 1:
        raise PenstockError(
            f"the model has the adapters {', '.join(model.peft_config)}: expected one, which save_weights writes. "
            "Gather all with pipe.full_state_dict(), load them into a model, and save it with its save_pretrained()"
        )
    (adapter,) = model.peft_config
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    origins = {id(stand_in): name for name, stand_in in stand_ins.items()}
    selected = select(model, state_dict=stand_ins, adapter_name=adapter)
    changed = [name for name, tensor in selected.items() if id(tensor) not in origins]
    if changed:
        raise PenstockError(
            f"PEFT does not save {', '.join(changed)} as the model has it, but computes it first: expected adapters "
            "whose tensors are saved as they are, such as LoRA. Gather the model with pipe.full_state_dict(), load it "
            "into a model, and save that with its save_pretrained()"
        )
    return HubForm({origins[id(tensor)]: name for name, tensor in selected.items()}, adapter=True)


def _write_adapter_configuration(model: Any, directory: Path) -> None:
    (config,) = (copy.deepcopy(config) for config in model.peft_config.values())
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(directory, auto_mapping_dict=mapping)
