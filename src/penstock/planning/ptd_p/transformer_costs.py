"""The costs of a transformer on one device: seconds, parameters and bytes for one microbatch, cut t ways.

Layers are cut as Megatron-LM cuts them [Narayanan 2021, section 4.2.3]: the first matrix of each block by columns, the
second by rows, so that a forward has two all-reduces of b s h numbers and a backward two more, in all 8 b s h (t - 1) /
t numbers sent by every device. Embedding and head are cut along the vocabulary and have one each way.

Matrix products follow `AcceleratorModel`; every backward has two of the forward's size. What is not a
product is bound by memory: its time is its bytes, in fused kernels [Narayanan 2021, section 4.4.2].

    per token and hidden number          forward                    backward
    two layer norms                      2 (read 2, write 2)        2 (read 4, write 2)
    two of bias + dropout + add          2 (read 4, write 3)        2 (read 5, write 4)
    bias + GeLU on 4 h, cut t ways       4 (read 2, write 2)        4 (read 4, write 2)
    per attention score, cut t ways
    scale + mask + softmax               read 2, write 2            read 4, write 2
    dropout                              read 2, write 3            read 3, write 2
    per logit, cut t ways                read 6, write 4            read 4, write 2

What is kept for the backward is counted as in Korthikanti et al. (2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4): s b h (10 + 24 / t + 5 a s / (h t)) bytes per layer. Sequence parallelism would cut the
shared 10, too; it is not used here.
"""

from dataclasses import dataclass
from functools import lru_cache

from penstock.errors import PlanError
from penstock.planning.ptd_p.accelerator_models import NUMBER_BYTES, AcceleratorModel
from penstock.planning.ptd_p.ring_links import Ring, tensor_ring
from penstock.values.clusters import Cluster
from penstock.values.profiles import LayerProfile, Profile
from penstock.values.transformers import Transformer


