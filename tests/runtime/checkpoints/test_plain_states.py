"""A checkpoint holds all that the state dicts of a plain loop hold: a resumed run equals that loop to the bit."""

import copy
import json
import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import manifest_text, read_manifest
from support.jobs import state_jobs as jobs
from support.jobs.state_jobs import SAVED, STEPS, TRAININGS, WIDTH, Coded, Codes, Scaled, Training, X, losses
from support.processes import Pool


@cache
def expected(name: str) -> list[float]:
    return jobs.plain_losses(TRAININGS[name])


def by_save(pipe: penstock.Pipeline, directory: Path) -> Any:
    path = pipe.save(directory)
    return lambda other: other.load(path)


def by_save_beside(pipe: penstock.Pipeline, directory: Path) -> Any:
    save = pipe.save(directory, wait=False)
    return lambda other: other.load(save.wait())


def by_state_dict(pipe: penstock.Pipeline, directory: Path) -> Any:
    state = pipe.state_dict()
    return lambda other: other.load_state_dict(state)


ROUTES = [by_save, by_save_beside, by_state_dict]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_resumed_run_equals_the_plain_loop(name: str, route: Any, tmp_path: Path) -> None:
    with TRAININGS[name].start(stages=2) as pipe:
        assert losses(pipe, SAVED) == expected(name)[:SAVED]
        load = route(pipe, tmp_path / "run")
        assert losses(pipe, STEPS - SAVED) == expected(name)[SAVED:]
        with TRAININGS[name].start(stages=3 if route is by_save else 1) as resumed:
            load(resumed)
            assert losses(resumed, STEPS - SAVED) == expected(name)[SAVED:]
            assert resumed.state_dict()["model"].keys() == TRAININGS[name].net().state_dict().keys()


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("wait", [True, False])
def test_generators_of_numpy_and_python_go_on(seed: int | None, wait: bool, tmp_path: Path) -> None:
    with jobs.NOISY.start(stages=2, seed=seed) as pipe:
        losses(pipe, SAVED)
        saved: Any = pipe.save(tmp_path / "run") if wait else pipe.save(tmp_path / "run", wait=False)
        went_on, drawn = losses(pipe, STEPS), torch.rand(1)
        if not wait:
            saved.wait()
    jobs.seed_generators(9)
    torch.manual_seed(9)
    with jobs.NOISY.start(stages=2, seed=seed, resume=tmp_path / "run") as resumed:
        assert losses(resumed, STEPS) == went_on
        assert torch.rand(1) == drawn


def test_a_whole_state_dict_fits_the_plain_model() -> None:
    """And that of a plain model fits the pipeline."""
    for name in ("extra state", "code of state dicts", "hooks that change a weight", "hooks of the whole model"):
        training = TRAININGS[name]
        with training.start(stages=2) as pipe:
            losses(pipe, SAVED)
            found, state, drawn = pipe.full_state_dict(), pipe.state_dict(), pipe.predict(X)
            went_on = losses(pipe, 1)
        net = net_after(training, found)
        assert torch.equal(net.eval()(X), drawn)
        with training.start(stages=2) as other:
            other.load_state_dict({**state, "model": net.state_dict()})
            assert losses(other, 1) == went_on


def test_hooks_after_a_load_see_the_weights_that_were_loaded(tmp_path: Path) -> None:
    training = TRAININGS["hooks that change a weight"]
    with training.start(stages=2) as pipe:
        losses(pipe, SAVED)
        pipe.save(tmp_path)
        model: Any = training.net()
        sample = (X[:2],)
        with penstock.Pipeline(model, sample, F.mse_loss, training.optimizer, stages=2, resume=tmp_path):
            for block in model:
                assert block.loaded == block.linear.weight.sum() != 0


def net_after(training: Training, state: Any) -> nn.Module:
    net = training.net()
    net.load_state_dict(copy.deepcopy(state))
    return net


