"""A LightningModule and a strategy of Lightning that train through a pipeline.

Lightning keeps its loop, its data, its logs and its callbacks; the optimization is manual.

Laws of this file:
  1. All processes see the same batches, so that to Lightning there is one process. Only the first one writes files.
  2. The pipeline has the optimizer and its scheduler. Lightning steps a stand-in for them, by which it counts.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from penstock.errors import PenstockError
from penstock.pipeline import Pipeline

_STATE = ".pipeline"
"""The end of the name of the folder with the state of the pipeline, which lies beside a checkpoint."""


class PipelineModule(LightningModule):  # type: ignore[misc]
    """Trains `pipe` by the Trainer of Lightning, whose strategy is a `PipelineStrategy`.

    A batch that is a tuple or a list of two is the inputs and the target; any other is the inputs, and the model
    computes its loss. Override `split` for other batches. It logs ``loss``, every ``log_every_n_steps`` steps, and
    ``validation_loss`` and ``test_loss``. Steps count for ``max_steps`` and for checkpoints every some steps.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
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
        counter: Any = self.optimizers()
        if result.lr:
            # What callbacks show.
            counter.param_groups[0]["lr"] = result.lr[0]
        counter.step()
        if self.global_step % self.trainer.log_every_n_steps == 0 or self.trainer.is_last_batch:
            self.log("loss", float(result.loss), prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("validation_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.pipe.predict(self.split(batch)[0])

    def on_train_end(self) -> None:
        self.pipe.drain()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The stand-in: it changes nothing."""
        own = self.pipe.optimizer
        return torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=own.param_groups[0]["lr"] if own is not None else 0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the weights of the whole model into it, under the model's own names. All processes call it."""
        checkpoint["state_dict"] = dict(self.pipe.full_state_dict(rank=0) or {})

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Nothing: the strategy loads the pipeline."""
        return super().load_state_dict({}, *args, **kwargs)

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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._pipe().save(f"{filepath}{_STATE}")

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = Path(f"{checkpoint_path}{_STATE}")
        if not state.exists():
            raise PenstockError(
                f"PipelineStrategy loads {checkpoint_path}: expected the state of the pipeline in {state}, found none. "
                "Keep the folder beside the checkpoint"
            )
        self._pipe().load(state)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{_STATE}", ignore_errors=True)

    def _pipe(self) -> Pipeline:
        module = self.lightning_module
        if not isinstance(module, PipelineModule):
            raise PenstockError(f"PipelineStrategy: expected a PipelineModule, found {type(module).__name__}: pass one")
        return module.pipe