@dataclass(frozen=True, slots=True)
class ModuleCosts:
    """Holds one device's share of the embedding, a layer, or the head."""

    forward_seconds: float
    backward_seconds: float
    """Both with the all-reduces among the t devices, without recomputation."""
    reduce_seconds: float
    """The all-reduces' share of both."""
    parameters: float
    saved_bytes: float
    """The bytes that a microbatch keeps from its forward to its backward."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class TransformerCosts:
    """Holds the costs of all modules for one microbatch on `tensor` devices."""

    microbatch_size: int
    tensor: int
    embedding: ModuleCosts
    layer: ModuleCosts
    head: ModuleCosts
    boundary_bytes: float
    """The whole activation between two layers: b s h numbers, equal on all t devices."""
    tied_parameters: float
    """The embedding of the vocabulary, which the first and the last stage both hold: V h / t."""


@lru_cache(maxsize=4096)
def tensor_parallel_costs(
    transformer: Transformer, accelerator: AcceleratorModel, ring: Ring, microbatch_size: int
) -> TransformerCosts:
    """The costs with layers cut over the t devices of `ring`; raises `PlanError` if t does not divide the heads."""
    if transformer.heads % ring.ranks:
        raise PlanError(
            f"tensor: expected a divisor of the model's {transformer.heads} heads, found {ring.ranks}: "
            "every device gets equally many heads"
        )
    rows = microbatch_size * transformer.sequence
    return TransformerCosts(
        microbatch_size=microbatch_size,
        tensor=ring.ranks,
        embedding=_embedding(transformer, accelerator, ring, rows),
        layer=_layer(transformer, accelerator, ring, microbatch_size),
        head=_head(transformer, accelerator, ring, rows),
        boundary_bytes=float(NUMBER_BYTES * rows * transformer.hidden),
        tied_parameters=transformer.vocabulary * transformer.hidden / ring.ranks,
    )


def profile_of(
    transformer: Transformer,
    accelerator: AcceleratorModel,
    cluster: Cluster,
    *,
    microbatch_size: int = 1,
    tensor_parallel: int = 1,
    scatter_gather: bool = True,
) -> Profile:
    """A profile of l + 2 layers (embedding, layers, head) for one of `tensor_parallel` neighbours in `cluster`.

    Seconds include the all-reduces among the t devices. Bytes are those of one device: weights are cut t ways, and a
    cut sends b s h / t numbers with `scatter_gather`, else b s h. The head holds its own copy of the embedding. Raises
    `PlanError`.
    """
    if tensor_parallel > cluster.devices:
        raise PlanError(
            f"tensor_parallel: expected at most the {cluster.devices} devices of the cluster, found {tensor_parallel}: "
            "cut the layers fewer ways"
        )
    whole = cluster.devices // tensor_parallel * tensor_parallel
    ring = tensor_ring(cluster, whole, tensor_parallel)
    costs = tensor_parallel_costs(transformer, accelerator, ring, microbatch_size)
    cut_bytes = costs.boundary_bytes / (tensor_parallel if scatter_gather else 1)
    logits = NUMBER_BYTES * microbatch_size * transformer.sequence * transformer.vocabulary / tensor_parallel
    modules = [("embedding", costs.embedding, cut_bytes)]
    modules += [(f"layer {index}", costs.layer, cut_bytes) for index in range(transformer.layers)]
    modules += [("head", costs.head, logits)]
    rows = tuple(
        LayerProfile(
            name=name,
            forward_seconds=module.forward_seconds,
            backward_seconds=module.backward_seconds,
            cut_bytes=size,
            saved_bytes=module.saved_bytes,
            parameter_bytes=NUMBER_BYTES * module.parameters,
        )
        for name, module, size in modules
    )
    return Profile(rows, microbatch_size, transformer.name, accelerator.name, tensor_parallel=tensor_parallel)


def _embedding(transformer: Transformer, accelerator: AcceleratorModel, ring: Ring, rows: int) -> ModuleCosts:
    """Sum over the shards of the vocabulary, read a row of each table, add, drop out."""
    numbers = rows * transformer.hidden
    reducing = ring.allreduce_seconds(NUMBER_BYTES * numbers)
    return ModuleCosts(
        forward_seconds=accelerator.moving_seconds((6 + 5) * numbers) + reducing,
        backward_seconds=accelerator.moving_seconds((5 + 6) * numbers),
        reduce_seconds=reducing,
        parameters=transformer.vocabulary * transformer.hidden / ring.ranks + transformer.sequence * transformer.hidden,
        saved_bytes=numbers,
    )


def _layer(transformer: Transformer, accelerator: AcceleratorModel, ring: Ring, microbatch_size: int) -> ModuleCosts:
    t, h, s = ring.ranks, transformer.hidden, transformer.sequence
    rows = microbatch_size * s
    matrices = [(rows, h, 3 * h / t), (rows, h / t, h), (rows, h, 4 * h / t), (rows, 4 * h / t, h)]
    size = h / transformer.heads
    scores = [(s, size, s), (s, s, size)]
    heads = microbatch_size * transformer.heads / t
    forward = sum(accelerator.product_seconds(m, k, n) for m, k, n in matrices)
    forward += sum(accelerator.product_seconds(m, k, n, heads) for m, k, n in scores)
    # The gradients of the two factors: (m x n)(n x k) and (k x m)(m x n).
    backward = sum(accelerator.product_seconds(m, n, k) + accelerator.product_seconds(k, m, n) for m, k, n in matrices)
    backward += sum(
        accelerator.product_seconds(m, n, k, heads) + accelerator.product_seconds(k, m, n, heads) for m, k, n in scores
    )
    weights = heads * s * s
    reducing = 2 * ring.allreduce_seconds(NUMBER_BYTES * rows * h)
    return ModuleCosts(
        forward_seconds=forward + accelerator.moving_seconds((22 + 16 / t) * rows * h + 9 * weights) + reducing,
        backward_seconds=backward + accelerator.moving_seconds((30 + 24 / t) * rows * h + 11 * weights) + reducing,
        reduce_seconds=2 * reducing,
        parameters=(12 * h * h + 7 * h) / t + 6 * h,
        saved_bytes=rows * h * (10 + 24 / t) + 5 * weights,
    )


def _head(transformer: Transformer, accelerator: AcceleratorModel, ring: Ring, rows: int) -> ModuleCosts:
    """The last layer norm, the logits by the embedding's table, and their cross entropy in 32 bits."""
    h, vocabulary = transformer.hidden, transformer.vocabulary / ring.ranks
    logits = rows * vocabulary
    reducing = ring.allreduce_seconds(NUMBER_BYTES * rows * h)
    forward = accelerator.product_seconds(rows, h, vocabulary)
    backward = accelerator.product_seconds(rows, vocabulary, h) + accelerator.product_seconds(h, rows, vocabulary)
    return ModuleCosts(
        forward_seconds=forward + accelerator.moving_seconds(4 * rows * h + 10 * logits),
        backward_seconds=backward + accelerator.moving_seconds(6 * rows * h + 6 * logits) + reducing,
        reduce_seconds=reducing,
        parameters=transformer.hidden * vocabulary,
        saved_bytes=4 * rows * h + 4 * logits,
    )