TOGETHER = ["extra state of the whole model", "hooks of the whole model", "codes as state", "a loss with buffers"]


def test_several_processes(pool: Pool, tmp_path: Path) -> None:
    """Two save and one resumes, and the other way."""
    names = [*TOGETHER, "a state dict of the optimizer's own"]
    pool.run(2, jobs.train_and_save, names, tmp_path / "two")
    pool.run(1, jobs.train_and_save, names, tmp_path / "one")
    alone = jobs.resume_all(names, tmp_path / "two")
    places = [name for name in names for _ in range(2)]
    for found in (*pool.run(2, jobs.resume_all, names, tmp_path / "one"), alone):
        for (own, state), (other, whole), name in zip(found, alone, places, strict=True):
            assert own == other == expected(name)[SAVED:], name
            assert state.keys() == whole.keys() == TRAININGS[name].net().state_dict().keys()
            net_after(TRAININGS[name], state)


def test_replicas_with_other_extra_states_are_refused(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(3, jobs.refused_by_replicas, tmp_path / "run"):
        assert "_extra_state has another value on rank 1 than on a rank before it" in error
        assert not list((tmp_path / "run").glob("*step*"))


def test_weights_in_a_subclass_are_those_that_were_saved(tmp_path: Path) -> None:
    training = Training(Coded)
    for route in ROUTES:
        with training.start(stages=2) as pipe:
            losses(pipe, 1)
            load, whole = route(pipe, tmp_path / route.__name__), pipe.full_state_dict()
            went_on = losses(pipe, 2)
            with pytest.raises(
                CheckpointError, match=r"save_weights: 0\.weight .* as a Codes: expected a dense tensor"
            ):
                pipe.save_weights(tmp_path / "weights")
            other: Any = training.net()
            for block in other:
                block.weight.codes.add_(1)
                block.weight.scale.mul_(2)
            arguments = (X[:2],), F.mse_loss, training.optimizer
            with penstock.Pipeline(other, *arguments, stages=1, microbatches=2, check="off") as resumed:
                load(resumed)
                assert losses(resumed, 2) == went_on
                assert type(whole["0.weight"]) is Codes
                assert torch.equal(whole["0.weight"].codes, other[0].weight.codes)
                assert whole["0.weight"].title == "w"


class Secret(Scaled):
    def get_extra_state(self) -> Any:
        return {"code": print}


class Deaf(Scaled):
    """Saves a key that no code of its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda one, state, prefix, _: state.update({prefix + "more": one.scale}))


def momentum(keep: Any) -> Any:
    return partial(jobs.Momentum, keep=keep, read=lambda kept: kept.numbers())


REFUSED: dict[str, tuple[Training, str]] = {
    "extra state of code": (
        Training(Secret),
        r"0\._extra_state/code: expected numbers.* found <built-in function print>",
    ),
    "a tensor without parts": (
        Training(optimizer=momentum(lambda t: jobs.Opaque.of(t, "m"))),
        r"the state 'moment' of \d\.(weight|bias) is a tensor of the class .*jobs.Opaque without __tensor_flatten__",
    ),
    "parts of code": (
        Training(optimizer=momentum(lambda t: Codes.of(t, print))),  # type: ignore[arg-type]
        r"optimizer/state/0\.weight/moment/part/0: expected numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name_at_the_first_save(name: str, tmp_path: Path) -> None:
    training, message = REFUSED[name]
    with training.start(stages=2) as pipe:
        losses(pipe, 1)
        for save in (lambda: pipe.save(tmp_path / "a"), lambda: pipe.save(tmp_path / "b", wait=False).wait()):
            with pytest.raises(CheckpointError, match=message):
                save()
        losses(pipe, 1)
    assert not list(tmp_path.glob("*/step*"))


class Requantized(jobs.Quantized):
    def __init__(self, refuses: bool) -> None:
        super().__init__(refuses)
        self.absmax = torch.ones(3) * 2


def test_a_key_that_only_a_save_has_is_refused(tmp_path: Path) -> None:
    with Training(Deaf).start(stages=2) as pipe, Training(Deaf).start(stages=1) as other:
        losses(pipe, 1)
        pipe.save(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"0\.more of the state: expected that the model takes it over"):
            other.load(tmp_path / "run")


class Titled(Coded):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Codes.of(torch.rand(WIDTH, WIDTH).double(), "other"), requires_grad=False)


ABSMAX = r"0\.linear\.weight\.absmax of the state: .*"
LOADS: dict[str, tuple[Training, Training, str]] = {
    "weights in another subclass": (
        Training(Coded),
        Training(Titled),
        r"0\.weight has shape and type .*'w'.* and .*'other'.* in the model",
    ),
    # Unless the model has the same value: a frozen base is quantized anew from the same numbers.
    "an entry that no module loads": (
        Training(partial(jobs.Quantized, False)),
        Training(partial(Requantized, False)),
        f"{ABSMAX}no code of the model loads it",
    ),
    "an entry that a module refuses": (
        Training(partial(jobs.Quantized, True)),
        Training(partial(Requantized, True)),
        f"{ABSMAX}its code raises RuntimeError: it was quantized already",
    ),
    "extra state into none": (Training(Scaled), Training(), r"another model|which the model has not"),
    "none into extra state": (TRAININGS["code of state dicts"], Training(Scaled), r"'0\._extra_state'"),
    "a loss into none": (Training(loss=jobs.Centred), Training(), "loss_fn: expected none with a state"),
    "none into a loss": (Training(), Training(loss=jobs.Centred), "loss_fn: expected one with a state"),
    "a loss into another": (
        Training(loss=jobs.Centred),
        Training(loss=lambda: nn.CrossEntropyLoss(torch.ones(4))),
        "loss_fn",
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_another_state_is_refused(name: str, tmp_path: Path) -> None:
    saved, loaded, message = LOADS[name]
    with saved.start(stages=2) as pipe, loaded.start(stages=2) as other:
        path, state = pipe.save(tmp_path / "run"), pipe.state_dict()
        for load in (lambda: other.load_state_dict(state), lambda: other.load(path)):
            with pytest.raises(penstock.PenstockError, match=message):
                load()


def groups(*options: dict[str, Any]) -> Any:
    """SGD with the parameters in as many groups as there are `options`, by turns."""
    return lambda params: torch.optim.SGD(
        [{"params": params[start :: len(options)], **own} for start, own in enumerate(options)], lr=0.1
    )


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_groups_of_another_cut_are_refused_or_have_the_rule_of_the_docs(kind: Any, tmp_path: Path) -> None:
    slow, fast = {"lr": kind(0.01)}, {"lr": kind(0.5), "momentum": 0.9}
    with Training(optimizer=groups(slow, fast)).start(stages=2) as pipe:
        losses(pipe, 1)
        path, state = pipe.save(tmp_path / "run"), pipe.state_dict()
        with Training(optimizer=groups({})).start(stages=2) as other:
            for load in (lambda: other.load(path), lambda: other.load_state_dict(state)):
                with pytest.raises(
                    CheckpointError, match=r"0\.weight and 0\.bias are in one parameter group here .* 'lr'"
                ):
                    load()
        # Every group has the options that its parameters had.
        with Training(optimizer=groups(fast, slow, fast, slow)).start(stages=1) as other:
            other.load(path)
            assert [float(group["lr"]) for group in other.optimizer.param_groups] == pytest.approx([0.01, 0.5] * 2)
            assert losses(other, 2) == losses(pipe, 2)


def test_a_checkpoint_is_loaded_where_the_default_device_has_no_memory(tmp_path: Path) -> None:
    name = "a loss with buffers"
    with TRAININGS[name].start(stages=2) as pipe:
        losses(pipe, SAVED)
        state = pipe.state_dict()
        pipe.save(tmp_path / "run")
    for load in (lambda one: one.load(tmp_path / "run"), lambda one: one.load_state_dict(state)):
        with TRAININGS[name].start(stages=1) as other:
            with torch.device("meta"):
                load(other)
            assert losses(other, STEPS - SAVED) == expected(name)[SAVED:]


def test_a_checkpoint_of_an_older_version_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says what was not kept, if there is any."""
    for name, said in (("extra state", "0._extra_state"), ("codes as state", "")):
        training = TRAININGS[name] if said else Training()
        with training.start(stages=2) as pipe:
            losses(pipe, 1)
            path = pipe.save(tmp_path / name)
            manifest = read_manifest(path)
            content = copy.deepcopy(dict(manifest.content))
            for own in content["own"]:
                del own["beside"]
            (path / "manifest.json").write_text(manifest_text(path, content))
            caplog.clear()
            with training.start(stages=1) as other, caplog.at_level(logging.WARNING, logger="penstock"):
                other.load(path)
                assert other.steps == 1
                assert ("of an older version, which did not keep 0._extra_state" in caplog.text) == bool(said)


def test_a_class_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The manifest names it, and nothing is imported for it."""
    name = "codes as state"
    with TRAININGS[name].start(stages=2) as pipe:
        losses(pipe, 1)
        path = pipe.save(tmp_path / "run")
        manifest = read_manifest(path)
        for other in ("os.system", "torch.nn.Linear", "support.jobs.state_jobs.Gone", "builtins.eval"):
            text = manifest_text(path, manifest.content).replace("support.jobs.state_jobs.Codes", other)
            content = json.loads(text)["content"]
            (path / "manifest.json").write_text(manifest_text(path, content))
            with pytest.raises(CheckpointError, match=f"a tensor of {other}: expected a subclass"):
                pipe.load(path)


def test_what_is_tracked_may_have_tensors_of_subclasses(tmp_path: Path) -> None:
    class Own:
        def __init__(self, codes: Any) -> None:
            self.codes = codes

        def state_dict(self) -> Any:
            return {"codes": [self.codes]}

        def load_state_dict(self, state: Any) -> None:
            (self.codes,) = state["codes"]

    with Training().start(stages=2) as pipe, Training().start(stages=1) as other:
        pipe.track(own=Own(Codes.of(torch.linspace(0, 1, 6), "t")))
        own = Own(None)
        other.track(own=own)
        other.load(pipe.save(tmp_path / "run"))
        assert type(own.codes) is Codes
        assert own.codes.numbers().tolist() == Codes.of(torch.linspace(0, 1, 6), "t").numbers().tolist()


def test_states_and_weights_of_torchao(tmp_path: Path) -> None:
    optim = pytest.importorskip("torchao.optim")
    training = pytest.importorskip("torchao.prototype.quantized_training")
    quantize = pytest.importorskip("torchao.quantization").quantize_
    torch.compiler.set_stance("force_eager")

    def start(kind: str) -> penstock.Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)))
        if kind == "weights":
            quantize(model, training.int8_weight_only_quantized_training())
        make = partial(torch.optim.SGD if kind == "weights" else getattr(optim, kind), lr=1e-2)
        return penstock.Pipeline(model, (torch.zeros(2, 128),), F.mse_loss, make, stages=2, check="off")

    def train(pipe: penstock.Pipeline) -> list[float]:
        torch.manual_seed(1)
        return [float(pipe.step(torch.randn(8, 128), torch.randn(8, 128)).loss) for _ in range(3)]

    try:
        for kind in ("weights", "AdamW8bit", "AdamW4bit"):
            for route in ROUTES:
                with start(kind) as pipe, start(kind) as resumed:
                    train(pipe)
                    load = route(pipe, tmp_path / kind / route.__name__)
                    went_on = train(pipe)
                    load(resumed)
                    assert train(resumed) == went_on, kind
    finally:
        torch.compiler.set_stance("default")
