"""Has the workers of this process carry out steps, drains and evaluations.

The engine has the workers of this process carry out the segments of the schedule, and counts the trained microbatches.

Laws of this file:
  1. It handles neither the user's batches nor files: it takes microbatches and returns handles of results.
  2. Every rank calls the same methods in the same order.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.arguments import integer
from penstock.capturing.chain import LayerChain
from penstock.errors import ScheduleError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import ActionTiming, BatchRun, Loss, ResultBroadcast
from penstock.runtime.devices.local_devices import DeviceContext
from penstock.runtime.engine.call_agreement import CallAgreement
from penstock.runtime.engine.flight_recorder import FlightRecorder
from penstock.runtime.engine.gradients import LossScales
from penstock.runtime.engine.local_stage import LocalStages, ReplicaChecksums, share_buffers
from penstock.runtime.engine.loss_head import LateLosses
from penstock.runtime.engine.snapshots import REST, Collect, Snapshot
from penstock.runtime.engine.step_records import KEPT_MINIBATCHES, Speed, StepRecord, measure_speed
from penstock.runtime.engine.worker import Worker
from penstock.runtime.parameters.shards import assign
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.worlds import World
from penstock.scheduling.definitions import Drain, Segment, Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.repeated_steps import RepeatedSteps
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.continuations import continue_run, resize_run, steps_until_made
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline


class Engine:
    """Runs `schedule` on the `stages` of this process with one worker for each of its ranks. `seed`: of
    the random layers.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: LocalStages,
        workers: Sequence[Worker],
        transport: Transport,
        context: DeviceContext,
        seed: int | None,
    ) -> None:
        self.seed = seed
        self.steps = 0
        """The steps trained so far, those before a checkpoint included."""
        self.transport, self.device = transport, context.device
        self.recorder = FlightRecorder()
        self._records: deque[StepRecord] = deque(maxlen=KEPT_MINIBATCHES)
        """The last minibatches, and drains with something to compute."""
        self._follows = False
        """Whether the engine has done nothing since the last step."""
        self.schedule = self._schedule = schedule
        """The schedule of a run that continues no other, and that of the present run."""
        self.stages, self._workers = stages, tuple(workers)
        self._ranks = tuple(stages)
        self._results = ResultBroadcast(transport, self._ranks, self._ranks[0], context.device, context.staging)
        self._context = context
        ranks = 1 if len(stages) == schedule.ranks else schedule.ranks
        self.calls = CallAgreement(transport, self._ranks[0], ranks, schedule.placement.stages[-1][0])
        """Compares the calls of this process with those of the others."""
        self.snapshots, self._updater = workers[0].snapshots, workers[0].updater
        self.scales = LossScales([worker.gradients for worker in workers], schedule.stages - 1)
        """The loss scales and the norms of the stages of this process."""
        # On the CPU the loss head checks them.
        late = context.device.type != "cpu" and any(worker.checks_losses for worker in workers)
        self._late = LateLosses() if late else None
        """The losses to check, on the ranks of the last stage."""
        self._checksums = [
            ReplicaChecksums(transport, group, rank, stage=index, weights=stage.weights, device=context.device)
            for rank, own in stages.items()
            for index, stage in own.items()
            if len(group := schedule.placement.stages[index]) > 1 and ranks > 1
        ]
        self._minibatch = 0
        """Minibatches trained since the last drain, in the present run of the schedule."""
        self._microbatches_before = 0
        """Microbatches trained before the present run."""
        self._cut = 0, 0
        """The run of the last snapshot, by the microbatches before it, and the minibatch in it by which all ranks have
        made the versions of the snapshot.
        """
        self._rows: dict[Schedule, list[RepeatedSteps]] = {}
        """By the schedule of a run, those of its steps, for each worker."""
        self._steps = self._rows_of(schedule)
        """Those of the present run."""

    @property
    def trained(self) -> int:
        """The microbatches trained so far."""
        return self._microbatches_before + self.in_run

    @property
    def undrained(self) -> bool:
        """Whether steps have left backwards and updates to a drain."""
        return not self._schedule.flushes and self._minibatch > 0

    def train(self, microbatches: Sequence[Microbatch]) -> Loss:
        """Makes one training step on a minibatch. Returns its loss, which may still be in flight."""
        self.recorder.enter_step()
        announce = self._announce("step", microbatches) if self.calls.peers else None
        if len(microbatches) != self._schedule.microbatches:
            if announce is not None:
                announce()
                announce = None
            self._resize(len(microbatches))
        if not self._minibatch:
            self._updater.read_rates()
        if self._late is not None:
            self.transport.check()
            self._late.check()
        compared = self._checksums if self._checksums and self._schedule.flushes and self.calls.compares_weights else ()
        for checksums in compared:
            checksums.start()
        first = self._minibatch * self._schedule.microbatches
        batch = self._training_run(first + self._schedule.microbatches)
        start = self._context.timer.now()
        timings = self._run(batch, microbatches, first, self._schedule, Step(self._minibatch), before_waiting=announce)
        for checksums in compared:
            checksums.finish()
        self._records.append(StepRecord.of(start, timings, microbatches, self._follows))
        self._follows = True
        self._minibatch += 1
        self.steps += 1
        loss = self._results.loss(batch, self._schedule.placement, range(first, first + len(microbatches)))
        if self._late is not None:
            self._late.add(self.steps - 1, first, loss)
        return loss

    def drain(self) -> None:
        """Finishes the microbatches in flight, and waits until all messages of this process have been sent and a
        snapshot is copied.
        """
        self._announce("drain")
        self._finish()

    def _resize(self, count: int) -> None:
        """Begins a run with `count` microbatches in a step, which takes an empty pipe. All ranks have agreed on it."""
        if self._schedule.flushes:
            self.snapshots.settle()
        else:
            self._finish()
        self.restart(self.trained, count=count)

    def _finish(self) -> None:
        self._follows = False
        if self.undrained:
            microbatches = self._minibatch * self._schedule.microbatches
            start = self._context.timer.now()
            timings = self._run(self._training_run(microbatches), (), 0, self._schedule, Drain(self._minibatch))
            self._records.append(StepRecord(start, timings))
            # A new run may write the memory of the newest version.
            self.snapshots.settle()
            self.restart(self._microbatches_before + microbatches)
            # Before a drain the updates of replicas may lie in different steps.
            for checksums in self._checksums:
                checksums.start()
                checksums.finish()
        self.share_buffers()
        self.transport.flush()
        self.snapshots.settle()
        if self._updater.host is not None:
            self._updater.host.settle()

    def resume(self, microbatches: int, history: Mapping[str, Any] | None) -> None:
        """Begins a run after `microbatches` of training, from weights that were loaded. `history`: of the run that it
        continues; None if it continues none.
        """
        self.restart(microbatches, history)
        # No state dict names the buffers of other replicas than the first.
        self.share_buffers()
        buffers = (history or {}).get("buffers", {})
        for rank, stages in self.stages.items():
            for index, stage in stages.items():
                replica = self._schedule.placement.stages[index].index(rank)
                for number, tensor in buffers.get(f"{index}/{replica}", {}).items():
                    assign(stage.weights.buffers[int(number)], tensor)

    def restart(self, microbatches: int, history: Mapping[str, Any] | None = None, *, count: int = 0) -> None:
        """Begins a new run of the schedule from the newest weights, after `microbatches` of training.

        `history`: for a run that continues another one, what `history_of` returned for all its stages: the part
        ``weights`` by name, and the part ``stages`` by index. `count`: of its microbatches in a step, if it continues
        none and has another number of them than the plan.
        """
        part = history or {}
        by_stage = part.get("stages", {})
        fresh = self.resized(count) if count else self.schedule
        self._schedule = continue_run(self.schedule) if by_stage else fresh
        scales = by_stage.get(str(self._schedule.stages - 1), {}).get("scales", {})
        for stages in self.stages.values():
            for stage in stages.values():
                stage.weights.restart(part.get("weights", {}))
        for worker in self._workers:
            worker.gradients.restart(self._schedule, scales)
        self._microbatches_before, self._minibatch = microbatches, 0
        self._steps = self._rows_of(self._schedule)

    def resized(self, count: int) -> Schedule:
        """The schedule of a run with `count` microbatches in a step. Raises `ScheduleError` if there is none."""
        return resize_run(self.schedule, count)

    def _rows_of(self, schedule: Schedule) -> list[RepeatedSteps]:
        if schedule not in self._rows:
            self._rows[schedule] = [RepeatedSteps(schedule, rank) for rank in self._ranks]
        return self._rows[schedule]

    def history_of(self, stage: int) -> dict[str, Any]:
        """What a run that continues from the newest version of `stage` needs beside the weights and the optimizer."""
        worker = next(worker for worker in self._workers if stage in worker.stages)
        weights, gradients = worker.stages[stage].weights, worker.gradients
        kept: dict[str, Any] = {}
        if gradients.scaler is not None and stage == self._schedule.stages - 1:
            kept["scales"] = gradients.scaler.history(weights.newest)
        return {"weights": weights.history(self._schedule.guarantees.delays[stage]), "stages": {str(stage): kept}}

    def snapshot(
        self, weights: Mapping[int, VersionedWeights], collect: Collect, then: Callable[[Snapshot], object]
    ) -> Snapshot:
        """Begins a snapshot of the state after the steps so far, and calls `then` when it has all stages in `weights`.

        `collect` returns the state of a stage, or for `REST` what no update changes.
        """
        sizes = self._schedule.guarantees.microbatches_per_update
        targets = {index: self.in_run // sizes[index] for index in weights}
        self.snapshots.begin(
            snapshot := Snapshot({REST: 0, **targets}, collect, then),
            {REST: 0, **{index: held.newest for index, held in weights.items()}},
        )
        self._cut = self._microbatches_before, self._minibatch + steps_until_made(self._schedule, self._minibatch)
        return snapshot

    @property
    def snapshot_reached(self) -> bool:
        """Whether all stages, of all processes, have made the versions of the last snapshot."""
        before, minibatch = self._cut
        return self._microbatches_before != before or self._minibatch >= minibatch

    def cuts(self) -> bool:
        """Whether a run can continue the present one without what is in flight now: every stage will make a version
        from all microbatches so far and no others, and what the run reads follows from the schedule's guarantees.
        """
        if self._schedule.flushes:
            return True
        try:
            continue_run(self.schedule)
        except ScheduleError:
            return False
        if self._schedule.microbatches != self.schedule.microbatches:
            return False
        return all(self.in_run % size == 0 for size in self._schedule.guarantees.microbatches_per_update)

    @property
    def in_run(self) -> int:
        """The microbatches of the present run."""
        return self._minibatch * self._schedule.microbatches

    def use_chain(self, chain: LayerChain) -> None:
        """Runs the stages, whose modules are of `chain` by now, and ends them as it does."""
        for worker in self._workers:
            worker.use_chain(chain)

    def share_buffers(self) -> None:
        share_buffers(self.stages, self._schedule.placement, self.transport)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Loss:
        """The mean loss of `microbatches` in evaluation mode with the newest weights; it may still be in flight."""
        self._announce("evaluate", microbatches)
        batch = self._infer(microbatches, keeps_outputs=False)
        return self._results.loss(batch, self._round_robin, range(len(microbatches)))

    def predict(self, microbatches: Sequence[Microbatch]) -> list[list[Tensor]]:
        """The values of the model's output for each of `microbatches`. Waits for them."""
        self._announce("predict", microbatches)
        batch = self._infer(microbatches, keeps_outputs=True)
        return self._results.outputs(batch, self._round_robin, microbatches)

    def timeline(self, world: World, tensor_parallel_size: int, minibatches: int) -> Timeline:
        """The actions of every rank in its last `minibatches`. Collective.

        `tensor_parallel_size` processes do the same; the first one of them contributes.
        """
        rule = integer(1, KEPT_MINIBATCHES).but("give how many of the last steps to show; more are not kept")
        minibatches = rule.check("timeline(minibatches=)", minibatches)
        kept = list(self._records)[-minibatches:] if world.rank % tensor_parallel_size == 0 else []
        own = [timing for record in kept for timing in record.timings]
        times = iter(self._context.timer.to_host_seconds([mark for *_, start, stop in own for mark in (start, stop)]))
        timed = [(rank, str(action), next(times), next(times)) for rank, action, *_ in own]
        gathered = [timing for timings in world.gather(timed, "for Pipeline.timeline") for timing in timings]
        zero = min((start for _, _, start, _ in gathered), default=0.0)
        spans = (Span(rank, action, start - zero, stop - zero) for rank, action, start, stop in gathered)
        title = f"{self._schedule.name}, steps {max(0, self.steps - minibatches) + 1} to {self.steps}"
        return Timeline(tuple(spans), self._schedule.ranks, title=title)

    def speed(self) -> Speed | None:
        """How fast the last steps of this process were, of those that have ended; None if none has. Does not wait."""
        return measure_speed(self._records, self._context.timer, self._ranks)

    def _announce(self, name: str, microbatches: Sequence[Microbatch] = ()) -> Callable[[], None] | None:
        return self.calls.announce(name, microbatches, self.trained, self.seed)

    def _training_run(self, admitted: int) -> BatchRun:
        return BatchRun(
            training=True,
            seed=self.seed,
            microbatches_before=self._microbatches_before,
            admitted=admitted,
            step=self.steps,
            microbatches=self._schedule.microbatches,
        )

    def _infer(self, microbatches: Sequence[Microbatch], keeps_outputs: bool) -> BatchRun:
        self._follows = False
        batch = BatchRun(training=False, keeps_outputs=keeps_outputs)
        made = self._schedule
        sizes, moved = (made.ranks, made.stages_per_rank, len(microbatches)), (made.streamed, made.places)
        forwards = inference(*sizes, self._round_robin, streamed=moved[0], places=moved[1])
        self._run(batch, microbatches, 0, forwards, Step(0))
        return batch

    @property
    def _round_robin(self) -> Placement:
        """The stages with replicas that take microbatches in turn, as in evaluations, which have any batch size."""
        return Placement(self._schedule.placement.stages)

    def _run(
        self,
        batch: BatchRun,
        microbatches: Sequence[Microbatch],
        first: int,
        schedule: Schedule,
        segment: Segment,
        *,
        before_waiting: Callable[[], None] | None = None,
    ) -> list[ActionTiming]:
        """Has the workers carry out `segment` of `schedule`; `microbatches` are numbered from `first`.

        Several workers take turns: those that need not wait carry out one action each. `before_waiting` is called once,
        for a single worker: when it has to wait for another rank, or at the end if it need not.
        """
        workers, streams = self._workers, self._context.streams
        kind = "evaluation" if schedule is not self._schedule else "drain"
        if schedule is self._schedule and isinstance(segment, Step):
            kind = "step"
            programs = [steps.row(segment.minibatch) for steps in self._steps]
        else:
            programs = [schedule.row(rank, segment) for rank in self._ranks]
        numbered = dict(enumerate(microbatches, first))
        for worker, program in zip(workers, programs, strict=True):
            worker.begin(batch, schedule, numbered, program)
        self.recorder.begin(kind, schedule.placement, [worker.row for worker in workers])
        with streams.ordered_segment():
            try:
                if len(workers) == 1:
                    (worker,) = workers
                    while worker.left:
                        if before_waiting is not None and not worker.ready():
                            before_waiting()
                            before_waiting = None
                        worker.advance()
                    if before_waiting is not None:
                        before_waiting()
                else:
                    turns = [(worker, streams.within(worker.rank, worker.advance)) for worker in workers]
                    progress = True
                    while progress:
                        progress = False
                        for worker, advance in turns:
                            if worker.left:
                                progress |= advance()
                    # The verifier has proved that some rank can always go on.
                    assert not any([worker.left for worker in workers]), "deadlock in a verified schedule"
            except Exception:
                # A receive that a broken connection has ended leaves any numbers, of which anything may complain.
                self.transport.check()
                raise
            finally:
                timings = list[ActionTiming]()
                for worker in workers:
                    timings += worker.end()
        return timings
