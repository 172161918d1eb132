"""A LightningModule and a strategy of Lightning that train through a pipeline.

Lightning keeps its loop, its data, its logs and its callbacks; the optimization is manual.

Laws of this file:
  1. All processes see the same batches, so that to Lightning there is one process. Only the first one writes files.
  2. The pipeline steps the optimizer and its scheduler. Lightning and its callbacks have its groups, and a step that
     does nothing, by which Lightning counts.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from penstock.errors import PenstockError
from penstock.integrations.overrides import SteppedOptimizer, refuse_overrides
from penstock.pipeline import Pipeline

_STATE = ".pipeline"
"""The end of the name of the folder with the state of the pipeline, which lies beside a checkpoint."""
_EVENTS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_UNCALLED = {
    **dict.fromkeys(("configure_optimizers", "lr_scheduler_step"), "pass optimizer=, lr_scheduler= to the pipeline"),
    **dict.fromkeys(("configure_gradient_clipping", "clip_gradients"), "pass clip_grad_norm= to the pipeline"),
    **dict.fromkeys(("backward", "manual_backward"), "pass loss_fn= to the pipeline"),
    **dict.fromkeys(("optimizer_step", "optimizer_zero_grad", *_EVENTS), "pass update_hooks= to the pipeline"),
}
"""Methods of a LightningModule that a subclass may not override, and the way out."""


class PipelineModule(LightningModule):  # type: ignore[misc]
    """Trains `pipe` by the Trainer of Lightning, whose strategy is a `PipelineStrategy`.

    A batch that is a tuple or a list of two is the inputs and the target; any other is the inputs, and the model
    computes its loss. Override `split` for other batches. It logs ``loss``, every ``log_every_n_steps`` steps, and
    ``validation_loss`` and ``test_loss``. Steps count for ``max_steps`` and for checkpoints every some steps. Raises
    `PenstockError` for a method of a subclass that would have no effect.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        refuse_overrides("PipelineModule", self, _UNCALLED, PipelineModule, LightningModule)
        self.automatic_optimization = False
        # No submodule: Lightning moves nothing of it.
        self.pipe = pipe

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs and the target in `batch`."""
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        return batch, None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = self.split(batch)
        result = self.pipe.step(inputs, target)
        counted: Any = self.optimizers()
        (counted[0] if isinstance(counted, list) else counted).step()
        if self.global_step % self.trainer.log_every_n_steps == 0 or self.trainer.is_last_batch:
            self.log("loss", float(result.loss), prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("validation_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.pipe.predict(self.split(batch)[0])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the pipeline, with steps that do nothing."""
        nothing = torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=0.0)
        return [SteppedOptimizer(each) for each in self.pipe.optimizers] or [nothing]

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages in this process, as `Pipeline` has them."""
        return self.pipe.named_parameters(prefix)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PenstockError(
            "a PipelineModule is not copied, as callbacks that average weights do (StochasticWeightAveraging, "
            "WeightAveraging): expected a Trainer without them. Pass update_hooks=[penstock.WeightAverage(0.999)] to "
            "the pipeline, whose pipe.averaged() gives the averages to the model"
        )

    def _evaluate(self, name: str, batch: Any) -> None:
        inputs, target = self.split(batch)
        self.log(name, float(self.pipe.evaluate(inputs, target).loss), prog_bar=True)


class PipelineStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """All processes as one: each runs the whole loop on the same batches, and the first one writes.

    Checkpoints have the state of the pipeline beside them, in a folder of their name and ``.pipeline``. It is loaded by
    any number of stages. Pass ``devices=1`` to the Trainer.
    """

    def __init__(self, device: torch.device | str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        # Else Lightning finds torchrun's processes, which are one to it here.
        self.cluster_environment = LightningEnvironment()
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        remedy = "use on_train_batch_end, or pass clip_grad_norm= or update_hooks= to the pipeline"
        for callback in self._module().trainer.callbacks:
            refuse_overrides("PipelineStrategy", callback, dict.fromkeys(_EVENTS, remedy), Callback)
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """`obj` of process `src`: a plain value, such as a path or a flag. It travels as JSON, which runs no code."""
        if not dist.is_initialized():
            return obj
        code = json.dumps(obj, default=str).encode() if self.global_rank == src else b""
        size = torch.tensor(len(code), device=self.root_device)
        dist.broadcast(size, src)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.root_device)
        if code:
            data.copy_(torch.frombuffer(bytearray(code), dtype=torch.uint8))
        dist.broadcast(data, src)
        return json.loads(data.cpu().numpy().tobytes())

    def on_train_end(self) -> None:
        self._module().pipe.drain()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of the whole model, under the model's own names, in the first process. All processes call it."""
        return dict(self._module().pipe.full_state_dict(rank=0))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` loads the pipeline, its optimizers included."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._module().pipe.save(f"{filepath}{_STATE}")

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = Path(f"{checkpoint_path}{_STATE}")
        if not state.exists():
            raise PenstockError(
                f"PipelineStrategy loads {checkpoint_path}: expected the state of the pipeline in {state}, found none. "
                "Keep the folder beside the checkpoint"
            )
        self._module().pipe.load(state)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{_STATE}", ignore_errors=True)

    def _module(self) -> PipelineModule:
        module = self.lightning_module
        if not isinstance(module, PipelineModule):
            raise PenstockError(f"PipelineStrategy: expected a PipelineModule, found {type(module).__name__}: pass one")
        return module
