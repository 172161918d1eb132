"""A recurrence whose time is cut over the ranks of a process group: rank 0 has its first steps.

The backward of a rank is one product over its own steps, a scan over the products of the ranks after it, and a pass
over its own steps. The scan takes ``ceil(log2(p)) + 1`` rounds of messages for p ranks. Products are made by all ranks
at the same time.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.scan.scaled import ScaledMatrices, ScaledVectors, Steps


def receive_state(like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The state (B, H) of the rank before, shaped as `like`, which is returned by the first rank."""
    rank = dist.get_rank(group)
    if rank == 0:
        return like
    state = torch.empty_like(like)
    dist.recv(state, group=group, group_src=rank - 1)
    return state


def send_state(state: Tensor, group: dist.ProcessGroup) -> None:
    """Sends `state` to the rank after this one, if there is one."""
    rank = dist.get_rank(group)
    if rank + 1 < dist.get_world_size(group):
        dist.send(state.contiguous(), group=group, group_dst=rank + 1)


def gradient_from_later_ranks(
    gradient: Tensor, jacobians: Tensor, entering: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """What the steps of later ranks add to `gradient`, that after the last step of this rank. Collective.

    `jacobians` and `entering`: those of this rank, as `blelloch` takes them. Powers of two are kept aside.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = Steps(ScaledMatrices.of(jacobians), ScaledVectors.of(entering)).product()
    # What this rank makes of nothing behind its end. The last rank has nothing there.
    begun = own.apply(0, ScaledVectors.of(gradient))
    state: ScaledVectors | Steps = begun
    if rank + 1 < ranks:
        state = Steps(own.matrices, ScaledVectors(begun.values[None], begun.exponents[None]))
    reach = 1
    while reach < ranks:
        # Each rank knows what `reach` ranks make, from itself on. If the last one is among them, it is a vector.
        found = _exchange(_tensors(state), _shapes(jacobians, vector=rank + 2 * reach >= ranks), reach, group)
        if isinstance(state, Steps) and found:
            if len(found) == 2:
                state = state.apply(0, ScaledVectors(*found))
            else:
                state = Steps(ScaledMatrices(*found[:2]), ScaledVectors(*found[2:])).then(state)
        reach *= 2
    following = _exchange(_tensors(state), _shapes(jacobians, vector=True), 1, group)
    return ScaledVectors(*following).plain() if following else torch.zeros_like(gradient)


def _exchange(tensors: list[Tensor], arriving: list[Tensor], reach: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Sends `tensors` to the rank that is `reach` before this one. Returns those of the one that is `reach` behind it,
    in the memory of `arriving`; none if there is no such rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    operations = []
    if rank >= reach:
        operations += [
            dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=rank - reach) for tensor in tensors
        ]
    if rank + reach < ranks:
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank + reach) for tensor in arriving]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return arriving if rank + reach < ranks else []


def _tensors(state: ScaledVectors | Steps) -> list[Tensor]:
    if isinstance(state, ScaledVectors):
        return [state.values, state.exponents]
    return [state.matrices.values, state.matrices.exponents, state.entering.values, state.entering.exponents]


def _shapes(jacobians: Tensor, *, vector: bool) -> list[Tensor]:
    """Memory for a vector of each sample, or for a step."""
    _, batch, _, width = jacobians.shape
    shapes: list[tuple[int, ...]] = [(batch, width), (batch, 1)]
    if not vector:
        shapes = [(1, batch, width, width), (1, batch, 1, width), (1, batch, width), (1, batch, 1)]
    return [
        torch.empty(shape, dtype=torch.int32 if place % 2 else jacobians.dtype, device=jacobians.device)
        for place, shape in enumerate(shapes)
    ]
