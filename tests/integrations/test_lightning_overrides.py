"""What a callback or a subclass of `PipelineModule` changes has the effect that it has in Lightning, or is refused."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from support.jobs.lightning_jobs import PARTS, SAMPLE, loader, loss_of, make_model, plain_module, trainer
from support.processes import Pool

pytest.importorskip("lightning")
integrations: Any = penstock.integrations
pytestmark = pytest.mark.filterwarnings("ignore")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def run_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return trainer(folder, 2, *callbacks, enable_checkpointing=False, **options)


def fit_plainly(folder: Path, *callbacks: Any) -> dict[str, Tensor]:
    module = plain_module(adam)
    run_of(folder, *callbacks).fit(module, loader())
    return dict(module.model.state_dict())


def fit(folder: Path, *callbacks: Any, kind: Any = None, stages: int | None = 2) -> dict[str, Tensor]:
    kind = kind or integrations.PipelineModule
    with penstock.Pipeline(make_model(), SAMPLE, loss_of, adam, stages=stages, microbatches=PARTS) as pipe:
        run = run_of(folder, *callbacks, strategy=integrations.PipelineStrategy())
        run.fit(kind(pipe), loader())
        return dict(pipe.full_state_dict(rank=None))


def silencing() -> Any:
    """A callback that changes options of the groups, and keeps what it has seen."""

    class Silencing(import_module("lightning.pytorch").Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_start(self, run: Any, module: Any) -> None:
            run.optimizers[0].param_groups[0]["betas"] = (0.5, 0.9)

        def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
            [optimizer] = run.optimizers
            self.seen += [float(state["exp_avg"].sum()) for state in optimizer.state.values()]
            self.seen += [float(parameter.detach().sum()) for parameter in module.parameters()]
            if run.global_step == 4:
                optimizer.param_groups[0]["lr"] = 0.0

    return Silencing()


def fit_silenced(folder: Path) -> dict[str, Tensor]:
    return fit(folder, silencing(), stages=None)


def test_callbacks_set_options_in_one_process_and_in_two(pool: Pool, tmp_path: Path) -> None:
    plain, piped = silencing(), silencing()
    expected = fit_plainly(tmp_path, plain)
    found = [fit(tmp_path, piped), *pool.run(2, fit_silenced, tmp_path)]

    assert plain.seen[-8:] == plain.seen[-24:-16] != plain.seen[:8]
    assert piped.seen == plain.seen
    for weights in found:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_hooks_of_a_subclass_need_no_super(tmp_path: Path) -> None:
    ends: list[str] = []
    hooks = {"on_train_end": lambda self: ends.append("end"), "on_save_checkpoint": lambda self, checkpoint: None}
    own = type("Own", (integrations.PipelineModule,), hooks)
    expected, found = fit_plainly(tmp_path), fit(tmp_path, kind=own)

    assert ends == ["end"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("configure_optimizers", "optimizer="),
        ("on_before_optimizer_step", "update_hooks="),
        ("on_after_backward", "update_hooks="),
        ("optimizer_step", "update_hooks="),
        ("backward", "loss_fn="),
        ("lr_scheduler_step", "lr_scheduler="),
        ("configure_gradient_clipping", "clip_grad_norm="),
    ],
)
def test_methods_that_would_have_no_effect_are_refused(name: str, remedy: str) -> None:
    own = type("Own", (integrations.PipelineModule,), {name: lambda *_, **__: None})

    with pytest.raises(penstock.PenstockError, match=rf"cannot follow Own\.{name}: .*{remedy}"):
        own(None)


def test_callbacks_of_gradients_and_copies_are_refused(tmp_path: Path) -> None:
    callbacks = import_module("lightning.pytorch").callbacks
    after = type("After", (callbacks.Callback,), {"on_after_backward": lambda *_: None})
    refused = {
        "After.on_after_backward": after(),
        "LambdaCallback.on_before_optimizer_step": callbacks.LambdaCallback(on_before_optimizer_step=lambda *_: None),
        "WeightAverage": callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    }
    for text, callback in refused.items():
        with pytest.raises(penstock.PenstockError, match=text):
            fit(tmp_path, callback)
