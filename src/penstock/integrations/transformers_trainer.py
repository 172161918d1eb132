"""The Trainer of transformers, whose steps, evaluations and checkpoints go through a pipeline.

The Trainer keeps its loop, its data, its logs and its callbacks. The batches that it would accumulate gradients over
are the microbatches of a step.

Laws of this file:
  1. All processes see the same batches, so that to the Trainer there is one process. Only the first one writes files.
  2. The optimizer is the Trainer's, and of it a process keeps its own parameters. The pipeline steps it; the Trainer
     and its callbacks set, log and save the options of its groups.
  3. What would train otherwise than the arguments, the callbacks or the methods of a subclass say is refused.
"""

import os
from collections.abc import Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.training_args import OptimizerNames

from penstock.errors import PenstockError
from penstock.integrations.overrides import SteppedOptimizer, refuse_overrides
from penstock.pipeline import Pipeline
from penstock.training.losses import LossWeight, Microbatches, model_loss, token_count
from penstock.training.optimizers import NamedParameters

_OF_UPDATES = "pass max_grad_norm= or pipeline_options={'update_hooks': ...}, or use on_step_end"
_OF_LOSSES = "let the model compute its loss, and pass bf16=, fp16= or pipeline_options={'loss_weight': ...}"
_UNCALLED = {
    **dict.fromkeys(("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"), _OF_LOSSES),
    **dict.fromkeys(("get_batch_samples", "_get_num_items_in_batch"), _OF_LOSSES),
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm"), _OF_UPDATES),
    "_save": "override save_model, and call that of PipelineTrainer in it",
}
"""Methods of a Trainer that a subclass may not override, and the way out."""
_EVENTS = dict.fromkeys(("on_pre_optimizer_step", "on_optimizer_step"), _OF_UPDATES)
"""Events between gradients and the update, which callbacks may not have, and the way out."""


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` that trains through a `Pipeline`, with the losses of a Trainer in a single process.

    ``gradient_accumulation_steps`` is the number of microbatches of a step, and ``per_device_train_batch_size`` the
    number of samples in each. The batches of a step may be padded to different lengths. The model computes its loss
    from labels among its inputs; its mean is taken over the labels that count, as the Trainer does. Start the script
    under ``torchrun`` with a process for each stage, or without it with `stages` in `pipeline_options`.

    Args:
        pipeline_options: further arguments of `Pipeline`, such as ``schedule``, ``stages``, ``plan`` or ``recompute``.
        args, kwargs: those of `Trainer`. Optimizer, scheduler, clipping and precision follow `TrainingArguments`.

    Raises `PenstockError` for an argument, a callback or a method of a subclass that a pipeline cannot follow; the
    message says what to do instead.
    """

    optimizer: Any
    """In a training that of accelerate around a `SteppedOptimizer`."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        pipeline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check(args, kwargs)
        if "forward" in vars(model):
            raise PenstockError(
                f"PipelineTrainer(model=): expected the forward of {type(model).__name__}, found one set on the "
                "model, as trainers of TRL do: copies would run its weights. Give them copy.deepcopy(model)"
            )
        refuse_overrides("PipelineTrainer", self, _UNCALLED, PipelineTrainer, Trainer)
        taken = {"model", "sample", "loss_fn", "optimizer", "lr_scheduler"} & (pipeline_options or {}).keys()
        if taken:
            raise PenstockError(
                f"PipelineTrainer(pipeline_options=) has {', '.join(sorted(taken))}, which the Trainer passes itself: "
                "give its arguments (optimizers=, args=), and leave it out here"
            )
        _join_as_one(args)
        super().__init__(model=model, args=args, **kwargs)
        # The pipeline scales its losses itself.
        self.accelerator.scaler = None
        self._options = dict(pipeline_options or {})
        self._pipeline: Pipeline | None = None
        self._members: list[list[tuple[str | None, nn.Parameter]]] = []
        """By group of the optimizer, its parameters in all processes, with their names in the model."""
        self._resumes_from: Path | None = None
        self._given: list[dict[str, Any]] = []
        """The batches of the present step so far."""
        self._stepped = False
        """Whether the pipeline has made the present step."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline. It is built from the first batch. `PenstockError` before."""
        if self._pipeline is None:
            raise PenstockError("the pipeline is built from the first batch: call train() or evaluate() first")
        return self._pipeline

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As that of `Trainer`. Drains the pipeline at the end."""
        result = super().train(*args, **kwargs)
        if self._pipeline is not None:
            self._pipeline.drain()
        return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As that of `Trainer`. `PenstockError` if the last step of an epoch has too few samples for a pipeline."""
        made: DataLoader[Any] = super().get_train_dataloader()
        count, size = self.args.gradient_accumulation_steps, self._train_batch_size
        if isinstance(self.train_dataset, Sized):
            samples = len(self.train_dataset)
            rest = (samples - samples % size if self.args.dataloader_drop_last else samples) % (size * count)
            if 0 < rest < count:
                raise PenstockError(
                    f"train_dataset has {samples} samples, so that the last step of an epoch has {rest} for {count} "
                    f"microbatches (gradient_accumulation_steps): expected at least {count}, or none. Leave out "
                    f"{rest} samples, or choose other sizes"
                )
        return made

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """As that of `Trainer`. `PenstockError` for a callback that comes between gradients and the update."""
        super().add_callback(callback)
        for each in self.callback_handler.callbacks:
            refuse_overrides("PipelineTrainer", each, _EVENTS, TrainerCallback)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Trains on the last batch of a step together with those before it, and returns the loss of all of them."""
        self._given.append(self._prepare_inputs(inputs))
        nothing = torch.zeros((), device=self.args.device)
        if not self.accelerator.sync_gradients:
            return nothing
        batches, self._given = self._given, []
        pipe = self._built(batches[0])
        self.optimizer.train()
        skipped = pipe.skipped_updates
        result = pipe.step(Microbatches(_in_pieces(batches, pipe.plan.microbatches)))
        # The Trainer then leaves out a step of the scheduler.
        self.optimizer._is_overflow, self._stepped = pipe.skipped_updates > skipped, True
        return nothing + float(result.loss)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of a batch by the pipeline, and unless `prediction_loss_only` the outputs and the labels."""
        batch = self._prepare_inputs(inputs)
        pipe = self._built(batch)
        loss = torch.tensor(float(pipe.evaluate(batch).loss), device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        config = getattr(self.model, "config", None)
        ignored = {"loss", *(ignore_keys or getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))}
        output = pipe.predict(batch)
        named = dict(output) if isinstance(output, Mapping) else dict(enumerate(output[1:]))
        outputs = tuple(value for name, value in named.items() if name not in ignored and value is not None)
        labels = tuple(batch[name] for name in self.label_names if name in batch)
        return loss, outputs[0] if len(outputs) == 1 else outputs, labels[0] if len(labels) == 1 else labels or None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model for ``from_pretrained``, as that of `Trainer` does. All processes call it."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if self._pipeline is None:
            super().save_model(str(folder), _internal_call)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._pipeline.save_weights(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipeline.save(Path(output_dir) / "pipeline")
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        # The same in all processes, which draw the same batches.
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resumes_from = Path(checkpoint) / "pipeline" if checkpoint is not None else None

    def _load_best_model(self) -> None:
        # The next use builds a pipeline of these weights.
        self._close()
        super()._load_best_model()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        # The Trainer wraps only the model itself, in what its processes would share. A training begins with this.
        if training:
            self._close()
            self._given, self._stepped, self._resumes_from = [], False, None
            whole: Any = self.model
            made = self.optimizer
            if made is not None and not isinstance(made, AcceleratedOptimizer):
                names = {id(parameter): name for name, parameter in whole.named_parameters()}
                self._members = [[(names.get(id(p)), p) for p in group["params"]] for group in made.param_groups]
                self.optimizer = SteppedOptimizer(made)
        return _Stages()

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        # The pipeline has clipped.
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        whole: Any = self.model
        own = [name for name, parameter in whole.named_parameters() if parameter.grad is not None]
        if own or not self._stepped:
            found = f"gradients of its own ({own[0]}, ...)" if own else "none for the last batch of a step"
            raise PenstockError(
                f"{type(self).__qualname__}.training_step: expected a call of PipelineTrainer's for every batch, which "
                f"makes all gradients, found {found}. Return super().training_step(...), and {_OF_LOSSES}"
            )
        self._stepped = False
        return self.pipeline.gradient_norm

    def _built(self, batch: Mapping[str, Any]) -> Pipeline:
        """The pipeline; built anew with `batch` as the sample of a microbatch if there is none."""
        if self._pipeline is None:
            args, plan = self.args, self._options.get("plan")
            options: dict[str, Any] = {
                "microbatches": args.gradient_accumulation_steps if plan in (None, "auto") else None,
                "loss_weight": self._loss_weight(),
                "clip_grad_norm": args.max_grad_norm or None,
                "autocast": torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
                "loss_scale": "dynamic" if args.fp16 else None,
                "seed": args.seed,
                **self._options,
            }
            whole: Any = self.model
            self._pipeline = Pipeline(whole.train(), _sample_of(batch), model_loss, self._own_optimizer, **options)
            if self._pipeline.plan.microbatches != args.gradient_accumulation_steps:
                raise PenstockError(
                    f"the plan has {self._pipeline.plan.microbatches} microbatches, and the Trainer passes "
                    f"gradient_accumulation_steps={args.gradient_accumulation_steps}: expected as many"
                )
            if self._resumes_from is not None:
                # Callbacks may have set options since the Trainer read them.
                options = self.optimizer.state_dict()
                self._pipeline.load(self._resumes_from)
                self.optimizer.load_state_dict(options)
                self._resumes_from = None
        return self._pipeline

    def _close(self) -> None:
        if self._pipeline is not None:
            # Each process has trained its own stages only.
            self._pipeline.gather_model()
            self._pipeline.close()
            self._pipeline = None

    def _loss_weight(self) -> LossWeight:
        """The number of labels that count, where the Trainer divides by it, else of samples."""
        if self.model_accepts_loss_kwargs and "labels" in self.label_names:
            return token_count("labels", shifted=self._loss_shifts_labels)
        return _count_samples

    def _own_optimizer(self, parameters: NamedParameters) -> Any:
        """The optimizer of the Trainer, with the `parameters` of this process only; none for evaluations."""
        if not self.is_in_train:
            return []
        named: dict[str | None, nn.Parameter] = dict(parameters.items())
        for group, members in zip(self.optimizer.param_groups, self._members, strict=True):
            # A parameter without a name is none of the model's, which the pipeline refuses.
            group["params"] = [named.get(name, p) for name, p in members if name is None or name in named]
        return self.optimizer.optimizer.own


class _Stages(nn.Module):
    """Takes the place of a wrapped model, on which the Trainer calls nothing that computes."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise PenstockError(
            "a method of a Trainer has called the model, whose stages may be in other processes: expected a call of "
            "that method of PipelineTrainer by super(), or of trainer.pipeline.predict() or evaluate()"
        )


def _check(args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    refused = {
        "compute_loss_func=": (kwargs.get("compute_loss_func"), "let the model compute its loss"),
        "optim=": (
            args.optim if {"lomo", "adalomo", "layerwise"} & {*OptimizerNames(args.optim).value.split("_")} else None,
            "choose one that steps after the backward, such as adamw_torch",
        ),
        "model_init=": (kwargs.get("model_init"), "pass the model"),
        "fsdp=": (args.fsdp, "pass pipeline_options={'parallelize': ...}"),
        "deepspeed=": (args.deepspeed, "leave it out"),
        "label_smoothing_factor=": (args.label_smoothing_factor, "let the model compute its loss"),
        # The older name of activation_checkpointing, which mirrors it.
        "activation_checkpointing=": (args.gradient_checkpointing, "pass pipeline_options={'recompute': True}"),
        "torch_compile=": (args.torch_compile, "pass pipeline_options={'compile': True}"),
        "neftune_noise_alpha=": (args.neftune_noise_alpha, "leave it out"),
        "auto_find_batch_size=": (args.auto_find_batch_size, "leave it out"),
    }
    for name, (given, remedy) in refused.items():
        if given:
            raise PenstockError(f"PipelineTrainer cannot follow {name}{given!r}: {remedy}")


def _join_as_one(args: TrainingArguments) -> None:
    """Makes the processes one to accelerate and the Trainer, which would give each a part of every batch and sum their
    gradients.
    """
    state = args.distributed_state
    if dist.is_initialized() and state is not None:
        state.distributed_type = DistributedType.NO
        state.num_processes = 1
        state.process_index = dist.get_rank()
        state.local_process_index = int(os.environ.get("LOCAL_RANK", dist.get_rank()))


def _count_samples(batch: Mapping[str, Any]) -> int:
    return len(next(value for value in batch.values() if isinstance(value, Tensor) and value.ndim))


def _sample_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """`batch` as a sample for capture, which stands for all other batches."""
    sample = dict(batch)
    if _count_samples(batch) == 1:
        # A dimension of one would be taken to be always so.
        sample = {
            name: torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim and len(value) == 1 else value
            for name, value in batch.items()
        }
    mask = sample.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > 2:
        # Models leave out a mask that hides nothing, and would be captured without it. The hole is near the start,
        # since capture also tries shorter sequences.
        sample["attention_mask"] = mask.clone()
        sample["attention_mask"][0, 1] = 0
    return sample


def _in_pieces(batches: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`batches` as `count` microbatches: the largest are halved where there are fewer, as at the end of an epoch."""
    pieces = list(batches)
    while len(pieces) < count:
        sizes = [_count_samples(piece) for piece in pieces]
        index = sizes.index(max(sizes))
        if sizes[index] < 2:
            raise PenstockError(
                f"a step has {sum(sizes)} sample(s) for {count} microbatches (gradient_accumulation_steps): expected "
                "at least one for each. Leave out the last samples of the epoch"
            )
        half = sizes[index] // 2
        cut = partial(_rows, pieces[index], sizes[index])
        pieces[index : index + 1] = [cut(0, half), cut(half, sizes[index])]
    return pieces


def _rows(batch: Mapping[str, Any], samples: int, start: int, stop: int) -> dict[str, Any]:
    return {
        name: value[start:stop] if isinstance(value, Tensor) and value.ndim and len(value) == samples else value
        for name, value in batch.items()
    }
