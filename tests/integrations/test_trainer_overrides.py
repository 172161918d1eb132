"""What a subclass or a callback of a Trainer changes has the effect that it has in a plain Trainer, or is refused.

The models are in float64, but for their norms, and a Trainer weighs its losses otherwise: sums differ in last bits.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import penstock
from support.jobs.trainer_jobs import History, arguments, collate, history, make_model, rows
from support.processes import Pool

pytest.importorskip("accelerate")

GIVEN = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "lr_scheduler_type": "constant"}


class Silencing(transformers.TrainerCallback):
    """Changes options of the groups at the start, and stops the training of weights after the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.5, 0.9)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0


class Watching(transformers.TrainerCallback):
    """Keeps sums of the weights and of the optimizer's state."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self.seen.append(sum(float(each.detach().sum()) for each in model.parameters()))
        tensors = [value for each in optimizer.state.values() for value in each.values()]
        self.seen.append(sum(float(each.sum()) for each in tensors))


def make(folder: Path, base: type, *callbacks: Any, model: Any = None, given: Any = (), **kwargs: Any) -> Any:
    own = arguments(folder, **{**GIVEN, **dict(given)})
    if issubclass(base, penstock.integrations.PipelineTrainer):
        kwargs.setdefault("pipeline_options", {"stages": 2})
    data = {"train_dataset": rows(18), "eval_dataset": rows(4), "data_collator": collate}
    return base(model or make_model().double(), own, callbacks=list(callbacks), **data, **kwargs)


def assert_alike(expected: History, found: History) -> None:
    """A Trainer adds its losses up in float32."""
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def assert_equal(expected: Any, found: Any) -> None:
    """Both Trainers have logged the same, and their models have the same weights."""
    assert_alike(history(expected), history(found))
    weights = dict(found.model.named_parameters())
    for name, tensor in expected.model.named_parameters():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-7)


def silenced_in_processes(folder: Path) -> tuple[History, dict[str, Tensor]]:
    """The logs, and the weights of all stages."""
    trainer = make(folder, penstock.integrations.PipelineTrainer, Silencing(), pipeline_options={})
    trainer.train()
    weights = trainer.pipeline.full_state_dict(rank=None)
    return history(trainer), {name: tensor for name, tensor in weights.items() if "lm_head" in name or "embed" in name}


def test_callbacks_set_options_in_one_process_and_in_two(pool: Pool, tmp_path: Path) -> None:
    watching = Watching()
    plain = make(tmp_path, transformers.Trainer, Silencing(), watching)
    plain.train()
    found = pool.run(2, silenced_in_processes, tmp_path)

    # The callback has an effect.
    assert len({*watching.seen[::2]}) == 1
    for logs, weights in found:
        assert_alike(history(plain), logs)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, plain.model.state_dict()[name], rtol=0, atol=1e-7)


def own(base: type) -> type:
    class Own(base):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                groups = [
                    {"params": [each], "lr": 0.01 * number} for number, each in enumerate(self.model.parameters())
                ]
                self.optimizer = torch.optim.SGD(groups, momentum=0.9)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            first = inputs["input_ids"].roll(1, 0) if self.state.global_step else inputs["input_ids"]
            return super().training_step(model, {**inputs, "input_ids": first}, num_items_in_batch)

    return Own


def test_methods_that_are_overridden_count(tmp_path: Path) -> None:
    """Twice, so that the second training begins with the state of the first one."""
    watching = Watching(), Watching()
    plain, piped = (
        make(tmp_path, own(base), each)
        for base, each in zip((transformers.Trainer, penstock.integrations.PipelineTrainer), watching, strict=True)
    )
    for trainer in (plain, plain, piped, piped):
        trainer.train()

    assert_equal(plain, piped)
    assert len(watching[0].seen) == 12
    assert watching[1].seen == pytest.approx(watching[0].seen, rel=1e-6, abs=1e-6)


def called(base: type, act: Callable[[], object]) -> set[str]:
    """The methods of `base`, of those that a Trainer has as well, that `act` calls."""
    codes = {
        inspect.unwrap(function).__code__: name
        for kind in base.__mro__
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and hasattr(transformers.Trainer, name)
    }
    found: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            found.add(codes[frame.f_code])

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def test_what_a_pipeline_does_not_call_is_refused(tmp_path: Path) -> None:
    """`optimizers=` and a scheduler that follows evaluations have the numbers of a plain Trainer."""
    given: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.9},
    }
    given |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 3}
    trainers, sets = [], []
    for base in (transformers.Trainer, penstock.integrations.PipelineTrainer):
        model = make_model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trainer = make(tmp_path / base.__name__, base, model=model, given=given, optimizers=(optimizer, None))
        trainers.append(trainer)

        def act(trainer: Any = trainer) -> None:
            trainer.train()
            trainer.predict(rows(4))
            trainer.save_model()

        sets.append(called(base, act))
    from penstock.integrations.transformers_trainer import _UNCALLED

    assert_equal(*trainers)
    assert len({logs["learning_rate"] for logs in history(trainers[1]) if "loss" in logs}) > 1
    # What is for devices and libraries that a pipeline refuses, or is called by what is refused.
    beside = {"_prepare_context_parallel_inputs", "_has_mixed_mesh_grads"}
    assert sets[0] - sets[1] - _UNCALLED.keys() <= beside
    assert {"training_step", "compute_loss", "_save"} <= sets[0]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("compute_loss", "let the model compute its loss"),
        ("compute_loss_context_manager", "bf16="),
        ("get_batch_samples", "'loss_weight': ..."),
        ("_clip_grad_norm", "pass max_grad_norm="),
        ("_save", "override save_model"),
    ],
)
def test_methods_that_would_have_no_effect_are_refused(name: str, remedy: str, tmp_path: Path) -> None:
    base = penstock.integrations.PipelineTrainer
    kind = type("Own", (type("Mixin", (), {name: lambda *_, **__: None}), base), {})

    with pytest.raises(penstock.PenstockError, match=rf"cannot follow Own.{name}: .*{remedy}"):
        make(tmp_path, kind)


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_callbacks_between_gradients_and_the_update_are_refused(event: str, tmp_path: Path) -> None:
    callback = type("Clips", (transformers.TrainerCallback,), {event: lambda *_, **__: None})
    text = rf"cannot follow Clips\.{event}: .*use on_step_end"

    with pytest.raises(penstock.PenstockError, match=text):
        make(tmp_path, penstock.integrations.PipelineTrainer, callback())
    trainer = make(tmp_path, penstock.integrations.PipelineTrainer)
    with pytest.raises(penstock.PenstockError, match=text):
        trainer.add_callback(callback)


def by_hand(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    loss: Tensor = self.model(**inputs).loss
    loss.backward()
    return loss.detach()


def without_gradients(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def as_the_trainer(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    return transformers.Trainer.training_step(self, model, inputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (by_hand, r"Own.training_step: .* found gradients of its own \(model.embed_tokens.weight, ...\)"),
        (without_gradients, "Own.training_step: .* found none for the last batch of a step"),
        (as_the_trainer, r"has called the model, .* by super\(\)"),
    ],
)
def test_steps_that_a_pipeline_has_not_made_are_refused(step: Any, text: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, type("Own", (penstock.integrations.PipelineTrainer,), {"training_step": step}))

    with pytest.raises(penstock.PenstockError, match=text):
        trainer.train()


def test_options_beside_those_of_the_trainer_are_refused(tmp_path: Path) -> None:
    base = penstock.integrations.PipelineTrainer
    with pytest.raises(penstock.PenstockError, match="has lr_scheduler, which the Trainer passes itself"):
        make(tmp_path, base, pipeline_options={"lr_scheduler": lambda optimizer: None})
    with pytest.raises(penstock.PenstockError, match=r"optim=.*steps after the backward"):
        make(tmp_path, base, given={"optim": "galore_adamw_layerwise"})
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(penstock.PenstockError, match="1 other"):
        make(tmp_path, base, optimizers=(foreign, None)).train()
